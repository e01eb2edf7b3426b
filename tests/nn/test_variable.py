"""`nn.Variable`: values that a call reads and replaces, against loops by hand; what their arrays are called."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import nn
from vernal.trees import named_leaves

X = jnp.array([0.3, -0.7, 1.1])


class Layer(nn.StatefulLayer):
    """Depends on its variables, which depend on what it was given: the order of calls matters."""

    scale: jax.Array
    last: nn.Variable
    sums: nn.Variable

    def __init__(self):
        self.scale = jnp.array(1.5)
        self.last = nn.Variable(jnp.zeros(3))
        self.sums = nn.Variable({"x": jnp.zeros(()), "calls": (0,)})

    def __call__(self, x, state=None, *, key=None):
        if state is not None:
            last, sums = state.get(self.last), state.get(self.sums)
            new = {"x": sums["x"] + x.sum(), "calls": (sums["calls"][0] + 1,)}
            state = state.set(self.last, 0.5 * last + x).set(self.sums, new)
            return self.scale * (x + jnp.sin(0.5 * last + x)), state
        last, sums = self.last.value, self.sums.value
        x = self.last.update(0.5 * last + x, x)
        # Both read what was left just now.
        new = {"x": sums["x"] + x.sum(), "calls": (self.sums.value["calls"][0] + 1,)}
        x = self.sums.update(new, x)
        return self.scale * (x + jnp.sin(self.last.value))


def by_hand(scale, n, x):
    """The result of so many calls, and the values of the variables."""
    last, total = jnp.zeros(3), 0.0
    for _ in range(n):
        last, total = 0.5 * last + jax.lax.stop_gradient(x), total + jax.lax.stop_gradient(x).sum()
        x = scale * (x + jnp.sin(last))
    return x, last, total, n


def twice(layer, x):
    return layer(layer(x))


def in_loop(layer, x):
    return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=4)[0]


def in_branches(layer, x):
    x = jax.lax.cond(x[0] > 0, layer, lambda x: x, x)
    return jax.lax.cond(x[0] > 1e9, twice_of(layer), layer, x)


def twice_of(layer):
    return lambda x: twice(layer, x)


def in_programs(layer, x):
    return jax.checkpoint(jax.jit(layer))(jax.jit(jax.checkpoint(layer))(x))


def in_a_map(layer, x):
    # The elements agree, so they may share the variables.
    xs = jnp.stack([x, 2 * x])
    _, y = jax.vmap(lambda row: (row, layer(x)))(xs)
    return layer(y[0])


WAYS = {twice: 2, in_loop: 4, in_branches: 2, in_programs: 2, in_a_map: 2}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_values_and_results_are_those_of_a_loop_by_hand(way):
    n, layer = WAYS[way], Layer()
    y, after = jax.jit(lambda layer, x: nn.apply(layer, x, method=way))(layer, X)
    expected = by_hand(layer.scale, n, X)
    found = y, after.last.value, after.sums.value["x"], after.sums.value["calls"][0]
    for ours, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-5)
    # The model that was given is as it was.
    assert not layer.last.value.any() and layer.sums.value["calls"][0] == 0


@pytest.mark.parametrize("way", [twice, in_loop, in_programs], ids=lambda way: way.__name__)
def test_the_derivative_is_that_of_the_results_and_passes_through_no_variable(way):
    def loss(layer, x):
        y, layer = nn.apply(layer, x, method=way)
        return (y**2).sum() + (layer.last.value**2).sum() + layer.sums.value["x"]

    def expected(scale, x):
        return (by_hand_through(scale, WAYS[way], x) ** 2).sum()

    def by_hand_through(scale, n, x):
        last = jnp.zeros(3)
        for _ in range(n):
            # What a variable holds is constant, also where it is read at once.
            last = jax.lax.stop_gradient(0.5 * last + x)
            x = scale * (x + jnp.sin(last))
        return x

    layer = Layer()
    grads, dx = vernal.filter_jit(vernal.filter_grad(loss, wrt=(0, 1)))(layer, X)
    of_scale, of_x = jax.grad(expected, argnums=(0, 1))(layer.scale, X)
    np.testing.assert_allclose(grads.scale, of_scale, rtol=1e-5)
    np.testing.assert_allclose(dx, of_x, rtol=1e-5)
    assert grads.last.value == vernal.NoGradient() and jax.tree.leaves(grads.sums) == []


def test_a_state_outside_of_the_model_has_the_same_numbers():
    inside = Layer()
    outside, state = nn.make_with_state(Layer)()
    for i in range(3):
        y, inside = nn.apply(inside, X + i)
        expected, state = outside(X + i, state)
        np.testing.assert_array_equal(y, expected)
    assert vernal.tree_equal(inside.last.value, state.get(outside.last))
    assert vernal.tree_equal(inside.sums.value, state.get(outside.sums))
    with pytest.raises(RuntimeError, match="the model does not hold its state"):
        outside.last.update(X, X)


NAMES = ["scale", "last", "sums.calls.0", "sums.x"]


def test_a_variable_adds_nothing_to_the_names_of_its_arrays(tmp_path):
    layer = nn.apply(Layer(), X)[1]
    model = {"first": [layer]}
    assert list(named_leaves(layer)) == NAMES
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    texts = [".scale", ".last", ".sums['calls'][0]", ".sums['x']"]
    assert [*map(jax.tree_util.keystr, paths)] == [f"['first'][0]{text}" for text in texts]
    assert [vernal.show.path_text(path, "m") for path in paths] == [
        f"m['first'][0]{text}" for text in texts
    ]
    file = tmp_path / "layer.safetensors"
    vernal.save(file, model)
    assert [*vernal.saving.to_torch(model)] == [f"first.0.{name}" for name in NAMES]
    loaded = vernal.load(file, {"first": [Layer()]})
    assert vernal.tree_equal(loaded, model) and loaded["first"][0].sums.value["calls"][0] == 1
    state = {name: np.asarray(x) for name, x in vernal.saving.to_torch(model).items()}
    assert vernal.tree_equal(vernal.saving.from_torch({"first": [Layer()]}, state), model)
    assert vernal.tree_equal(pickle.loads(pickle.dumps(model)), model)


def test_a_file_with_other_names_is_refused_and_can_be_renamed(tmp_path):
    norm = nn.apply(nn.BatchNorm(3), jnp.stack([X, 2 * X]))[1]
    old = {
        name: {"init": x} if name.startswith(("running", "num")) else x
        for name, x in named_leaves(norm).items()
    }
    file = tmp_path / "old.safetensors"
    vernal.save(file, old)
    rules = {"running_*": "running_*.init", "num_*": "num_*.init"}
    with pytest.raises(
        ValueError, match=r"(?s)running_mean: missing.*running_mean\.init: not expected"
    ):
        vernal.load(file, nn.BatchNorm(3))
    assert vernal.tree_equal(vernal.load(file, nn.BatchNorm(3), rename=rules), norm)


def test_patterns_mean_a_variable_by_the_name_of_its_field():
    model = nn.Sequential([nn.BatchNorm(3), jnp.tanh, Layer()])
    new = vernal.tree_at("layers.0.running_mean", model, X)
    np.testing.assert_array_equal(new[0].running_mean.value, X)
    assert vernal.tree_equal(new, vernal.tree_at(lambda m: m[0].running_mean.value, model, X))
    assert new.layers[0].running_mean.stored is X
    both = vernal.tree_at(
        lambda m: (m[2].last.value, m[2].sums.value),
        model,
        (X, {"x": jnp.ones(()), "calls": (jnp.array(7),)}),
    )
    np.testing.assert_array_equal(both[2].last.value, X)
    assert both[2].sums.value["calls"][0] == 7
    (seven,) = jax.tree.leaves(
        vernal.tree_at("**.sums.calls", both, replace_fn=lambda x: x)[2].sums.value["calls"]
    )
    assert seven == 7
    mask = vernal.trainable(model)
    assert (mask[0].weight, mask[0].running_mean.value, mask[2].sums.value["x"]) == (
        True,
        False,
        False,
    )


def test_what_is_frozen_by_name_stays_equal_to_the_bit():
    xs = jnp.stack([X, 2 * X, -X])
    norm = nn.apply(nn.BatchNorm(3), xs)[1]
    model = nn.Sequential([norm, Layer()])
    tuned = vernal.freeze(model, ["**.running_mean", "layers.1.sums"])
    y, after = nn.apply(tuned, 3 * xs, method=lambda m, xs: m[1](m[0](xs)[0]))
    # A norm with a frozen mean uses its statistics, and one part of the layer goes on.
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        before = getattr(norm, name).value
        np.testing.assert_array_equal(getattr(after[0], name).value, before)
    np.testing.assert_array_equal(after[1].sums.value["x"], 0)
    np.testing.assert_allclose(after[1].last.value, norm(3 * xs, inference=True)[0], rtol=1e-6)
    again = vernal.unfreeze(tuned, "**.sums")
    assert nn.apply(again[1], X)[1].sums.value["calls"][0] == 1


@pytest.mark.parametrize("where", ["vectors", "vectors.0", "vectors.1"])
@pytest.mark.sample(3)
def test_a_variable_that_is_frozen_in_part_stays_as_a_whole(where):
    norm = nn.SpectralNorm(nn.Linear(3, 3, key=jax.random.key(0)), key=jax.random.key(1))
    tuned = vernal.freeze(norm, where)
    y, after = nn.apply(tuned, X)
    assert vernal.tree_equal(after, tuned)
    np.testing.assert_allclose(y, nn.inference_mode(norm)(X), rtol=1e-6)
    pair = nn.Variable((jnp.zeros(3), jnp.zeros(3)))
    _, kept = nn.apply(
        vernal.freeze(pair, where.removeprefix("vectors.").replace("vectors", "**")),
        X,
        method=lambda pair, x: pair.update((x, x), x),
    )
    assert not any(value.any() for value in kept.value)


def test_nobody_takes_the_value_or_something_else_is_left():
    with pytest.raises(RuntimeError, match=r"nn\.apply"):
        Layer()(X)
    for value in (1.0, jnp.zeros(2), jnp.zeros(3, int), (jnp.zeros(3),), None):
        with pytest.raises(
            ValueError, match=r"(?s)has another structure, shape or dtype.*where: Variable\.update"
        ):
            nn.apply(Layer(), X, method=lambda m, x, new=value: m.last.update(new, x))


class Careless(vernal.Module):
    last: nn.Variable

    def __call__(self, x, *, key=None):
        return self.last.update(x[:2], x)


def test_the_variable_that_was_left_something_else_is_named():
    model = nn.Sequential([Careless(nn.Variable(jnp.zeros(3)))])
    with pytest.raises(ValueError, match="has another structure, shape or dtype") as error:
        nn.apply(model, X)
    assert "model.layers[0].last" in "".join(error.value.__notes__)


def test_a_mapped_layer_whose_elements_disagree_is_refused_and_one_per_element_is_not():
    xs = jnp.stack([X, 2 * X])
    with pytest.raises(ValueError, match="disagree about a state that they share"):
        nn.apply(Layer(), xs, method=lambda m, xs: jax.vmap(m)(xs))
    layers = vernal.filter_vmap(Layer, axis_size=2)()
    ys, after = nn.apply(layers, xs, method=lambda m, xs: jax.vmap(lambda m, x: m(x))(m, xs))
    for i, x in enumerate(xs):
        y, last, total, _ = by_hand(1.5, 1, x)
        np.testing.assert_allclose(ys[i], y, rtol=1e-6)
        np.testing.assert_allclose(after.last.value[i], last, rtol=1e-6)
        np.testing.assert_allclose(after.sums.value["x"][i], total, rtol=1e-5)


def test_a_number_put_in_the_place_of_a_value_is_refused_where_it_is_read():
    norm = vernal.tree_at("num_batches_tracked", nn.BatchNorm(3), float("inf"))
    with pytest.raises(TypeError, match=r"(?s)a variable must hold arrays only.*jnp\.asarray"):
        nn.apply(norm, jnp.ones((8, 3)))


def test_assigning_the_value_says_what_to_write():
    with pytest.raises(AttributeError, match=r"x = self\.variable\.update\(new, x\)"):
        nn.Variable(jnp.zeros(())).value = jnp.ones(())
