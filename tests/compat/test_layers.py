"""Layers give Equinox's numbers, by its defaults, its states and its draws; and load its files."""

import io
import warnings

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.compat import equinox as compat

from ._same import same_as_equinox

KEY = jax.random.key(0)
XS = jnp.arange(8.0).reshape(4, 2) ** 2


def over_batch(layer, xs, state):
    return jax.vmap(layer, axis_name="b", in_axes=(0, None), out_axes=(0, None))(xs, state)


def trained(eqx, make, steps=2):
    """What a layer with a state gives while training, and after it."""
    layer, state = eqx.nn.make_with_state(make)()
    out = []
    for i in range(steps):
        y, state = over_batch(layer, XS + i, state)
        out.append(y)
    y, state = over_batch(eqx.nn.inference_mode(layer), XS, state)
    return out, y, state, layer


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("mode", ["legacy", "ema", "batch"])
@pytest.mark.sample(6)
def test_batch_norm(mode, steps):
    same_as_equinox(lambda eqx: trained(eqx, lambda: eqx.nn.BatchNorm(2, "b", mode=mode), steps))()


@same_as_equinox
def test_a_bare_batch_norm_warns_and_averages(eqx):
    norm = eqx.nn.BatchNorm(2, "b")
    return norm.mode, norm.momentum, norm.eps, norm.inference, norm.axis_name, norm


@same_as_equinox
def test_a_batch_norm_of_half_precision_and_of_images(eqx):
    def make(**options):
        return eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "b", mode="batch", **options)

    images = jnp.arange(24.0).reshape(4, 2, 3)
    half, plain = make(dtype=jnp.bfloat16), make(channelwise_affine=False)
    _, state = out = over_batch(plain[0], images, plain[1])
    y, _ = over_batch(half[0], images.astype(jnp.bfloat16), half[1])
    return out, y.shape, y.dtype.name, state


@same_as_equinox
def test_an_unknown_mode(eqx):
    return eqx.nn.BatchNorm(2, "b", mode="other")


@same_as_equinox
def test_the_gradient_of_a_batch_norm(eqx):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "b", mode="ema", momentum=0.9)

    def loss(xs, state):
        return jnp.sum(jnp.sin(over_batch(norm, xs, state)[0]))

    _, later = over_batch(norm, XS + 3, jax.tree.map(lambda x: x, state))
    return jax.grad(loss)(XS, state), jax.grad(loss)(XS, later)


def test_a_batch_norm_without_its_axis():
    norm, state = compat.nn.make_with_state(compat.nn.BatchNorm)(2, "b", mode="batch")
    with pytest.raises(NameError, match="b"):
        norm(XS[0], state)
    with pytest.raises(ValueError, match=r"was given an unknown mode[\s\S]*'other'"):
        compat.nn.BatchNorm(2, "b", mode="other")


@same_as_equinox
def test_spectral_norm(eqx):
    def make():
        return eqx.nn.SpectralNorm(eqx.nn.Linear(2, 3, key=KEY), "weight", key=KEY)

    layer, state = eqx.nn.make_with_state(make)()
    y, state = layer(XS[1], state)
    return y, state


@same_as_equinox
def test_a_state_of_a_model_that_is_there(eqx):
    class Counter(eqx.Module):
        index: eqx.nn.StateIndex[jax.Array]
        norm: eqx.nn.BatchNorm
        spectral: eqx.nn.SpectralNorm

        def __init__(self):
            self.index = eqx.nn.StateIndex(jnp.zeros((), "float32"))
            self.norm = eqx.nn.BatchNorm(2, "b", mode="ema")
            layer = eqx.nn.Linear(2, 2, key=KEY)
            self.spectral = eqx.nn.SpectralNorm(layer, "weight", key=KEY)

        def __call__(self, x, state):
            count = state.get(self.index)
            x, state = self.norm(x, state.set(self.index, count + 1))
            x, state = self.spectral(x, state)
            return x + count, state

    model = Counter()
    state = eqx.nn.State(model)
    ys, state = over_batch(model, XS, state)
    sub = state.substate(model.norm)
    state = state.update(sub)
    again, state = eqx.filter_jit(over_batch)(model, XS, state)
    return ys, again, state, eqx.nn.State(eqx.nn.Linear(2, 2, key=KEY))


@same_as_equinox
def test_a_state_of_a_model_whose_values_are_in_one(eqx):
    return eqx.nn.State(eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "b", mode="ema")[0])


def test_a_state_is_made_natively_of_variables_with_markers():
    named = {"n": vernal.nn.Variable(jnp.ones(2), marker="n")}
    state = vernal.nn.State(named)
    assert state.set(named["n"], jnp.zeros(2)).get(named["n"]).tolist() == [0, 0]
    with pytest.raises(ValueError, match="its variables have no markers"):
        vernal.nn.State(vernal.nn.BatchNorm(2))
    with pytest.raises(ValueError, match="its values are in a state already"):
        vernal.nn.State(vernal.nn.make_with_state(vernal.nn.BatchNorm)(2)[0])


@pytest.mark.parametrize("dtype", ["bool", "float32", "int32", "uint8"])
@pytest.mark.sample(3)
def test_masks_of_any_dtype(dtype):
    @same_as_equinox
    def attend(eqx):
        layer = eqx.nn.MultiheadAttention(2, 4, key=KEY)
        x = jnp.arange(12.0).reshape(3, 4) / 12
        # The second query sees nothing.
        mask = np.array([[1, 0, 0], [0, 0, 0], [1, 0, 1]], dtype)
        return layer(x, x, x, mask), layer(
            x, x, x, jnp.stack([mask, 1 - mask]) if dtype != "bool" else None
        )

    attend()


@same_as_equinox
def test_attention_with_every_option(eqx):
    sizes = (4, 4, 4, 4, 2, 2)
    layer = eqx.nn.MultiheadAttention(2, *sizes, *[True] * 4, 0.5, False, key=KEY)
    x = jnp.arange(12.0).reshape(3, 4) / 12
    return (
        layer(query=x, key_=x, value=x, key=KEY),
        layer(x, x, x, deterministic=True),
        layer(x, x, x, inference=True, process_heads=lambda q, k, v: (2 * q, k, v)),
    )


def test_natively_a_mask_of_numbers_is_refused():
    layer = vernal.nn.MultiheadAttention(2, 4, key=KEY)
    with pytest.raises(ValueError, match="bias"):
        layer(jnp.ones((3, 4)), jnp.ones((3, 4)), jnp.ones((3, 4)), jnp.ones((3, 3)))


@same_as_equinox
def test_the_functions_of_attention(eqx):
    if eqx is compat:
        from vernal.compat.equinox.nn import _attention as module
    else:
        import equinox.nn._attention as module
    q = jnp.arange(6.0).reshape(3, 2) / 6
    mask = jnp.tril(jnp.ones((3, 3), bool))
    return (
        module.dot_product_attention_weights(q, q),
        module.dot_product_attention(q, q, q, mask=mask),
        module.dot_product_attention(q, q, q, dropout=eqx.nn.Dropout(0.5), key=KEY),
        module.dot_product_attention_weights(q.astype("bfloat16"), q.astype("bfloat16")).dtype.name,
    )


@same_as_equinox
def test_dropout(eqx):
    layer, x = eqx.nn.Dropout(0.3), jnp.ones((4, 8))
    draws = layer(x, key=KEY), layer(x, key=jax.random.PRNGKey(3)), layer(x, deterministic=True)
    old = eqx.nn.Dropout(0.5, deterministic=True)
    changed = eqx.tree_at(lambda d: d.p, layer, 0.1)
    return draws, *map(jax.tree.leaves, (layer, old, changed)), old.deterministic


@same_as_equinox
def test_rotary_embeddings(eqx):
    layer, x = eqx.nn.RotaryPositionalEmbedding(4), jnp.arange(12.0).reshape(3, 4)
    tables = layer.precompute_freqs_cis(4, 3, 100.0, jnp.float32)
    return layer(x), tables, layer.rotate_half(x)


@same_as_equinox
def test_a_bias_is_not_reshaped_for_nothing(eqx):
    layer = eqx.nn.Linear(2, 3, key=KEY)
    program = jax.make_jaxpr(lambda layer, x: layer(x))(layer, jnp.ones(2))
    return [equation.primitive.name for equation in program.eqns]


@same_as_equinox
def test_a_source_of_keys(eqx):
    first, second = eqx.internal.GetKey(3), eqx.internal.GetKey(3)
    key, draws = repr(first), [first(), first()]
    return {first: 1}[first], first == second, key, draws, second()


def layers(nn):
    """Every layer, by name, each with an input; None for a pair of a layer and its state."""
    vector, image = jnp.arange(2.0), jnp.arange(128.0).reshape(2, 4, 4, 4) / 64
    yield "Linear", nn.Linear(2, 3, key=KEY), vector
    yield "scalar", nn.Linear("scalar", "scalar", key=KEY), jnp.float32(2)
    yield "Identity", nn.Identity(), vector
    for d in (1, 2, 3):
        x = image[(slice(None), *[0] * (3 - d))]
        yield f"Conv{d}d", getattr(nn, f"Conv{d}d")(2, 3, 2, key=KEY), x
        yield f"ConvTranspose{d}d", getattr(nn, f"ConvTranspose{d}d")(2, 3, 2, key=KEY), x
        for kind in ("Avg", "Max"):
            yield f"{kind}Pool{d}d", getattr(nn, f"{kind}Pool{d}d")(2), x
            yield f"Adaptive{kind}Pool{d}d", getattr(nn, f"Adaptive{kind}Pool{d}d")(3), x
    yield "Pool", nn.Pool(0.0, jax.lax.add, 1, 2), image[:, 0, 0]
    yield "AdaptivePool", nn.AdaptivePool(3, 1, jnp.mean), image[:, 0, 0]
    yield "Dropout", nn.Dropout(0.3, inference=True), vector
    yield "Embedding", nn.Embedding(3, 2, key=KEY), 1
    yield "Rotary", nn.RotaryPositionalEmbedding(4), image[0, 0]
    yield "MLP", nn.MLP(2, 3, 4, 2, activation=nn.PReLU(), key=KEY), vector
    yield "scanned", nn.MLP(2, 3, 4, 3, key=KEY, scan=True), vector
    yield "LayerNorm", nn.LayerNorm(2), vector
    yield "RMSNorm", nn.RMSNorm(2), vector
    yield "GroupNorm", nn.GroupNorm(1, 2), vector
    yield "PReLU", nn.PReLU(), -vector
    several = [nn.Linear(2, 2, key=KEY), nn.Lambda(jnp.tanh), nn.Dropout(0.5, inference=True)]
    yield "Sequential", nn.Sequential(several), vector
    yield "WeightNorm", nn.WeightNorm(nn.Linear(2, 3, key=KEY)), vector
    yield "GRUCell", nn.GRUCell(2, 3, key=KEY), (vector, jnp.ones(3))
    yield "LSTMCell", nn.LSTMCell(2, 3, key=KEY), (vector, (jnp.ones(3), jnp.ones(3)))
    rows = image[0, 0]
    attention = nn.MultiheadAttention(
        2, 4, use_query_bias=True, dropout_p=0.1, inference=True, key=KEY
    )
    yield "MultiheadAttention", attention, (rows, rows, rows)
    tied = nn.Embedding(3, 2, key=KEY), nn.Linear(2, 3, key=KEY)
    yield "Shared", nn.Shared(tied, lambda t: t[1].weight, lambda t: t[0].weight), None
    for mode in ("ema", "batch"):
        yield f"BatchNorm {mode}", nn.make_with_state(nn.BatchNorm)(2, "b", mode=mode), None
        yield f"bare BatchNorm {mode}", nn.BatchNorm(2, "b", mode=mode), None
    normed = nn.SpectralNorm(nn.Linear(2, 3, key=KEY), "weight", key=KEY)
    yield "SpectralNorm", nn.make_with_state(lambda: normed)(), None
    yield "bare SpectralNorm", normed, None
    yield "StateIndex", nn.make_with_state(nn.StateIndex)(jnp.ones(2)), None


def applied(layer, x):
    """What a layer makes of its input; a pair of a layer and its state, of a batch."""
    if x is None and isinstance(layer, tuple):
        layer, state = layer
        if hasattr(layer, "axis_name"):
            return over_batch(layer, XS, state)
        return layer(XS[1], state) if callable(layer) else state
    if x is None:
        return ()
    return layer(*x) if isinstance(x, tuple) else layer(x)


def in_and_out():
    """Every layer of Equinox, what is loaded from its file here, and an input."""
    theirs, ours = (list(layers(eqx.nn)) for eqx in (equinox, compat))
    for (name, layer, x), (_, mine, _) in zip(theirs, ours, strict=True):
        # Other numbers than those of construction.
        layer = jax.tree.map(lambda a: a * 1.25 if equinox.is_inexact_array(a) else a, layer)
        file = io.BytesIO()
        equinox.tree_serialise_leaves(file, layer)
        file.seek(0)
        loaded = compat.tree_deserialise_leaves(file, mine)
        assert not file.read(1), name
        written = io.BytesIO()
        compat.tree_serialise_leaves(written, loaded)
        assert written.getvalue() == file.getvalue(), name
        yield name, layer, loaded, x


def test_files_of_every_layer_load_and_are_written():
    names = {name for name in vars(equinox.nn) if name[0].isupper()}
    seen = [layer[0] if isinstance(layer, tuple) else layer for _, layer, _, _ in in_and_out()]
    base_classes = {"State", "StatefulLayer", "Conv", "ConvTranspose", "Lambda"}
    assert {type(layer).__name__ for layer in seen} >= names - base_classes


# Two hundred small programs.
@pytest.mark.slow
def test_loaded_layers_compute_the_same():
    for name, layer, loaded, x in in_and_out():
        theirs, ours = (jax.tree.leaves(applied(one, x)) for one in (layer, loaded))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


def test_natively_a_file_of_another_batch_norm_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = equinox.nn.make_with_state(equinox.nn.BatchNorm)(2, "b")
    file = io.BytesIO()
    equinox.tree_serialise_leaves(file, theirs)
    file.seek(0)
    ours = vernal.nn.make_with_state(vernal.nn.BatchNorm)(2, "b")
    with pytest.raises(RuntimeError, match="momentum|like"):
        vernal.saving.tree_deserialise_leaves(file, ours)


@same_as_equinox
def test_spectral_norm_follows_a_weight_that_is_replaced_step_by_step(eqx):
    def made(key):
        linear = eqx.nn.Linear(3, 3, key=key)
        linear = eqx.tree_at(lambda m: m.weight, linear, jnp.diag(jnp.array([1.0, 0.9, 0.8])))
        return eqx.nn.SpectralNorm(linear, "weight", key=key)

    layer, state = eqx.nn.make_with_state(made)(KEY)
    # Nothing that its vectors know of: `vernal.nn.SpectralNorm` finds better ones at once.
    layer = eqx.tree_at(lambda m: m.layer.weight, layer, jnp.diag(jnp.array([0.01, 0.01, 100.0])))
    before, _ = eqx.nn.inference_mode(layer)(jnp.ones(3), state)
    first, state = layer(jnp.ones(3), state)
    second, state = layer(jnp.ones(3), state)
    asleep, _ = eqx.nn.inference_mode(layer)(jnp.ones(3), state)
    return before, first, second, asleep


def test_a_linear_layer_of_scalars_refuses_vectors():
    layer = compat.nn.Linear("scalar", 2, key=KEY)
    with pytest.raises(ValueError, match=r"(?s)`Linear` was given.*expected: a scalar.*f32\[1\]"):
        layer(jnp.ones(1))


def test_heads_keep_their_shapes():
    layer, x = compat.nn.MultiheadAttention(2, 4, key=KEY), jnp.ones((3, 4))
    with pytest.raises(
        ValueError, match=r"(?s)must not change the shapes.*\(3, 2, 2\).*\(1, 2, 2\)"
    ):
        layer(x, x, x, process_heads=lambda q, k, v: (q[:1], k, v))


def test_layers_of_both_are_found_by_either_class():
    ours, theirs = vernal.nn.Linear(2, 2, key=KEY), compat.nn.Linear(2, 2, key=KEY)
    for layer in (ours, theirs):
        assert isinstance(layer, compat.nn.Linear) and isinstance(layer, vernal.nn.Linear)
        assert not isinstance(layer, compat.nn.MLP)
    assert issubclass(vernal.nn.Conv2d, compat.nn.Conv)

    class Mine(compat.nn.Linear):
        pass

    assert not isinstance(theirs, Mine) and not isinstance(ours, Mine)
    assert isinstance(Mine(2, 2, key=KEY), compat.nn.Linear)
    model = compat.nn.MLP(2, 2, 2, 1, key=KEY)

    def is_linear(x):
        return isinstance(x, compat.nn.Linear)

    assert sum(map(is_linear, jax.tree.leaves(model, is_leaf=is_linear))) == 2
