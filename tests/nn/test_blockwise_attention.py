"""Attention by blocks needs memory that grows with the length, as the compiler plans it; its values are compared with
the formula in `test_attention.py`."""

import jax
import jax.numpy as jnp
import pytest

from vernal import nn

LENGTHS = (1024, 2048, 4096, 8192, 16384)


def planned_memory(length, derivative, **conditions):
    """Bytes for what is neither argument nor result, of attention over so many tokens; nothing is run."""
    x = jax.ShapeDtypeStruct((length, 4, 64), jnp.float32)

    def attend(query, key, value):
        return nn.attention(query, key, value, **conditions)

    def gradient(*arrays):
        return jax.grad(lambda *a: (attend(*a) ** 2).sum(), (0, 1, 2))(*arrays)

    compiled = jax.jit(gradient if derivative else attend).lower(x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    ("derivative", "conditions"),
    [
        pytest.param(True, {"causal": True}, id="causal, derivative"),
        pytest.param(False, {}, id="all", marks=pytest.mark.slow),
        pytest.param(True, {}, id="all, derivative", marks=pytest.mark.slow),
        pytest.param(True, {"causal": True, "window": 512}, id="window", marks=pytest.mark.slow),
    ],
)
def test_memory_grows_linearly_with_the_length(derivative, conditions):
    memory = {n: planned_memory(n, derivative, **conditions) for n in LENGTHS}
    for n in LENGTHS[:-1]:
        assert memory[2 * n] < 2.2 * memory[n]
    arrays = LENGTHS[-1] * 4 * 64 * 4
    assert memory[LENGTHS[-1]] < 20 * arrays


def test_memory_of_all_scores_grows_with_the_square():
    """So the measure above sees the difference."""
    short, long = (planned_memory(n, True, implementation="dense") for n in (1024, 4096))
    assert long > 14 * short


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_shardings_of_batch_and_heads_are_kept(implementation):
    spec = jax.sharding.PartitionSpec("data", None, "model", None)
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    place = jax.sharding.NamedSharding(mesh, spec)
    x = jax.ShapeDtypeStruct((4, 200, 4, 8), jnp.float32, sharding=place)

    def total(x):
        return nn.attention(x, x, x, causal=True, implementation=implementation).sum()

    with jax.set_mesh(mesh):
        assert jax.eval_shape(jax.grad(total), x).sharding.spec[:3] == spec[:3]
