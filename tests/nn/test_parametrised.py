"""What stands in the place of an array or a layer: `Parametrised`, and `resolve`."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import vernal
from vernal import nn, tree_at


class LoRA(nn.Parametrised):
    weight: jax.Array = vernal.field(trainable=False)
    a: jax.Array
    b: jax.Array

    def value(self):
        return self.weight + self.a @ self.b


class Int8(nn.Parametrised):
    rounded: jax.Array
    scale: jax.Array

    def value(self):
        return self.rounded.astype(self.scale.dtype) * self.scale


class Doubled(nn.Parametrised):
    inner: object

    def value(self):
        return 2 * self.inner


class PlainLinear(vernal.Module):
    """As somebody would write it, with no annotation that is checked at the call."""

    weight: object

    def __call__(self, x):
        return self.weight @ x


def lora(weight, seed=7):
    a, b = jax.random.split(jax.random.key(seed))
    *stack, rows, columns = weight.shape
    a = jax.random.normal(a, (*stack, rows, 2), weight.dtype)
    return LoRA(weight, a, jax.random.normal(b, (*stack, 2, columns), weight.dtype))


def with_lora(layer, where="weight"):
    return tree_at(where, layer, replace_fn=lora)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def scanned(model, x):
    return lax.scan(lambda x, _: (jnp.tanh(nn.resolve(model)(x)), None), x, length=3)[0]


def stack():
    return nn.Stack(lambda key: nn.Linear(3, 3, key=key), 3, key=jax.random.key(0))


def linear():
    return nn.Linear(3, 3, key=jax.random.key(0))


def listed(stack, x):
    for layer in stack:
        x = layer(x)
    return x


def resolved_listed(stack, x):
    for layer in stack:
        x = nn.resolve(layer)(x)
    return x


# How a model is called with its node, how the plain model is called, where the node is.
PLACES = {
    "a layer": (lambda m, x: nn.resolve(m)(x), lambda m, x: m(x), linear, "weight"),
    "nn.apply": (lambda m, x: nn.apply(m, x)[0], lambda m, x: m(x), linear, "weight"),
    "a scan": (scanned, scanned, linear, "weight"),
    "a batch": (
        lambda m, x: jax.vmap(lambda x: nn.resolve(m)(x))(jnp.stack([x, 2 * x])),
        lambda m, x: m(jnp.stack([x, 2 * x])),
        linear,
        "weight",
    ),
    "a Stack": (lambda m, x: nn.resolve(m)(x), listed, stack, "layers.weight"),
    "a Stack in nn.apply": (lambda m, x: nn.apply(m, x)[0], listed, stack, "layers.weight"),
    "layers of a Stack": (resolved_listed, listed, stack, "layers.weight"),
}


@pytest.mark.parametrize(("call", "plain", "make", "where"), PLACES.values(), ids=PLACES)
@pytest.mark.sample(3)
def test_values_are_the_plain_models_and_gradients_are_slopes(call, plain, make, where):
    with jax.enable_x64(True):
        bare = jax.tree.map(lambda x: x.astype(jnp.float64), make())
        model, x = with_lora(bare, where), jnp.array([0.3, -0.5, 0.2])
        merged = tree_at(where, bare, replace_fn=lambda w: lora(w).value())
        both = jax.jit(vernal.filter_value_and_grad(lambda model: (call(model, x) ** 2).sum()))
        value, grads = both(model)
        np.testing.assert_allclose(value, (plain(merged, x) ** 2).sum(), rtol=1e-12)
        parameters, rest = vernal.partition(model, vernal.trainable(model))
        step = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape), parameters)
        slope = sum(map(jnp.vdot, jax.tree.leaves(grads), jax.tree.leaves(step)))

        def along(h):
            moved = jax.tree.map(lambda x, s: x + h * s, parameters, step)
            return both(vernal.combine(moved, rest))[0]

        np.testing.assert_allclose(slope, (along(1e-5) - along(-1e-5)) / 2e-5, rtol=1e-6)
        assert len(jax.tree.leaves(grads)) == 3


def test_what_is_frozen_is_not_trained_and_nothing_else_is(getkey):
    model = vernal.freeze(nn.Sequential([linear(), linear()]), "**")
    model = with_lora(model, "layers[0].weight")
    model = vernal.freeze(model, "layers.0.weight.b")
    optimiser = vernal.Optimizer(optax.sgd, 0.1)
    grads = vernal.filter_grad(lambda m: (nn.resolve(m)(jnp.ones(3)) ** 2).sum())(model)
    after, _ = optimiser.update(model, grads, optimiser.init(model))
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), model, after)
    assert [name for name, x in vernal.trees.named_leaves(changed).items() if x] == [
        "layers.0.weight.a"
    ]


def test_names_saving_copies_and_printing(tmp_path):
    model = nn.Sequential([with_lora(linear()), jnp.tanh])
    assert list(vernal.trees.named_leaves(model)) == [
        "layers.0.weight.weight",
        "layers.0.weight.a",
        "layers.0.weight.b",
        "layers.0.bias",
    ]
    vernal.save(tmp_path / "model.safetensors", model)
    like = jax.tree.map(jnp.zeros_like, model)
    for other in (
        vernal.load(tmp_path / "model.safetensors", like),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    ):
        assert other == model
    assert "weight=LoRA(weight=f32[3,3], a=f32[3,2], b=f32[2,3])" in repr(model)
    text = vernal.debug.summary(model, jnp.ones(3))
    row = next(line for line in text.splitlines() if "LoRA" in line)
    # Two matrices that are trained, and the weight, a buffer.
    assert row.split()[:4] == [".layers[0].weight", "LoRA", "12", "9"]
    row = next(line for line in text.splitlines() if "Linear" in line)
    assert row.split()[:4] == [".layers[0]", "Linear", "f32[3]", "15"]


def test_a_merged_model_is_plain_and_equal_to_the_bit(getkey):
    normed = nn.WeightNorm(with_lora(linear()))
    spectral = nn.inference_mode(nn.SpectralNorm(linear(), key=getkey()))
    model = nn.Sequential([normed, spectral, with_lora(linear())])
    merged, x = nn.resolve(model), jax.random.normal(getkey(), (3,))
    assert [type(layer) for layer in merged] == [nn.Linear] * 3
    assert [x.shape for x in jax.tree.leaves(merged)] == [(3, 3), (3,)] * 3
    equal(merged(x), nn.apply(model, x)[0])
    assert nn.resolve(merged) is merged
    members = jax.vmap(lambda key: with_lora(nn.Linear(3, 3, key=key)))(
        jax.random.split(getkey(), 2)
    )
    one = jax.tree.map(lambda x: x[1], members)
    np.testing.assert_allclose(
        jax.vmap(nn.resolve)(members).weight[1], one.weight.value(), rtol=1e-6, atol=1e-7
    )


def test_eight_bits_are_enough_for_inference(getkey):
    plain = nn.MLP(4, 2, 16, depth=2, key=getkey())

    def quantised(weight):
        scale = jnp.abs(weight).max(1, keepdims=True) / 127
        return Int8(jnp.round(weight / scale).astype(jnp.int8), scale)

    model = tree_at("layers[*].weight", plain, replace_fn=quantised)
    assert {x.dtype.name for x in jax.tree.leaves(vernal.filter(model, vernal.is_array))} == {
        "int8",
        "float32",
    }
    x = jax.random.normal(getkey(), (4,))
    y, after = nn.apply(model, x, train=False)
    assert after == model
    np.testing.assert_allclose(y, plain(x), atol=0.05)


def test_one_in_another_and_one_in_two_places(getkey):
    node = lora(linear().weight)
    nested = Doubled(Doubled(node))
    equal(nn.resolve([nested, nested]), [4 * node.value()] * 2)
    normed = nn.WeightNorm(with_lora(linear()))
    np.testing.assert_allclose(normed.g, normed.norm(node.value()), rtol=1e-6)
    two = nn.WeightNorm(nn.WeightNorm(nn.GRUCell(3, 3, key=getkey()), "weight_hh"), "weight_ih")
    cell, x = nn.resolve(two), jnp.ones(3)
    assert type(cell) is nn.GRUCell
    equal(two(x, x), cell(x, x))
    doubled = tree_at("layer.weight_ih", two.layer, 2 * cell.weight_ih)
    np.testing.assert_allclose(
        tree_at("layer", two, doubled)(x, x), two(x, x), rtol=1e-5, atol=1e-6
    )


SHARED = {
    "the node": (lambda m: m[1].weight, lambda m: m[0].weight, with_lora),
    "a part of it": (lambda m: m[1].weight.b, lambda m: m[0].weight.b, with_lora),
    "the weight of a layer": (
        lambda m: m[1].layer.weight,
        lambda m: m[0].layer.weight,
        nn.WeightNorm,
    ),
}


@pytest.mark.parametrize(("where", "get", "change"), SHARED.values(), ids=SHARED)
def test_shared_nodes_are_put_back_before_anything_is_resolved(where, get, change):
    class Tied(vernal.Module):
        shared: nn.Shared

        def __call__(self, x):
            first, second = self.shared()
            return second(jnp.tanh(first(x)))

    first, second = change(linear()), change(linear())
    tied = Tied(nn.Shared([first, second], where, get))
    assert len(jax.tree.leaves(tied)) < len(jax.tree.leaves([first, second]))
    # Two steps in, both places still hold the same.
    tied, x = jax.tree.map(lambda x: 2 * x, tied), jnp.ones(3)
    expected = tree_at(where, [first, second], get([first, second]))
    expected = nn.resolve(jax.tree.map(lambda x: 2 * x, expected))
    y = expected[1](jnp.tanh(expected[0](x)))
    for found in (
        tied(x),
        nn.resolve(tied)(x),
        nn.apply(tied, x)[0],
        nn.resolve(nn.resolve(tied))(x),
    ):
        np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)


class Centred(nn.Parametrised):
    """An array with state: its running mean is subtracted."""

    weight: jax.Array
    mean: nn.Variable

    def value(self):
        new = 0.5 * self.mean.value + 0.5 * self.weight.mean()
        return self.mean.update(new, self.weight - new)


def test_an_array_with_state_changes_in_apply_alone_and_in_a_stack():
    def centred(weight):
        return Centred(weight, nn.Variable(jnp.zeros(weight.shape[:-2])))

    x = jnp.ones(3)
    stacked = tree_at("layers.weight", stack(), replace_fn=centred)
    y, after = nn.apply(stacked, x)
    expected = 0.5 * stacked.layers.weight.weight.mean((1, 2))
    np.testing.assert_allclose(after.layers.weight.mean.value, expected, rtol=1e-5)
    weights = stacked.layers.weight.weight - expected[:, None, None]
    np.testing.assert_allclose(y, tree_at("layers.weight", stack(), weights)(x), rtol=1e-5)
    with pytest.raises(RuntimeError, match="would be lost"):
        nn.resolve(stacked)


def test_spectral_vectors_move_however_it_is_resolved(getkey):
    model = nn.Stack(lambda key: nn.SpectralNorm(linear(), key=key), 2, key=getkey())
    model, x = with_lora(model, "layers.layer.weight"), jnp.ones(3)
    called, after = jax.jit(nn.apply)(model, x)
    resolved, same = jax.jit(lambda m, x: nn.apply(m, x, method=lambda m, x: nn.resolve(m)(x)))(
        model, x
    )
    assert (after.layers.vectors.value[0] != model.layers.vectors.value[0]).all()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        (called, after),
        (resolved, same),
    )
    both = nn.WeightNorm(nn.SpectralNorm(linear(), key=getkey()))
    both = tree_at("layer.layer.weight", both, replace_fn=lambda w: w + 1)
    assert nn.apply(both, x)[1].layer.vectors != both.layer.vectors
    with pytest.raises(RuntimeError, match="would be lost"):
        both(x)


USES = {
    "an operator": lambda w, x: w @ x,
    "on the right": lambda w, x: x @ w,
    "a function of jax.numpy": jnp.dot,
    "an attribute": lambda w, x: w.astype(x.dtype),
    "indexing": lambda w, x: w.at[0].set(1),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_whoever_takes_one_for_an_array_is_told_what_to_write(use):
    node = lora(jnp.ones((3, 3)))
    for call in (use, jax.jit(lambda w, x: use(w, x))):
        with pytest.raises(
            (ValueError, AttributeError),
            match=r"(?s)a parametrised array is not resolved.*LoRA.*nn\.resolve\(model\)\(x\)",
        ):
            call(node, jnp.ones((3, 3)))


def test_the_error_names_the_layer_and_other_attributes_are_missing_as_usual():
    model = nn.Sequential([PlainLinear(lora(jnp.ones((3, 3))))])
    with pytest.raises(ValueError, match="a parametrised array is not resolved") as caught:
        model(jnp.ones(3))
    assert any("model.layers[0]" in note for note in caught.value.__notes__)
    with pytest.raises(AttributeError, match="'LoRA' object has no attribute 'typo'"):
        model[0].weight.typo  # noqa: B018 (it must fail)
    with pytest.raises(AttributeError, match="(?s)a parametrised array is not resolved.*`dtype`"):
        model[0].weight.dtype  # noqa: B018 (it must fail)
    assert not hasattr(model[0].weight, "shape")
    with pytest.raises(TypeError, match="abstract"):
        nn.Parametrised()


NORMED = nn.WeightNorm(nn.Linear(30, 20, use_bias=False, key=jax.random.key(0)))
SPECTRAL = nn.SpectralNorm(
    nn.Linear(30, 20, use_bias=False, key=jax.random.key(0)), key=jax.random.key(1)
)
NEW = np.random.default_rng(0).normal(size=(20, 30)).astype(np.float32) * 9


def loaded(model, tmp_path):
    vernal.save(tmp_path / "model.safetensors", tree_at("layer.weight", model, jnp.asarray(NEW)))
    return vernal.load(tmp_path / "model.safetensors", model)


def from_torch(model, tmp_path):
    names = vernal.trees.named_leaves(model)
    state = {name: np.asarray(x) for name, x in names.items()} | {"layer.weight": NEW}
    return vernal.saving.from_torch(model, state, {name: name for name in names})


SURGERY = {
    "initialise": lambda m, _: nn.initialise(
        m, {"layer.weight": jax.nn.initializers.normal(5.0)}, jax.random.key(7)
    ),
    "tree_at": lambda m, _: tree_at("layer.weight", m, jnp.asarray(NEW)),
    "a checkpoint": loaded,
    "from_torch": from_torch,
    "low rank": lambda m, _: with_lora(m, "layer.weight"),
}


@pytest.mark.parametrize("change", SURGERY.values(), ids=SURGERY)
def test_norms_hold_after_any_surgery(change, tmp_path):
    normed, spectral = change(NORMED, tmp_path), nn.inference_mode(change(SPECTRAL, tmp_path))
    rows = np.linalg.norm(nn.resolve(normed).weight, axis=1)
    np.testing.assert_allclose(rows, normed.g[:, 0], rtol=1e-5)
    assert abs(np.linalg.norm(nn.resolve(spectral).weight, 2) - 1) < 0.03
    # The direction is that of the new weight.
    v = nn.resolve(normed.layer).weight
    np.testing.assert_allclose(
        nn.resolve(normed).weight / rows[:, None],
        v / np.linalg.norm(v, axis=1, keepdims=True),
        rtol=1e-4,
        atol=1e-6,
    )
