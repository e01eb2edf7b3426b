"""`Embedding`: against Equinox, on meshes, and when misused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from vernal import nn


@pytest.mark.parametrize("dtype", [None, jnp.float16, jnp.bfloat16])
def test_the_table_is_drawn_as_in_equinox(dtype, getkey):
    key = getkey()
    ours = nn.Embedding(7, 3, dtype=dtype, key=key)
    peer = eqx.nn.Embedding(7, 3, dtype=dtype, key=key)
    assert ours.weight.dtype == peer.weight.dtype and (ours.weight == peer.weight).all()
    assert (ours.num_embeddings, ours.embedding_size) == (7, 3)


@pytest.mark.parametrize("i", [0, 6, -1, -7, 7, 100, -8, -100])
@pytest.mark.parametrize("kind", [int, np.int32, np.asarray, jnp.asarray])
def test_rows_inside_and_outside_the_table_agree_with_equinox(i, kind, getkey):
    table = jax.random.normal(getkey(), (7, 3))
    peer = eqx.nn.Embedding(weight=table)
    # NumPy's default integers are 64 bits wide, which JAX has switched off.
    x = kind(i) if kind is not np.asarray else np.asarray(i, np.int32)
    assert (nn.Embedding(weight=table)(x) == peer(jnp.asarray(i))).all()


def test_gradients_add_up_over_equal_rows_and_agree_with_equinox(getkey):
    table, x = jax.random.normal(getkey(), (7, 3)), jnp.array([1, 1, -1, 9, 0])

    def gradient(make):
        return jax.grad(lambda m: (jax.vmap(m)(x) ** 3).sum())(make(weight=table)).weight

    np.testing.assert_allclose(gradient(nn.Embedding), gradient(eqx.nn.Embedding), rtol=1e-6)


def test_small_unsigned_indices_reach_a_large_table():
    table = jnp.arange(1000.0)[:, None]
    assert nn.Embedding(weight=table)(jnp.array(200, jnp.uint8)) == 200


@pytest.mark.parametrize("table_spec", [P(None, None), P("model", None), P(None, "model")], ids=str)
@pytest.mark.parametrize("index_spec", [P("data"), P(None)], ids=str)
@pytest.mark.sample(3)
def test_lookups_and_gradients_work_on_an_explicit_mesh(table_spec, index_spec, getkey):
    mesh = jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    table, x = jax.random.normal(getkey(), (16, 4)), jnp.array([3, 1, 1, -1, 15, 0, 8, 99])

    def rows(m, x):
        pairs = x.reshape(4, 2, out_sharding=P(index_spec[0], None))
        return m(jnp.array(3)), (m(x), jax.vmap(m)(x)), (m(pairs), jax.vmap(jax.vmap(m))(pairs))

    def gradient(m, x):
        return jax.grad(lambda m: (m(x) ** 2).sum())(m).weight

    expected = table[jnp.clip(jnp.where(x < 0, x + 16, x), 0, 15)]
    expected_grad = gradient(nn.Embedding(weight=table), x)
    with jax.set_mesh(mesh):
        layer = nn.Embedding(weight=jax.device_put(table, table_spec))
        x = jax.device_put(x, index_spec)
        (one, many, pairs), grad = jax.jit(lambda m, x: (rows(m, x), gradient(m, x)))(layer, x)
        eagerly = layer(x)
    assert (np.asarray(one) == expected[0]).all()
    for y in (*many, eagerly):
        assert jax.typeof(y).sharding.spec == P(index_spec[0], table_spec[1])
        assert (np.asarray(y) == expected).all()
    for y in pairs:
        assert (np.asarray(y).reshape(8, 4) == expected).all()
    assert jax.typeof(grad).sharding.spec == table_spec
    np.testing.assert_allclose(np.asarray(grad), expected_grad, rtol=1e-6)


def test_a_table_sharded_over_the_axis_of_the_batch_can_be_looked_up_row_by_row(getkey):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    table = jax.random.normal(getkey(), (16, 4))
    with jax.set_mesh(mesh):
        layer = nn.Embedding(weight=jax.device_put(table, P("data", None)))
        assert (np.asarray(jax.jit(layer)(5)) == table[5]).all()


def test_a_mesh_that_only_the_arrays_know_of_is_enough(getkey):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    table, x = jax.random.normal(getkey(), (16, 4)), jnp.arange(8)
    everywhere = jax.NamedSharding(mesh, P())
    layer = nn.Embedding(weight=jax.device_put(table, everywhere))
    y = jax.jit(jax.vmap(layer))(jax.device_put(x, jax.NamedSharding(mesh, P("data"))))
    assert (np.asarray(y) == table[:8]).all()


def test_an_automatic_mesh_needs_no_help(getkey):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    table, x = jax.random.normal(getkey(), (16, 4)), jnp.arange(8)
    layer = nn.Embedding(weight=jax.device_put(table, jax.NamedSharding(mesh, P("data"))))
    y = jax.jit(jax.vmap(layer))(jax.device_put(x, jax.NamedSharding(mesh, P("data"))))
    assert (np.asarray(y) == table[:8]).all()


def test_a_table_without_rows_has_nothing_to_look_up(getkey):
    for table in (nn.Embedding(0, 4, key=getkey()), nn.Embedding(weight=jnp.ones((0, 4)))):
        assert table.weight.shape == (0, 4)
        for x in (0, jnp.array([0, 1]), jnp.zeros((0,), int)):
            with pytest.raises(ValueError, match=r"(?s)without rows.*at least one row.*f32\[0,4\]"):
                table(x)
    assert nn.Embedding(4, 0, key=getkey())(jnp.array([1, 2])).shape == (2, 0)


@pytest.mark.parametrize("x", [jnp.array(1.0), jnp.array(True), 2.0], ids=str)
def test_what_is_not_an_integer_is_refused(x):
    with pytest.raises(TypeError, match=r"(?s)takes integer indices.*integers"):
        nn.Embedding(weight=jnp.ones((3, 2)))(x)


@pytest.mark.parametrize("missing", ["num_embeddings", "embedding_size", "key"])
def test_what_is_missing_to_draw_a_table_is_named(missing, getkey):
    given = {"num_embeddings": 3, "embedding_size": 2, "key": getkey()}
    del given[missing]
    with pytest.raises(ValueError, match=f"(?s)needs either a table.*got: no {missing}\n"):
        nn.Embedding(**given)


@pytest.mark.parametrize("sizes", [(-1, 2), (3, -2)])
def test_negative_sizes_are_refused(sizes, getkey):
    with pytest.raises(ValueError, match="(?s)`Embedding` was given a wrong size.*at least 0"):
        nn.Embedding(*sizes, key=getkey())


@pytest.mark.parametrize(
    "sizes, shape, expected",
    [
        ((4, 2), (3, 2), r"\(4, 2\)"),
        ((3, 5), (3, 2), r"\(3, 5\)"),
        ((None, None), (3,), r"\(num_embeddings, embedding_size\)"),
    ],
)
def test_a_table_of_another_shape_is_refused(sizes, shape, expected):
    with pytest.raises(
        ValueError, match=rf"(?s)one row for each index.*expected: shape {expected}"
    ):
        nn.Embedding(*sizes, weight=jnp.ones(shape))


def test_the_type_of_a_given_table_can_be_changed():
    assert (
        nn.Embedding(weight=np.ones((3, 2), np.float32), dtype=jnp.bfloat16).weight.dtype
        == jnp.bfloat16
    )


@pytest.mark.parametrize(
    "dtype", [jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.uint16, jnp.uint32]
)
def test_rows_by_numbers_of_every_type(dtype):
    table = nn.Embedding(weight=jnp.arange(200.0)[:, None])
    info = jnp.iinfo(dtype)
    numbers = [0, 5, 127, int(info.max), int(info.min)]
    rows = [np.clip(n + 200 * (n < 0), 0, 199) for n in numbers]
    assert table(jnp.asarray(np.array(numbers, dtype))).ravel().tolist() == rows


def test_a_tied_head_multiplies_with_every_row():
    table = nn.Embedding(5, 3, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 4, 3))
    np.testing.assert_allclose(table.attend(x), x @ table.weight.T, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="features must be as long as the rows"):
        table.attend(x[..., :2])


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_numbers_beyond_32_bits_are_outside_of_the_table_too(dtype, getkey):
    layer = nn.Embedding(7, 3, key=getkey())
    far = np.array([2, 7, 2**31, 2**32, 2**32 + 3, 2**63 - 1], dtype)
    np.testing.assert_array_equal(layer(far), layer.weight[jnp.array([2, 6, 6, 6, 6, 6])])
    np.testing.assert_array_equal(layer(far[3]), layer.weight[6])
    if dtype is np.int64:
        low = np.array([-1, -7, -8, -(2**32) - 1, -(2**63)], dtype)
        np.testing.assert_array_equal(layer(low), layer.weight[jnp.array([6, 0, 0, 0, 0])])


def test_a_head_of_the_tables_of_an_ensemble_is_refused():
    models = jax.vmap(lambda key: nn.Embedding(5, 3, key=key))(
        jax.random.split(jax.random.key(0), 2)
    )
    with pytest.raises(ValueError, match="a parameter of `Embedding` has the wrong shape"):
        models.attend(jnp.ones(3))
    assert jax.vmap(lambda model: model.attend(jnp.ones(3)))(models).shape == (2, 5)
