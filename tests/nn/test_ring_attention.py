"""Attention round a ring of devices, against attention on one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import vernal
from vernal import debug, nn
from vernal.sharding import make_mesh, shard_batch

ring = functools.partial(nn.ring_attention, axis_name="sequence")


def spread(mesh, spec, **options):
    return vernal.filter_shard_map(
        functools.partial(ring, **options), mesh=mesh, in_specs=spec, out_specs=spec
    )


def with_gradients(attention):
    def run(*arrays):
        y, pull = jax.vjp(attention, *arrays)
        return y, pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    return run


def drawn(key, *shapes, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(key), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


MESHES = {
    "eight parts": (dict(sequence=8), P(None, "sequence"), False),
    "eight parts, automatic": (dict(sequence=8), P(None, "sequence"), True),
    "batch and sequence": (dict(data=2, sequence=4), P("data", "sequence"), False),
    "one part": (dict(data=2, sequence=1), P("data", "sequence"), True),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.sample(6)
def test_values_and_gradients_are_those_of_one_device(name, causal):
    sizes, spec, automatic = MESHES[name]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = make_mesh(**sizes, automatic=automatic, devices=devices)
    # Three query heads share one of two key/value heads, and values are of another size.
    arrays = drawn(0, (2, 32, 6, 8), (2, 32, 2, 8), (2, 32, 2, 5))
    placed = jax.device_put(arrays, jax.NamedSharding(mesh, spec))
    mapped = spread(mesh, spec, causal=causal, scale=0.7)
    found = jax.jit(with_gradients(lambda *a: mapped(*a)))(*placed)
    one = functools.partial(nn.attention, causal=causal, scale=0.7)
    want = jax.jit(with_gradients(one))(*arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("queries", "keys"), [(16, 32), (32, 16)])
def test_queries_that_see_nothing_of_the_keys_that_have_come_so_far(queries, keys):
    mesh, spec = make_mesh(sequence=8), P(None, "sequence")
    arrays = drawn(3, (2, queries, 2, 4), (2, keys, 2, 4), (2, keys, 2, 4))
    placed = jax.device_put(arrays, jax.NamedSharding(mesh, spec))
    found = jax.jit(with_gradients(lambda *a: spread(mesh, spec, causal=True)(*a)))(*placed)
    want = jax.jit(with_gradients(functools.partial(nn.attention, causal=True)))(*arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("queries", "keys", "values"),
    [
        ((2, 0, 2, 3), (2, 0, 2, 3), (2, 0, 2, 3)),
        ((0, 8, 2, 3), (0, 8, 2, 3), (0, 8, 2, 3)),
        ((2, 8, 2, 0), (2, 8, 2, 0), (2, 8, 2, 3)),
        ((2, 8, 2, 3), (2, 8, 2, 3), (2, 8, 2, 0)),
        ((2, 8, 2, 3), (2, 0, 2, 3), (2, 0, 2, 3)),
    ],
    ids=["no positions", "no batch", "no features", "no values", "no keys"],
)
@pytest.mark.parametrize("causal", [True, False])
def test_an_axis_of_size_zero(queries, keys, values, causal):
    mesh, spec = make_mesh(sequence=4, devices=jax.devices()[:4]), P(None, "sequence")
    arrays = drawn(5, queries, keys, values)
    placed = jax.device_put(arrays, jax.NamedSharding(mesh, spec))
    found = jax.jit(with_gradients(lambda *a: spread(mesh, spec, causal=causal)(*a)))(*placed)
    want = jax.jit(with_gradients(functools.partial(nn.attention, causal=causal)))(*arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_a_layer_is_trained_with_its_gradient_summed_over_the_ring():
    mesh = make_mesh(sequence=8)
    layer, (x,) = nn.Linear(6, 12, key=jax.random.key(1)), drawn(2, (32, 6))

    def loss(attend, mean):
        def run(layer, x):
            y = layer(x).reshape(-1, 2, 6)
            return mean(jnp.sin(attend(y, y, y, causal=True)))

        return vernal.filter_value_and_grad(run)

    together = vernal.filter_shard_map(
        loss(ring, lambda y: jax.lax.pmean(jnp.mean(y), "sequence")),
        mesh=mesh,
        in_specs=(P(), P("sequence")),
        out_specs=P(),
    )
    value, gradient = vernal.filter_jit(together)(layer, shard_batch(x, mesh, "sequence"))
    expected, expected_gradient = loss(nn.attention, jnp.mean)(layer, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient.weight, expected_gradient.weight, rtol=1e-4, atol=1e-6)


def test_half_precision_is_as_exact_as_on_one_device():
    mesh, spec = make_mesh(sequence=8), P("sequence")
    arrays = drawn(3, *[(64, 2, 8)] * 3, dtype=jnp.bfloat16)
    y = spread(mesh, spec, causal=True)(*jax.device_put(arrays, jax.NamedSharding(mesh, spec)))
    assert y.dtype == jnp.bfloat16
    exact = nn.attention(*[a.astype(jnp.float32) for a in arrays], causal=True)
    np.testing.assert_allclose(y.astype(jnp.float32), exact, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("derivative", [False, True])
def test_each_of_eight_devices_needs_an_eighth_of_the_memory(derivative):
    mesh, spec = make_mesh(sequence=8, automatic=True), P(None, "sequence")
    mapped = spread(mesh, spec, causal=True)
    place = jax.NamedSharding(mesh, spec)

    def compiled(attention, **options):
        x = jax.ShapeDtypeStruct((1, 16_384, 8, 64), jnp.float32, **options)

        def gradient(*arrays):
            return jax.grad(lambda *a: jnp.sum(attention(*a) ** 2), (0, 1, 2))(*arrays)

        return jax.jit(gradient if derivative else attention).lower(x, x, x).compile()

    def needed(program):
        sizes = program.memory_analysis()
        return (
            sizes.argument_size_in_bytes
            + sizes.output_size_in_bytes
            + sizes.temp_size_in_bytes
            - sizes.alias_size_in_bytes
        )

    alone = compiled(functools.partial(nn.attention, causal=True))
    together = compiled(lambda *a: mapped(*a), sharding=place)
    assert needed(together) < 1.3 * needed(alone) / 8
    # Keys and values seven times forward; for the gradient again, with the sums of their gradients, eight times.
    found, part = debug.collectives(together), 4 * 16_384 * 8 * 64 // 8
    assert found.count() == found.count("collective-permute") == (46 if derivative else 14)
    assert found.bytes() == found.count() * part
    assert not any(row.at_least for row in found.rows)


def test_a_sequence_that_all_devices_have_whole_is_refused():
    mesh = make_mesh(sequence=8)
    x = jnp.ones((8, 2, 4))

    def run(x, y):
        return ring(x, y, y)

    mapped = vernal.filter_shard_map(
        run, mesh=mesh, in_specs=(P("sequence"), P()), out_specs=P("sequence")
    )
    with pytest.raises(
        ValueError, match=r"a different part of the sequence on each device(.|\n)*argument `key`"
    ):
        mapped(shard_batch(x, mesh, "sequence"), x)


def test_heads_that_do_not_fit_are_refused():
    mesh, spec = make_mesh(sequence=8), P("sequence")
    arrays = shard_batch((jnp.ones((8, 3, 4)), *[jnp.ones((8, 2, 4))] * 2), mesh, "sequence")
    with pytest.raises(ValueError, match="queries, keys and values do not match"):
        spread(mesh, spec)(*arrays)
