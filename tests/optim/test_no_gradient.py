"""Gradients add up, and nothing frozen moves: plain Optax and `jax.tree.map` on a model with buffers, a frozen part, a
counter and a random key. Each recipe is the five lines that a user would write; each other spelling is refused by
words of ours."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal import Module, NoGradient, nn

pytestmark = pytest.mark.usefixtures("optax_may_promote")
XS = jax.random.normal(jax.random.key(1), (4, 8, 3))


@pytest.fixture
def optax_may_promote():
    with jax.numpy_dtype_promotion("standard"):
        yield


class Net(Module):
    first: nn.Linear
    norm: nn.BatchNorm
    last: nn.Linear
    steps: jax.Array
    rng: jax.Array
    name: str = "net"

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


def make():
    one, two = jax.random.split(jax.random.key(0))
    net = Net(
        nn.Linear(3, 3, key=one),
        nn.BatchNorm(3),
        nn.Linear(3, 1, key=two),
        jnp.array(7),
        jax.random.key(5),
    )
    return vernal.freeze(net, "first")


def loss(model, x):
    y, model = nn.apply(model, x)
    return jnp.mean((y - 1.0) ** 2), model


grad = vernal.filter_jit(vernal.filter_grad(lambda model, x: loss(model, x)[0]))


def plain(model):
    """What is trained, as a dictionary."""
    return {
        "norm": (model.norm.weight, model.norm.bias),
        "last": (model.last.weight, model.last.bias),
    }


def put(model, tree):
    """The model with these values for what is trained."""

    def where(m):
        return (m.norm.weight, m.norm.bias, m.last.weight, m.last.bias)

    return vernal.tree_at(where, model, (*tree["norm"], *tree["last"]))


@vernal.filter_jit
def plain_grad(model, x):
    return jax.grad(lambda tree: loss(put(model, tree), x)[0])(plain(model))


def check(got, want, model):
    """Whether what is trained has these values, and everything else is what it was, to the bit."""
    assert jax.tree.structure(got) == jax.tree.structure(model)
    for a, b, c in zip(*map(jax.tree.leaves, (plain(got), want, plain(model))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(a, c)
    assert vernal.tree_equal(put(got, plain(model)), model)


def test_accumulation_from_zeros():
    model, opt = make(), optax.adamw(0.1, weight_decay=0.5)

    @vernal.filter_jit
    def step(model, state, xs):
        def add(total, x):
            return jax.tree.map(jnp.add, total, grad(model, x)), None

        zeros = jax.tree.map(jnp.zeros_like, vernal.params(model))
        total, _ = jax.lax.scan(add, zeros, xs)
        updates, state = opt.update(total, state, vernal.params(model))
        return vernal.apply_updates(model, updates), state

    got, _ = step(model, opt.init(vernal.params(model)), XS)
    total = jax.tree.map(lambda *gs: sum(gs), *(plain_grad(model, x) for x in XS))
    updates, _ = opt.update(total, opt.init(plain(model)), plain(model))
    check(got, optax.apply_updates(plain(model), updates), model)


def test_multi_steps():
    model, opt = make(), optax.MultiSteps(optax.adamw(0.1, weight_decay=0.5), 2)

    @vernal.filter_jit
    def step(model, state, x):
        updates, state = opt.update(grad(model, x), state, vernal.params(model))
        return vernal.apply_updates(model, updates), state

    got, state = model, opt.init(vernal.params(model))
    for x in XS[:2]:
        got, state = step(got, state, x)
    small = optax.adamw(0.1, weight_decay=0.5)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *(plain_grad(model, x) for x in XS[:2]))
    updates, _ = small.update(mean, small.init(plain(model)), plain(model))
    check(got, optax.apply_updates(plain(model), updates), model)


def test_clipping_and_the_norm_of_gradients():
    model = make()
    opt = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    grads = grad(model, XS[0])
    updates, _ = opt.update(grads, opt.init(vernal.params(model)), vernal.params(model))
    got = vernal.apply_updates(model, updates)
    by_hand = plain_grad(model, XS[0])
    size = optax.tree.norm(by_hand)
    np.testing.assert_allclose(optax.tree.norm(grads), size, rtol=1e-5)
    check(got, jax.tree.map(lambda p, g: p - 0.01 * g / size, plain(model), by_hand), model)


@pytest.mark.parametrize("whole", [False, True], ids=["params", "model"])
def test_a_mask_of_weight_decay(whole):
    model = make()
    opt = optax.adamw(0.1, weight_decay=0.5, mask=vernal.trainable(model, "**.weight"))
    updates, _ = opt.update(
        grad(model, XS[0]), opt.init(vernal.params(model)), vernal.params(model)
    )
    got = vernal.apply_updates(model, updates)
    small = optax.adamw(0.1, weight_decay=0.5, mask={"norm": (True, False), "last": (True, False)})
    want, _ = small.update(plain_grad(model, XS[0]), small.init(plain(model)), plain(model))
    check(got, optax.apply_updates(plain(model), want), model)
    if whole:
        # With a mask of what is trained Optax takes the model as it is.
        masked = optax.masked(optax.adamw(0.1), vernal.trainable(model))
        updates, _ = masked.update(grad(model, XS[0]), masked.init(model), model)
        small = optax.adamw(0.1)
        want, _ = small.update(plain_grad(model, XS[0]), small.init(plain(model)), plain(model))
        moved = vernal.apply_updates(model, updates)
        check(moved, optax.apply_updates(plain(model), want), model)


def test_an_average_of_weights():
    model = make()
    new = put(model, jax.tree.map(lambda x: x + 1.0, plain(model)))

    @vernal.filter_jit
    def average(mean, model):
        mean = optax.incremental_update(vernal.params(model), mean, 0.25)
        return mean, vernal.combine(mean, model)

    mean = vernal.params(model)
    for _ in range(2):
        mean, got = average(mean, new)
    check(got, jax.tree.map(lambda x: x + 1 - 0.75**2, plain(model)), model)


def test_groups_with_an_optimiser_each():
    model = make()
    labels = jax.tree.map(
        lambda is_bias: "b" if is_bias else "w", vernal.trainable(model, "**.bias")
    )
    params, grads = vernal.params(model), grad(model, XS[0])
    opt = optax.multi_transform({"b": optax.sgd(1.0), "w": optax.set_to_zero()}, lambda _: labels)
    updates, _ = opt.update(grads, opt.init(params), params)
    got = vernal.apply_updates(model, updates)
    np.testing.assert_array_equal(got.norm.bias, model.norm.bias - grads.norm.bias)
    np.testing.assert_array_equal(got.last.bias, model.last.bias - grads.last.bias)
    assert vernal.tree_equal(
        vernal.tree_at(
            lambda m: (m.norm.bias, m.last.bias), got, (model.norm.bias, model.last.bias)
        ),
        model,
    )


def test_a_vernal_optimizer_takes_both_and_compiles_once():
    model, opt = make(), vernal.Optimizer(optax.adamw, 0.1, weight_decay=0.5)
    step = vernal.filter_jit(lambda model, state, x: opt.update(model, grad(model, x), state))
    got, state = model, opt.init(model)
    want, with_none = model, opt.init(model)
    for x in XS:
        got, state = step(got, state, x)
        nones = jax.tree.map(
            lambda g: None if isinstance(g, NoGradient) else g,
            grad(want, x),
            is_leaf=lambda g: isinstance(g, NoGradient),
        )
        want, with_none = opt.update(want, nones, with_none)
    assert step.trace_count == 1
    check(got, plain(want), model)
    assert sum(x.size for x in jax.tree.leaves(state)) == 1 + 2 * (3 + 3 + 3 + 1)


# Every other spelling.

CURE = r"`vernal.params\(model\)` instead of `model`"
ADAM = optax.adamw(0.1, weight_decay=0.5)
WRONG = {
    "state of the model": lambda m, g: ADAM.update(g, ADAM.init(m), m),
    "state of the model, no parameters": lambda m, g: optax.adam(0.1).update(g, optax.adam(0.1).init(m)),
    "parameters of the model": lambda m, g: ADAM.update(g, ADAM.init(g), m),
    "state of the gradients": lambda m, g: ADAM.update(jax.tree.map(jnp.zeros_like, no_key(m)), ADAM.init(g), g),
    "decay alone": lambda m, g: optax.add_decayed_weights(0.1).update(g, optax.EmptyState(), m),
    "momentum": lambda m, g: optax.sgd(0.1, 0.9).update(g, optax.sgd(0.1, 0.9).init(m)),
    "zeros of the model": lambda m, g: jax.tree.map(jnp.add, jax.tree.map(jnp.zeros_like, m), g),
    "zeros of the model, +": lambda m, g: jax.tree.map(lambda a, b: a + b, jax.tree.map(jnp.zeros_like, m), g),
    "+ zeros of the model": lambda m, g: jax.tree.map(lambda a, b: a + b, g, m),
    "by hand": lambda m, g: jax.tree.map(lambda p, x: p - 0.1 * x, m, g),
    "Optax's apply_updates": lambda m, g: optax.apply_updates(m, g),
    "steps": lambda m, g: optax.MultiSteps(ADAM, 2).update(g, optax.MultiSteps(ADAM, 2).init(m), m),
    "an average of the gradients": lambda m, g: optax.incremental_update(g, jax.tree.map(jnp.zeros_like, m), 0.1),
    "a loop from zeros": lambda m, g: jax.lax.scan(lambda t, _: (g, None), m, None, length=2),
    "Equinox's state": lambda m, g: ADAM.update(g, ADAM.init(vernal.filter(m, vernal.is_inexact_array)), m),
    "Equinox's parameters": lambda m, g: ADAM.update(g, ADAM.init(g), vernal.filter(m, vernal.is_inexact_array)),
    "zeros without integers": lambda m, g: jax.tree.map(jnp.add, vernal.filter(m, vernal.is_inexact_array), g),
    "a branch": lambda m, g: jax.lax.cond(True, lambda: g, lambda: m),
    "jnp": lambda m, g: jnp.square(g.steps),
    "numpy": lambda m, g: np.asarray(g.steps),
    "of numpy": lambda m, g: np.ones(2) * g.steps,
    "a scalar of numpy": lambda m, g: np.float32(2) * g.steps,
}  # fmt: skip


def no_key(model):
    """The model without what `jnp.zeros_like` and Optax refuse by themselves."""
    return vernal.tree_at(lambda m: m.rng, model, jnp.zeros(2))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.sample(3)
def test_a_tree_of_gradients_beside_a_whole_model_is_refused_with_the_cure(name, jit):
    model = no_key(make())
    grads = jax.tree.map(jnp.ones_like, vernal.params(model))
    wrong = vernal.filter_jit(WRONG[name]) if jit else WRONG[name]
    with pytest.raises((TypeError, ValueError), match=CURE):
        wrong(model, grads)


def test_an_update_of_what_is_frozen_is_refused():
    model = no_key(make())
    for where, of in [("first.weight", model.first), ("running_mean", model.norm)]:
        grads = jax.tree.map(jnp.zeros_like, vernal.params(of, None))
        whole = jax.tree.map(jnp.zeros_like, of)
        updates, _ = ADAM.update(whole, ADAM.init(of), of)
        with pytest.raises(TypeError, match=r"an update was given for a frozen array") as e:
            vernal.apply_updates(of, updates)
        assert "vernal.params(model)" in str(e.value) and where.rpartition(".")[2] in str(e.value)
        assert vernal.tree_equal(vernal.apply_updates(of, grads), of)


# The class.


def test_it_is_one_object_without_leaves_everywhere():
    one = NoGradient()
    assert one is NoGradient() is copy.deepcopy(one) is pickle.loads(pickle.dumps(one))
    assert jax.tree.leaves(one) == [] and jax.tree.map(jnp.sin, one) is one
    assert vernal.filter_jit(lambda x: x)(one) is one and jax.jit(lambda x: x)(one) is one
    assert not vernal.is_array_like(one) and repr(one) == vernal.tree_pformat(one) == "NoGradient()"
    hash((one, jax.tree.structure(one)))


def test_combine_fills_it_in():
    model = make()
    params = vernal.params(model)
    assert vernal.tree_equal(vernal.combine(params, model), model)
    assert vernal.tree_equal(vernal.combine(model, params), model)
    twice = jax.tree.map(lambda x: 2 * x, params)
    assert vernal.tree_equal(vernal.params(vernal.combine(twice, model)), twice)
    assert vernal.combine([NoGradient(), None], [None, 1]) == [NoGradient(), 1]


def test_params_are_what_is_trainable_and_have_the_structure_of_gradients():
    model = make()
    for where in (None, "last", lambda m: m.norm.weight):
        params = vernal.params(model, where)
        mask = vernal.trainable(model, where)
        grads = vernal.filter_grad(lambda m: loss(m, XS[0])[0], wrt=mask)(model)
        assert jax.tree.structure(params) == jax.tree.structure(grads)
        for a, b in zip(
            *map(jax.tree.leaves, (params, vernal.partition(model, mask)[0])), strict=True
        ):
            assert a is b


def test_gradients_are_directions_and_second_derivatives_have_their_structure():
    model, x = make(), XS[0]
    grads = grad(model, x)
    out, product = vernal.filter_jvp(lambda m: grad(m, x), (model,), (grads,))
    assert jax.tree.structure(product) == jax.tree.structure(out) == jax.tree.structure(grads)
    tree = plain(model)
    of_plain = jax.grad(lambda tree: loss(put(model, tree), x)[0])
    want = jax.jvp(of_plain, (tree,), (plain(grads),))[1]
    for a, b in zip(jax.tree.leaves(plain(product)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    _, pull = vernal.filter_vjp(lambda m: grad(m, x), model)
    (back,) = pull(grads)
    for a, b in zip(jax.tree.leaves(plain(back)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_rule_may_return_gradients_of_ours():
    @vernal.filter_custom_vjp
    def triple(tree):
        return 3 * tree["x"]

    triple.def_fwd(lambda perturbed, tree: (3 * tree["x"], tree))
    triple.def_bwd(
        lambda tree, g, perturbed, _: jax.tree.map(
            lambda d: g * d, vernal.filter_grad(lambda tree: 3 * tree["x"])(tree)
        )
    )
    assert vernal.filter_grad(triple)({"x": jnp.array(2.0), "n": 3})["x"] == 3.0


@pytest.mark.parametrize("ask", [bool, float, int, len, iter, lambda x: x[0]])
def test_no_gradient_is_no_value_to_python(ask):
    with pytest.raises(TypeError, match="NoGradient is not a number"):
        ask(vernal.NoGradient())


def test_params_called_as_a_model_say_how_they_are():
    class Scaled(Module):
        scale: jax.Array

        def __call__(self, x):
            return x * self.scale.sum()

    model, x = vernal.freeze(Scaled(jnp.ones(3)), "scale"), jnp.ones(3)
    with pytest.raises(AttributeError, match=r"vernal\.combine\(params, model\)"):
        vernal.params(model)(x)
    assert vernal.combine(vernal.params(model), model)(x).tolist() == [3.0, 3.0, 3.0]
    assert not hasattr(NoGradient(), "__jax_array__")
