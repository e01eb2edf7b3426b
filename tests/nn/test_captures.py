"""`nn.apply(..., capture=...)`: what layers return, against calling them one after another."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import nn
from vernal.loops import while_loop

XS = jnp.linspace(-1.0, 2.0, 15).reshape(5, 3)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


class Net(vernal.Module):
    """A layer under each transformation, and one that is called twice."""

    norm: nn.BatchNorm
    stack: nn.Stack
    twice: nn.Linear
    head: nn.Sequential

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.norm = nn.BatchNorm(3)
        self.stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 4, key=a, checkpoint=True)
        self.twice = nn.SpectralNorm(nn.Linear(3, 3, key=b), key=c, inference=True)
        self.head = nn.Sequential([nn.Linear(3, 2, key=c), nn.Lambda(jnp.tanh)])

    def __call__(self, xs):
        xs = jax.jit(self.stack)(self.norm(xs))
        xs = jax.checkpoint(self.twice)(self.twice(xs))
        return jax.vmap(self.head)(xs)


NAMES = ["norm", "stack", "stack.layers", "twice", "twice.layer", "head", "head.layers.0"]


def by_hand(net, xs):
    seen = {}
    seen["norm"] = xs = nn.apply(net.norm, xs)[0]
    steps = []
    for layer in net.stack:
        xs = layer(xs)
        steps.append(xs)
    seen["stack"], seen["stack.layers"] = xs, jnp.stack(steps)
    xs = net.twice(net.twice(xs))
    seen["twice"] = seen["twice.layer"] = xs
    seen["head.layers.0"] = net.head[0](xs)
    seen["head"] = net.head(xs)
    return seen


def test_layers_are_captured_by_path_inside_of_transformations(getkey):
    net = Net(getkey())
    run = jax.jit(lambda net, xs: nn.apply(net, xs, capture=NAMES))
    y, after, seen = run(net, XS)
    expected, plain = jax.jit(nn.apply)(net, XS)
    assert sorted(seen) == sorted(NAMES) and jax.tree.structure(after) == jax.tree.structure(net)
    jax.tree.map(close, (y, after), (expected, plain))
    for name, value in by_hand(net, XS).items():
        close(seen[name], value)
    _, _, some = nn.apply(net, XS, capture="**.layers.*")
    assert sorted(some) == ["head.layers.0", "head.layers.1"]


def test_captured_values_have_derivatives(getkey):
    net = Net(getkey())

    def loss(seen):
        return sum((seen[name] ** 2).sum() for name in ("stack.layers", "head.layers.0", "twice"))

    grads = jax.jit(jax.grad(lambda net, xs: loss(nn.apply(net, xs, capture=NAMES)[2]), (0, 1)))
    expected = jax.jit(jax.grad(lambda net, xs: loss(by_hand(net, xs)), (0, 1)))
    assert vernal.tree_allclose(grads(net, XS), expected(net, XS), rtol=1e-4, atol=1e-5)


def test_maps_around_the_call_and_inside_of_it_and_gradients_inside(getkey):
    mlp = nn.MLP(3, 1, 4, depth=1, key=getkey())
    hidden = jax.vmap(mlp.layers[0])(XS)
    capture = {"capture": "layers.0"}
    close(jax.vmap(lambda x: nn.apply(mlp, x, **capture)[2]["layers.0"])(XS), hidden)

    def maps(mlp, xs):
        # What is the same for all elements is there for each of them.
        return jax.vmap(jax.vmap(mlp, in_axes=0), in_axes=None, axis_size=2)(xs)

    seen = nn.apply(mlp, XS, method=maps, **capture)[2]["layers.0"]
    close(seen, jnp.stack([hidden, hidden]))
    gradient, _, seen = nn.apply(
        mlp, XS[0], method=lambda m, x: jax.grad(lambda x: m(x)[0])(x), **capture
    )
    close(seen["layers.0"], hidden[0])
    close(gradient, jax.grad(lambda x: mlp(x)[0])(XS[0]))
    # The last one, of a loop over something else, is kept with all steps.
    steps = nn.apply(mlp, XS, method=lambda m, xs: jax.lax.map(m, xs), **capture)[2]["layers.0"]
    close(steps, hidden)


class Pair(vernal.Module):
    """Returns more than an array, through its base class and its own call."""

    inner: nn.Linear

    def __call__(self, x):
        return self.inner(x), "text"


class Louder(Pair):
    def __call__(self, x):
        y, text = super().__call__(x)
        return 2 * y, text


def test_what_is_captured_is_what_the_layer_returns_whatever_that_is(getkey):
    model = [Louder(nn.Linear(3, 2, key=getkey()))]
    y, _, seen = nn.apply(model, XS[0], method=lambda m, x: m[0](x)[0], capture=["[0]", "*.inner"])
    close(seen["0"][0], y)
    close(seen["0"][0], 2 * seen["0.inner"])
    assert seen["0"][1] == "text"


def test_a_call_inside_of_a_call_captures_its_own_layers(getkey):
    outer = nn.Sequential([nn.Linear(3, 3, key=getkey()), nn.Linear(3, 3, key=getkey())])

    def method(model, x):
        x = model[0](x)
        _, _, seen = nn.apply(model, x, capture="layers.0")
        return seen["layers.0"]

    y, _, seen = nn.apply(outer, XS[0], method=method, capture="layers.0")
    close(seen["layers.0"], outer[0](XS[0]))
    close(y, outer[0](outer[0](XS[0])))


def branches(model, x):
    return jax.lax.cond(x[0] > 0, model, lambda x: x, x)


def until(model, x):
    return jax.lax.while_loop(lambda x: x[0] > 0, model, x)


def checkpointed(model, x):
    return while_loop(lambda x: x[0] > 0, model, x, max_steps=4, kind="checkpointed")


def ruled(model, x):
    fn = jax.custom_jvp(lambda x: model(x))
    fn.defjvp(lambda p, t: (fn(*p), t[0]))
    return fn(x)


@pytest.mark.parametrize("method", [branches, until, checkpointed, ruled], ids=lambda f: f.__name__)
def test_where_it_is_not_known_how_often_a_layer_runs_it_is_not_captured(method, getkey):
    model = nn.Sequential([nn.Linear(3, 3, key=getkey())])
    with pytest.raises(NotImplementedError, match="cannot be captured inside the operation"):
        nn.apply(model, XS[0], method=method, capture="layers.0")


def test_paths_that_mean_no_layer_and_layers_that_are_not_called_are_refused(getkey):
    net = Net(getkey())
    for path in ("hed", "twice.layer.weight", "head.layers"):
        with pytest.raises(
            ValueError,
            match=r"(?s)paths do not match the tree.*paths of layers.*a module that is called",
        ):
            nn.apply(net, XS, capture=path)
    with pytest.raises(ValueError, match=r"(?s)were not called.*got: .stack."):
        nn.apply(net, XS, capture="stack", method=lambda net, xs: net.norm(xs))
    for wrong in (1, [1], lambda m: m.head):
        with pytest.raises(TypeError, match="captures are chosen by path"):
            inspect.unwrap(nn.apply)(net, XS, capture=wrong)


def test_a_wildcard_leaves_out_what_is_not_called_unless_nothing_is(getkey):
    attention = nn.MultiheadAttention(2, 4, key=getkey())
    x = jnp.ones((3, 4))
    _, _, seen = nn.apply(attention, x, x, x, capture=["**", "output_proj"])
    assert "output_proj" in seen and "dropout" not in seen
    with pytest.raises(ValueError, match=r"(?s)were not called.*got: 'dropout'"):
        nn.apply(attention, x, x, x, capture=["**", "dropout"])
