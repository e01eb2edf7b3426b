"""Plain `jax` functions on models that hold functions, strings, ints and None: no filtering anywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vernal import Module, Partial, field


class Linear(Module):
    weight: jax.Array
    bias: Any
    features: int
    use_bias: bool

    def __init__(self, i, o, key, use_bias=True):
        self.weight = jax.random.normal(key, (o, i)) / 3
        self.bias = jnp.zeros(o) if use_bias else None
        self.features = o
        self.use_bias = use_bias

    def __call__(self, x):
        y = self.weight @ x
        return y if self.bias is None else y + self.bias


class Dropout(Module):
    p: float = 0.5
    mode: str = "off"

    def __call__(self, x):
        return x if self.mode == "off" else x * (1 - self.p)


class Net(Module):
    layers: list
    activation: Any
    final: Any = None
    sizes: tuple = (3, 8, 2)
    name: str = "net"
    options: dict = field(
        default_factory=lambda: {"norm": None, "init": "he", "scale": 1.0, "f": jnp.tanh}
    )
    note: Any = field(static=True, default="static")

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.layers = [
            Linear(3, 8, k1),
            jax.nn.relu,
            Dropout(),
            jnp.ravel,
            Linear(8, 2, k2, use_bias=False),
        ]
        self.activation = jax.nn.gelu
        self.options = {"norm": None, "init": "he", "scale": 1.0, "f": jnp.tanh}

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.options["scale"] * self.activation(x)

    def loss(self, x):
        return jnp.sum(self(x) ** 2)


@pytest.fixture
def net(getkey):
    return Net(getkey())


X = jnp.array([0.5, -1.0, 2.0])


def test_leaves_are_arrays_only(net):
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(net))
    assert len(jax.tree.leaves(net)) == 3


def test_jit(net):
    assert jnp.allclose(jax.jit(net)(X), net(X), atol=1e-6)
    assert jnp.allclose(jax.jit(lambda m, x: m(x))(net, X), net(X), atol=1e-6)
    again = jax.jit(lambda m: m)(net)
    assert again.layers[1] is jax.nn.relu
    assert again.name == "net"
    assert again.final is None


def test_grad(net):
    grads = jax.grad(lambda m: m.loss(X))(net)
    assert jax.tree.structure(grads) == jax.tree.structure(net)
    assert grads.activation is jax.nn.gelu

    def by_hand(w0, b0, w1):
        return jnp.sum(jax.nn.gelu(w1 @ jax.nn.relu(w0 @ X + b0)) ** 2)

    leaves = net.layers[0].weight, net.layers[0].bias, net.layers[4].weight
    for ours, theirs in zip(
        jax.tree.leaves(grads), jax.grad(by_hand, (0, 1, 2))(*leaves), strict=True
    ):
        assert jnp.allclose(ours, theirs, atol=1e-5)
    assert jax.value_and_grad(lambda m: m.loss(X))(net)[1].layers[4].bias is None


def test_scan_carry_and_scan_over_stacked_layers(net, getkey):
    def step(m, x):
        grads = jax.grad(lambda m: m.loss(x))(m)
        return jax.tree.map(lambda p, g: p - 0.01 * g, m, grads), m.loss(x)

    trained, losses = jax.lax.scan(step, net, jnp.tile(X, (5, 1)))
    assert jax.tree.structure(trained) == jax.tree.structure(net)
    assert losses[-1] < losses[0]
    keys = jax.random.split(getkey(), 4)
    stack = jax.vmap(lambda key: Linear(3, 3, key))(keys)
    out, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(layer(x)), None), X, stack)
    assert out.shape == (3,)


def test_cond_switch_while_and_fori(net, getkey):
    other = Net(getkey())
    picked = jax.lax.cond(True, lambda a, b: a, lambda a, b: b, net, other)
    assert jnp.allclose(picked(X), net(X), atol=1e-6)
    assert jax.lax.cond(False, net, other, X).shape == (2,)
    assert jax.lax.switch(jnp.array(1), [net, other], X).shape == (2,)
    halved = jax.lax.fori_loop(0, 2, lambda i, m: jax.tree.map(lambda p: p / 2, m), net)
    assert jnp.allclose(halved.layers[0].weight, net.layers[0].weight / 4)
    small = jax.lax.while_loop(
        lambda m: m.loss(X) > 1e-3, lambda m: jax.tree.map(lambda p: p / 2, m), net
    )
    assert small.loss(X) <= 1e-3


def test_vmap(net, getkey):
    batch = jnp.stack([X, 2 * X])
    assert jax.vmap(net)(batch).shape == (2, 2)
    ensemble = jax.vmap(Net)(jax.random.split(getkey(), 5))
    assert jax.vmap(lambda m, x: m(x), in_axes=(0, None))(ensemble, X).shape == (5, 2)
    axes = jax.tree.map(lambda _: 0, net)
    assert jax.vmap(lambda m, x: m(x), in_axes=(axes, None))(ensemble, X).shape == (5, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.adam(1e-3),
        lambda: optax.sgd(1e-2, momentum=0.9),
        lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        lambda: optax.adamw(1e-2, mask=lambda m: jax.tree.map(lambda p: p.ndim > 1, m)),
        lambda: optax.MultiSteps(optax.adam(1e-2), 2),
    ],
)
def test_optax(net, make):
    optimiser = make()
    state = optimiser.init(net)

    @jax.jit
    def step(m, state):
        grads = jax.grad(lambda m: m.loss(X))(m)
        updates, state = optimiser.update(grads, state, m)
        return optax.apply_updates(m, updates), state

    trained = net
    # Optax counts its steps in integers and multiplies them with floats.
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(4):
            trained, state = step(trained, state)
        assert step._cache_size() == 1
    assert jax.tree.structure(trained) == jax.tree.structure(net)
    assert trained.loss(X) < net.loss(X)


def test_optax_multi_transform_with_labels(net):
    labels = jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", net)
    # A tree that is callable is taken for a function that makes one.
    optimiser = optax.multi_transform(
        {"matrix": optax.sgd(1e-2), "vector": optax.set_to_zero()}, lambda _: labels
    )
    state = optimiser.init(net)
    grads = jax.grad(lambda m: m.loss(X))(net)
    updates, _ = optimiser.update(grads, state, net)
    assert (updates.layers[0].bias == 0).all()


def test_other_transformations(net):
    assert jax.checkpoint(lambda m, x: m(x))(net, X).shape == (2,)
    assert jax.eval_shape(lambda m, x: m(x), net, X).shape == (2,)
    assert jax.linearize(lambda m: m.loss(X), net)[1](net).shape == ()
    assert jax.jvp(lambda m: m.loss(X), (net,), (net,))[1].shape == ()
    assert jax.vjp(lambda m: m(X), net)[1](jnp.ones(2))[0].name == "net"
    assert jax.device_put(net).name == "net"
    assert jax.block_until_ready(net).name == "net"
    assert jax.make_jaxpr(lambda m: m(X))(net).in_avals
    hessian = jax.jacfwd(jax.grad(lambda m: m.loss(X)))(net)
    assert hessian.layers[0].bias.layers[0].bias.shape == (8, 8)
    exported = jax.export.export(
        jax.jit(lambda leaves: jax.tree.unflatten(jax.tree.structure(net), leaves)(X))
    )(jax.tree.leaves(net))
    assert exported.out_avals[0].shape == (2,)


def test_one_trace_for_equal_models_and_another_for_another_structure(net, getkey):
    count = []
    f = jax.jit(lambda m, x: count.append(1) or m(x))
    f(net, X)
    f(Net(getkey()), X)
    f(jax.tree.map(lambda p: p + 1, net), X)
    assert len(count) == 1


# What users of Equinox reported, in their own shape.


def test_eqx_69_optax_on_a_model_with_relu(getkey):
    class MLP(Module):
        layers: list
        activation: Any = jax.nn.relu

        def __call__(self, x):
            return self.layers[1](self.activation(self.layers[0](x)))

    model = MLP([Linear(3, 4, getkey()), Linear(4, 1, getkey())])
    assert optax.adam(1e-3).init(model) is not None


def test_eqx_116_jit_of_a_model_with_python_numbers(getkey):
    class Attention(Module):
        proj: Linear
        heads: int
        use_bias: bool = False
        dropout: Dropout = Dropout()

        def __call__(self, x):
            return self.proj(x).reshape(self.heads, -1)

    assert jax.jit(lambda m, x: m(x))(Attention(Linear(3, 4, getkey()), 2), X).shape == (2, 2)


def test_eqx_149_pooling_layer_with_functions_and_tuples():
    class Pool(Module):
        init: float
        operation: Any
        kernel: tuple
        stride: tuple

        def __call__(self, x):
            return jax.lax.reduce_window(
                x, self.init, self.operation, self.kernel, self.stride, "VALID"
            )

    pool = Pool(-jnp.inf, jax.lax.max, (2, 2), (2, 2))
    assert jax.jit(lambda p, x: p(x))(pool, jnp.ones((4, 4))).shape == (2, 2)
    assert jax.jit(pool)(jnp.ones((4, 4))).shape == (2, 2)


def test_eqx_361_and_865_models_with_and_without_functions_behave_alike(getkey):
    for model in (Linear(3, 3, getkey()), Net(getkey())):
        assert jax.jit(lambda m, x: m(x))(model, X).ndim == 1
        assert jax.value_and_grad(lambda m: jnp.sum(m(X)))(model)[0].shape == ()


def test_eqx_389_cond_on_models(net):
    out = jax.lax.cond(
        jnp.array(True), lambda m: jax.tree.map(lambda p: p * 2, m), lambda m: m, net
    )
    assert jnp.allclose(out.layers[0].weight, 2 * net.layers[0].weight)


def test_eqx_630_706_scan_with_a_model_in_the_carry(net):
    def step(carry, _):
        model, total = carry
        return (model, total + model.loss(X)), None

    (model, total), _ = jax.lax.scan(step, (net, 0.0), None, length=3)
    assert jnp.allclose(total, 3 * net.loss(X), rtol=1e-5)
    assert model.activation is jax.nn.gelu


def test_eqx_1006_lambda_layers(getkey):
    model = Net(getkey())
    layers = [Linear(3, 2, getkey()), Partial(jnp.clip, min=-1.0, max=1.0), lambda x: x * 2]

    class Sequential(Module):
        layers: list

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    assert jax.jit(lambda m, x: m(x))(Sequential([model, *layers[1:]]), X).shape == (2,)
    assert jax.grad(lambda m: m(X).sum())(Sequential(layers)).layers[0].weight.shape == (2, 3)


def test_eqx_1011_switch_over_methods_of_modules_under_vmap(net, getkey):
    other = Net(getkey())
    branches = [net.loss, other.loss]
    out = jax.vmap(lambda i, x: jax.lax.switch(i, branches, x))(
        jnp.array([0, 1]), jnp.stack([X, X])
    )
    assert jnp.allclose(out, jnp.array([net.loss(X), other.loss(X)]), rtol=1e-5)


def test_eqx_1127_1168_fully_compatible_with_normal_jax(net):
    learnable = Partial(net, X)
    assert jax.grad(lambda f: jnp.sum(f()))(learnable).args[0].shape == (3,)
    assert jax.jit(jax.vmap(jax.grad(net.loss)))(jnp.stack([X, X])).shape == (2, 3)


def test_numpy_models_train_too():
    class M(Module):
        w: Any
        f: Any = np.tanh

    m = M(np.ones(2, np.float32))
    assert jax.grad(lambda m: jnp.sum(jnp.asarray(m.w) ** 2))(m).w.tolist() == [2, 2]
