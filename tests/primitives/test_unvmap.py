"""`unvmap_*`: reductions that no `vmap` can split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from vernal.primitives import unvmap_all, unvmap_any, unvmap_max, unvmap_min

REDUCTIONS = {
    "any": (unvmap_any, np.any),
    "all": (unvmap_all, np.all),
    "max": (unvmap_max, np.max),
    "min": (unvmap_min, np.min),
}
X = np.array([[[0.0, 1.0], [3.0, -2.0]], [[1.0, 1.0], [5.0, 0.5]]], np.float32)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("maps", [0, 1, 2, 3])
@pytest.mark.parametrize("jit", [False, True])
def test_the_result_is_over_everything_and_has_no_batch_axis(name, maps, jit):
    fn, expected = REDUCTIONS[name]
    for _ in range(maps):
        fn = jax.vmap(fn, in_axes=-1, out_axes=None)
    got = (jax.jit(fn) if jit else fn)(X)
    assert got.shape == ()
    assert got.dtype == expected(X).dtype
    assert got == expected(X)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("x", [True, 2, -1.5, np.float32(3), np.array([1, 0]), jnp.array([2, 1])])
def test_python_numbers_and_numpy_arrays_are_reduced_too(name, x):
    fn, expected = REDUCTIONS[name]
    assert fn(x) == expected(x)


def test_a_map_leaves_one_equation():
    """Nothing is broadcast or computed element by element."""
    fn = jax.vmap(jax.vmap(unvmap_max, out_axes=None), out_axes=None)
    assert [str(e.primitive) for e in jax.make_jaxpr(fn)(X[0]).eqns] == ["unvmap_max"]


def test_the_bounds_are_not_differentiated():
    def f(x):
        return x * unvmap_max(x) + unvmap_min(x)

    x = jnp.array([1.0, 3.0])
    assert jnp.array_equal(jax.vmap(jax.grad(f))(x), jnp.array([3.0, 3.0]))
    assert jax.jvp(unvmap_max, (2.0,), (1.0,)) == (2.0, 0.0)
    assert jax.hessian(f)(1.0) == 0.0
    assert jax.grad(lambda x: jnp.where(unvmap_any(x) & unvmap_all(x), x, 0 * x))(2.0) == 1.0


def test_a_loop_runs_until_the_last_element_is_done():
    def count(limit):
        return jax.lax.while_loop(lambda n: unvmap_any(n < limit), lambda n: n + 1, 0)

    assert jnp.array_equal(jax.vmap(count)(jnp.array([1, 4, 2])), jnp.array([4, 4, 4]))


def test_inside_a_scan_it_sees_the_batch_of_each_step():
    def step(carry, x):
        return carry + unvmap_max(x), None

    fn = jax.vmap(lambda xs: jax.lax.scan(step, jnp.zeros(()), xs)[0], in_axes=1)
    x = jnp.array([[1.0, 2.0], [5.0, 3.0]])
    assert jnp.array_equal(jax.jit(fn)(x), jnp.array([7.0, 7.0]))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_sharded_batch_gives_one_result_everywhere(name):
    fn, expected = REDUCTIONS[name]
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        sharded = jax.device_put(x, P("data"))
        mapped = jax.jit(jax.vmap(fn, out_axes=None))
        got = mapped(sharded)
        assert jax.typeof(got).sharding.spec == P()
        assert got == expected(x)
        assert fn(sharded) == expected(x)
        assert "all-gather" not in mapped.lower(sharded).compile().as_text()
        # A batch axis inside, the mesh axis outside: the same.
        assert jax.jit(jax.vmap(fn, in_axes=1, out_axes=None))(sharded) == expected(x)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_in_shard_map_each_device_reduces_what_it_has(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, jax.NamedSharding(mesh, P("data")))
        fn = jax.shard_map(
            lambda x: jax.vmap(unvmap_max, out_axes=None)(x)[None],
            in_specs=P("data"),
            out_specs=P("data"),
        )
        assert jnp.array_equal(jax.jit(fn)(x), x.max(axis=1))


def test_nothing_has_no_largest_element():
    with pytest.raises(ValueError, match="zero-size array"):
        unvmap_max(jnp.zeros(0))
