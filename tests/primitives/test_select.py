"""`select_if_vmap`: a select under `vmap`, and nothing otherwise."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from vernal.primitives import select_if_vmap

NEW, OLD = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[5.0, 6.0], [7.0, 8.0]])
PREDS = jnp.array([True, False])


def primitives(fn, *args):
    return [str(eqn.primitive) for eqn in jax.make_jaxpr(fn)(*args).eqns]


def values(axes):
    """A row for what is not mapped, both rows for what is."""
    return [x[0] if axis is None else x for x, axis in zip((NEW, OLD), axes[1:], strict=True)]


def compiled(fn, *args):
    return jax.jit(fn).lower(*args).as_text()


@pytest.mark.parametrize("pred", [True, False])
@pytest.mark.parametrize("jit", [False, True])
def test_without_a_map_it_is_the_new(pred, jit):
    fn = jax.jit(select_if_vmap) if jit else select_if_vmap
    assert jnp.array_equal(fn(pred, NEW, OLD), NEW)
    assert "stablehlo.select" not in compiled(select_if_vmap, pred, NEW, OLD)


@pytest.mark.parametrize("axes", [(None, 0, 0), (None, 1, 0), (None, None, 1), (None, 0, None)])
def test_a_map_over_the_values_selects_nothing(axes):
    fn = jax.vmap(select_if_vmap, in_axes=axes)
    pred, new, old = jnp.array(False), *values(axes)
    expected = jax.vmap(lambda pred, new, old: new, in_axes=axes)(pred, new, old)
    assert jnp.array_equal(fn(pred, new, old), expected)
    assert "select_n" not in primitives(fn, pred, new, old)
    assert "stablehlo.select" not in compiled(fn, pred, new, old)


@pytest.mark.parametrize(
    "axes", [(0, 0, 0), (0, 1, 0), (0, None, 1), (0, 0, None), (0, None, None)]
)
def test_a_map_over_the_condition_selects(axes):
    fn = jax.vmap(select_if_vmap, in_axes=axes)
    new, old = values(axes)
    expected = jax.vmap(lambda p, new, old: jnp.where(p, new, old), in_axes=axes)(PREDS, new, old)
    assert jnp.array_equal(fn(PREDS, new, old), expected)
    assert primitives(fn, PREDS, new, old).count("select_n") == 1


@pytest.mark.parametrize("order", [((0, None), (None, 0)), ((None, 0), (0, None))])
def test_maps_nest_in_either_order(order):
    """The values are mapped by one map, the condition by the other."""

    def nested(fn):
        for pred_axis, value_axis in order:
            fn = jax.vmap(fn, in_axes=(pred_axis, value_axis, value_axis))
        return fn(PREDS, NEW, OLD)

    assert jnp.array_equal(nested(select_if_vmap), nested(jnp.where))
    preds = jnp.array([[True, False], [False, True]])
    both = jax.vmap(jax.vmap(select_if_vmap))(preds, NEW, OLD)
    assert jnp.array_equal(both, jnp.where(preds, NEW, OLD))


def smooth(select):
    def f(pred, new, old):
        return jnp.sum(select(pred, jnp.sin(new) * old, jnp.cos(old) * new) ** 2)

    return f


DERIVATIVES = {
    "grad": lambda f: jax.grad(f, (1, 2)),
    "of the new": lambda f: jax.grad(f, 1),
    "hessian": lambda f: jax.hessian(f, (1, 2)),
    "grad of grad": lambda f: jax.grad(lambda *args: jnp.sum(jax.grad(f, 1)(*args) ** 2), (1, 2)),
    "jvp": lambda f: (
        lambda p, new, old: jax.jvp(lambda new: f(p, new, old), (new,), (jnp.cos(new),))
    ),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("context", ["alone", "map inside", "map outside"])
@pytest.mark.sample(3)
def test_derivatives_are_those_of_what_is_selected(derivative, context):
    def derived(select):
        of = DERIVATIVES[derivative]
        if context == "alone":
            return of(smooth(select))(jnp.array(True), NEW, OLD)
        if context == "map outside":
            return jax.vmap(of(smooth(select)))(PREDS, NEW, OLD)
        return of(lambda *args: jnp.sum(jax.vmap(smooth(select))(*args)))(PREDS, NEW, OLD)

    got, expected = derived(select_if_vmap), derived(jnp.where)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, expected)


def test_without_a_map_no_derivative_reaches_the_old():
    got = jax.grad(lambda old: jnp.sum(select_if_vmap(False, NEW, old)))(OLD)
    assert jnp.array_equal(got, 0 * OLD)


def test_it_is_linear_in_both():
    fn = jax.vmap(select_if_vmap)
    (new, old) = jax.linear_transpose(partial(fn, PREDS), NEW, OLD)(NEW)
    assert jnp.array_equal(new, jnp.where(PREDS[:, None], NEW, 0))
    assert jnp.array_equal(old, jnp.where(PREDS[:, None], 0, NEW))
    (new,) = jax.linear_transpose(lambda new: fn(PREDS, new, OLD), NEW)(NEW)
    assert jnp.array_equal(new, jnp.where(PREDS[:, None], NEW, 0))
    (old,) = jax.linear_transpose(lambda old: fn(PREDS, NEW, old), OLD)(NEW)
    assert jnp.array_equal(old, jnp.where(PREDS[:, None], 0, NEW))


def test_trees_of_any_dtype_are_selected_leaf_by_leaf():
    keys = jax.random.split(jax.random.key(0), 2)
    new = {"key": keys, "count": jnp.array([1, 2]), "flag": PREDS, "name": "x", "none": None}
    old = {"key": keys[::-1], "count": jnp.array([3, 4]), "flag": ~PREDS, "name": "x", "none": None}
    dynamic = {"key": 0, "count": 0, "flag": 0, "name": None, "none": None}

    def pick(pred, new, old):
        out = select_if_vmap(pred, new | {"name": "x"}, old | {"name": "x"})
        assert out.pop("name") == "x"
        return out

    new["name"] = old["name"] = dynamic["name"] = None
    got = jax.vmap(pick, in_axes=(0, dynamic, dynamic))(PREDS, new, old)
    assert jnp.array_equal(got["count"], jnp.array([1, 4]))
    assert jnp.array_equal(got["flag"], jnp.array([True, True]))
    expected = jnp.where(PREDS, keys, keys[::-1])
    assert jnp.array_equal(jax.random.key_data(got["key"]), jax.random.key_data(expected))


@pytest.mark.parametrize("jit", [False, True])
def test_a_sharded_batch_stays_where_it_is(jit):
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    pred = x[:, 0] > 6
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        new, p = jax.device_put(x, P("data")), jax.device_put(pred, P("data"))
        fn = jax.vmap(select_if_vmap, in_axes=(0, 0, None))
        fn = jax.jit(fn) if jit else fn
        got = fn(p, new, jnp.zeros(2))
        assert jax.typeof(got).sharding.spec == P("data", None)
        assert jnp.array_equal(jax.device_get(got), np.where(pred[:, None], x, 0))
        grads = jax.grad(lambda new: jnp.sum(fn(p, new, jnp.zeros(2)) ** 2))(new)
        assert jnp.array_equal(jax.device_get(grads), np.where(pred[:, None], 2 * x, 0))
        assert jax.typeof(grads).sharding.spec == P("data", None)


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_sharded_differently_is_resharded_as_the_new(mapped):
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        new, old = jax.device_put(x, P("data")), jax.device_put(-x, P(None))
        pred = jnp.array([True, False])
        if mapped:
            fn = jax.vmap(select_if_vmap, in_axes=(0, None, None))
            expected = np.stack([x, -x])
        else:
            fn, pred, expected = select_if_vmap, pred[0], x
        got, pull = jax.vjp(lambda new, old: jax.jit(fn)(pred, new, old), new, old)
        assert jax.typeof(got).sharding.spec == P(*[None] * mapped, "data", None)
        assert jnp.array_equal(jax.device_get(got), expected)
        of_new, of_old = pull(got)
        assert jax.typeof(of_new).sharding.spec == P("data", None)
        assert jax.typeof(of_old).sharding.spec == P(None, None)


def test_inside_shard_map_what_varies_and_what_does_not_go_together():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.arange(16.0).reshape(8, 2)

    def per_device(x):
        fn = jax.vmap(select_if_vmap, in_axes=(0, 0, None))
        return fn(jnp.array([True, False]), x[0], jnp.zeros(()))[None]

    fn = jax.shard_map(per_device, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert jnp.array_equal(jax.jit(fn)(x), x * jnp.array([[1.0, 0.0]]))
    got = jax.jit(jax.grad(lambda x: jnp.sum(fn(x) ** 2)))(x)
    assert jnp.array_equal(got, 2 * x * jnp.array([[1.0, 0.0]]))


@pytest.mark.parametrize("pred", [jnp.array([True]), 1, jnp.array(1.0)])
def test_only_a_scalar_bool_can_choose(pred):
    with pytest.raises(TypeError, match="must be a scalar bool"):
        inspect.unwrap(select_if_vmap)(pred, NEW, OLD)


@pytest.mark.parametrize(
    "new, old, text",
    [
        ({"a": 1.0}, {"b": 1.0}, "chooses between do not match"),
        ({"a": jnp.ones(2)}, {"a": jnp.ones(3)}, r"new\['a'\]"),
        ({"a": jnp.ones(2)}, {"a": jnp.arange(2)}, "f32"),
        ({"a": "x"}, {"a": "y"}, r"new\['a'\]"),
        ({"a": "x"}, {"a": jnp.ones(2)}, r"new\['a'\]"),
    ],
    ids=["structure", "shape", "dtype", "string", "kind"],
)
def test_trees_that_differ_are_refused_by_path(new, old, text):
    with pytest.raises(TypeError, match=text):
        select_if_vmap(True, new, old)
