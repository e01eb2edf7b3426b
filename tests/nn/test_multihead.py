"""`MultiheadAttention` against Equinox's, and what it adds to it. (PyTorch's: `test_sequences_torch.py`.)"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import nn

SETTINGS = dict(key_size=6, value_size=5, output_size=7, qk_size=3, vo_size=2)
BIASES = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}


def draw(*shape):
    """Normal numbers. By NumPy, which has nothing to compile."""
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def example(*batch):
    return [draw(*batch, *shape) for shape in ((5, 8), (9, 6), (9, 5))]


@pytest.mark.parametrize("settings", [{}, SETTINGS | BIASES], ids=["plain", "everything"])
def test_it_is_equinoxs(settings, getkey):
    key = getkey()
    if settings:
        query, keys, values = example()
    else:
        query, keys, values = draw(3, 9, 8)
    mask = (draw(4, query.shape[0], 9) > -0.5).at[..., 0].set(True)

    def twice(queries, keys, values):
        return 2 * queries, keys[::-1], values - 1

    @jax.jit
    def both(key, query, keys, values):
        def run(library):
            layer = library.MultiheadAttention(4, 8, **settings, key=key)
            assert isinstance(layer.query_proj, library.Linear)
            arrays = query, keys, values
            return (
                jax.tree.leaves(eqx.filter(layer, eqx.is_array)),
                layer(*arrays),
                layer(*arrays, mask),
                layer(*arrays, mask[0], process_heads=twice),
            )

        return run(nn), run(eqx.nn)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *both(key, query, keys, values)
    )


def test_every_way_of_sharing_heads_is_that_of_repeated_heads(getkey):
    x = draw(6, 8)
    shared = nn.MultiheadAttention(4, 8, num_key_value_heads=2, key=getkey())

    def repeated(weight):
        return jnp.repeat(weight.reshape(2, 2, 8), 2, axis=0).reshape(8, 8)

    full = vernal.tree_at(
        lambda m: (m.query_proj, m.key_proj.weight, m.value_proj.weight, m.output_proj),
        nn.MultiheadAttention(4, 8, key=getkey()),
        (
            shared.query_proj,
            repeated(shared.key_proj.weight),
            repeated(shared.value_proj.weight),
            shared.output_proj,
        ),
    )
    np.testing.assert_allclose(shared(x, x, x, causal=True), full(x, x, x, causal=True), atol=1e-6)


def test_batch_axes_are_those_of_vmap(getkey):
    make = jax.jit(
        lambda key: nn.MultiheadAttention(4, 8, **SETTINGS, num_key_value_heads=2, key=key)
    )
    layer, arrays = make(getkey()), example(2, 3)
    mask = draw(2, 3, 1, 5, 9) > -0.5
    segments = tuple((draw(2, 3, n) > 0).astype(int) for n in (5, 9))
    positions = jnp.argsort(draw(2, 3, 5))

    def call(layer, arrays, mask, segments, positions):
        return layer(
            *arrays,
            mask,
            segments=segments,
            query_positions=positions,
            process_heads=lambda q, k, v: (q - q[:1], k, v),
            causal=True,
        )

    @jax.jit
    def both(layer, arrays):
        def loss(run):
            def f(layer, arrays):
                y = run(layer, arrays, mask, segments, positions)
                return (y**2).sum(), y

            return jax.value_and_grad(f, (0, 1), has_aux=True)(layer, arrays)

        mapped = jax.vmap(jax.vmap(call, (None, 0, 0, 0, 0)), (None, 0, 0, 0, 0))
        return loss(call), loss(mapped)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *both(layer, arrays)
    )


def test_rotary_positions_are_those_of_the_call(getkey):
    layer = nn.MultiheadAttention(2, 8, key=getkey())
    x, rotary = draw(6, 8), nn.RotaryPositionalEmbedding(4)
    order = jnp.array([4, 1, 0, 5, 2, 3])

    @jax.jit
    def both(x):
        shuffled = layer(
            x[order],
            x[order],
            x[order],
            rotary=rotary,
            causal=True,
            query_positions=order,
            key_positions=order,
        )
        return shuffled, layer(x, x, x, rotary=rotary, causal=True)[order]

    np.testing.assert_allclose(*both(x), atol=1e-5)


def test_dropout_drops_weights_and_keeps_their_mean(getkey):
    layer = nn.MultiheadAttention(2, 4, value_size=128, vo_size=64, dropout_p=0.25, key=getkey())
    # Values that are the unit vectors, and no projection after them: the outputs are the weights.
    layer = vernal.tree_at(
        lambda m: (m.value_proj, m.output_proj), layer, (nn.Identity(), nn.Identity())
    )
    x, unit = draw(64, 4), jnp.tile(jnp.eye(64), (1, 2))
    key = getkey()

    @jax.jit
    def both(x):
        return (
            _weights(layer, x, unit, key=key),
            _weights(layer, x, unit, inference=True),
            _weights(nn.keys(layer, key), x, unit),
        )

    dropped, weights, by_stored_key = both(x)
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], weights[kept] / 0.75, rtol=1e-5)
    assert abs(kept.mean() - 0.75) < 0.03
    assert (kept[:, 0] != kept[:, 1]).any() and (kept[0] != kept[1]).any()
    assert ((by_stored_key != 0) != kept).any() and (by_stored_key == 0).any()


def _weights(layer, x, unit, **given):
    """The weights of each head, of shape `(T, heads, S)`."""
    return layer(x, x, unit, **given).reshape(64, 2, 64)


def test_dropout_asks_for_a_key_and_for_all_weights(getkey):
    layer, x = nn.MultiheadAttention(2, 4, dropout_p=0.5, key=getkey()), jnp.ones((3, 4))
    with pytest.raises(RuntimeError, match="Dropout needs a random key while training"):
        layer(x, x, x)
    with pytest.raises(ValueError, match="(?s)needs the dense implementation.*'blockwise'"):
        layer(x, x, x, key=getkey(), implementation="blockwise")
    assert layer(x, x, x, inference=True, implementation="blockwise").shape == (3, 4)


def test_wrong_sizes_and_shapes_are_refused(getkey):
    with pytest.raises(
        ValueError, match="(?s)cannot share the key and value heads.*a divisor of num_heads=4.*3"
    ):
        nn.MultiheadAttention(4, 8, num_key_value_heads=3, key=getkey())
    with pytest.raises(ValueError, match="(?s)more heads than features.*query_size=3"):
        nn.MultiheadAttention(4, 3, key=getkey())
    layer = nn.MultiheadAttention(4, 8, **SETTINGS, key=getkey())
    query, keys, values = example()
    with pytest.raises(ValueError, match=r"(?s)argument `query`.*query_size=8"):
        layer(keys, keys, values)
    with pytest.raises(ValueError, match=r"(?s)argument `key_`.*key_size=6"):
        layer(query, query, values)
    with pytest.raises(ValueError, match=r"(?s)argument `value`.*value_size=5"):
        layer(query, keys, query)
    with pytest.raises(ValueError, match="(?s)`process_heads` must not change the shapes"):
        layer(query, keys, values, process_heads=lambda q, k, v: (q[:1], k, v))
