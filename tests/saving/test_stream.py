"""Equinox's `.eqx` format, with Equinox on the other side."""

import io
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vernal import Module, field
from vernal.saving import (
    default_deserialise_filter_spec,
    default_serialise_filter_spec,
    tree_deserialise_leaves,
    tree_serialise_leaves,
)


def written(tree, library=None, **options):
    file = io.BytesIO()
    write = tree_serialise_leaves if library is None else library.tree_serialise_leaves
    write(file, tree, **options)
    return file.getvalue()


def read(content, like, library=None, **options):
    file = io.BytesIO(content)
    loader = tree_deserialise_leaves if library is None else library.tree_deserialise_leaves
    loaded = loader(file, like, **options)
    assert file.read() == b""
    return loaded


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        if isinstance(y, (jax.Array, np.ndarray, np.generic)):
            x, y = np.asarray(x), np.asarray(y)
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
        else:
            assert x is y or repr(x) == repr(y)


# --- files go both ways

numpy_arrays = hnp.arrays(
    hnp.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc" and dtype.itemsize <= 16),
    hnp.array_shapes(min_dims=0, max_side=4),
).filter(lambda array: array.dtype.name not in ("float128", "complex256"))
jax_arrays = st.builds(
    lambda dtype, shape: jnp.ones(shape, dtype),
    st.sampled_from(["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64"]),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
)
leaves = st.one_of(
    numpy_arrays,
    jax_arrays,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.complex_numbers(),
    st.sampled_from([np.float32(2), np.int8(3), np.bool_(True), jax.nn.relu, "text"]),
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(tree=trees)
def test_the_same_bytes_are_written_and_read_back(tree):
    content = written(tree)
    assert content == written(tree, eqx)
    assert_same(read(content, tree), tree)


class Linear(Module):
    weight: jax.Array
    bias: jax.Array
    in_features: int = field(static=True)


class Dropout(Module):
    p: float
    inference: bool


class Net(Module):
    layers: list
    activation: object
    scale: jax.Array
    norm: object = None


class EqxLinear(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    in_features: int = eqx.field(static=True)


class EqxDropout(eqx.Module):
    p: float
    inference: bool


class EqxNet(eqx.Module):
    layers: list
    activation: object
    scale: jax.Array
    norm: object = None


def vernal_net(fill, p, activation=jax.nn.relu):
    layers = [Linear(jnp.full((2, 3), fill), jnp.full(2, fill), 3), activation, Dropout(p, False)]
    return Net([*layers, {"n": 7 if fill else 0}], activation, jnp.asarray(fill), (p, activation))


def eqx_net(fill, p):
    layers = [
        EqxLinear(jnp.full((2, 3), fill), jnp.full(2, fill), 3),
        jax.nn.relu,
        EqxDropout(p, False),
    ]
    return EqxNet(
        [*layers, {"n": 7 if fill else 0}], jax.nn.relu, jnp.asarray(fill), (p, jax.nn.relu)
    )


def test_modules_write_what_equinox_writes_though_numbers_are_structure_here():
    assert written(vernal_net(1.0, 0.3)) == written(eqx_net(1.0, 0.3), eqx)


def test_models_of_equinox_are_read_with_the_numbers_in_their_fields():
    loaded = read(written(eqx_net(1.0, 0.3), eqx), vernal_net(0.0, 0.5, jnp.tanh))
    saved = vernal_net(1.0, 0.3, jnp.tanh)
    assert_same(loaded, saved)
    assert loaded.layers[2].p == 0.3 and loaded.norm == (0.3, jnp.tanh)
    assert jax.tree.structure(loaded) == jax.tree.structure(saved)


def test_equinox_reads_models_of_vernal():
    loaded = read(written(vernal_net(1.0, 0.3)), eqx_net(0.0, 0.5), eqx)
    assert eqx.tree_equal(loaded, eqx_net(1.0, 0.3))


class MLP(Module):
    layers: tuple
    activation: object


def test_an_mlp_of_equinox_loads_into_a_skeleton(tmp_path, getkey):
    theirs = eqx.nn.MLP(2, 3, 4, 2, key=getkey())
    eqx.tree_serialise_leaves(tmp_path / "mlp", theirs)
    sizes = [(2, 4), (4, 4), (4, 3)]

    def build():
        return MLP(tuple(Linear(jnp.zeros((o, i)), jnp.zeros(o), i) for i, o in sizes), jax.nn.relu)

    loaded = tree_deserialise_leaves(tmp_path / "mlp", jax.eval_shape(build))
    assert jax.tree.structure(loaded) == jax.tree.structure(build())
    for ours, layer in zip(loaded.layers, theirs.layers, strict=True):
        assert (ours.weight == layer.weight).all() and (ours.bias == layer.bias).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"])
def test_dtypes_that_numpy_lacks_come_back_for_jax_and_numpy(dtype):
    tree = [
        jnp.ones((2, 3), dtype),
        np.ones(3, dtype),
        np.ones((), dtype)[()],
        jnp.zeros((), dtype),
    ]
    content = written(tree)
    # What Equinox writes for float8_e5m2, neither Equinox nor NumPy can read.
    assert (content == written(tree, eqx)) == (dtype != "float8_e5m2")
    assert_same(read(content, tree), tree)


def test_like_decides_the_kind_of_array():
    content = written([jnp.ones(2), np.ones(2, "float32"), np.ones(2, "float32"), 1.0, np.ones(())])
    like = [
        np.zeros(2, "float32"),
        jnp.zeros(2),
        jax.ShapeDtypeStruct((2,), "float32"),
        np.array(0.0),
        0.0,
    ]
    new = [np.ones(2, "float32"), jnp.ones(2), jnp.ones(2), np.array(1.0), 1.0]
    assert_same(read(content, like), new)


def test_arrays_are_placed_like_those_of_like():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    like = jax.device_put(jnp.zeros(16), NamedSharding(mesh, P("a")))
    assert read(written([jnp.ones(16)]), [like])[0].sharding == like.sharding


def test_arrays_of_strings_are_kept():
    tree = [np.array(["a", "bc"])]
    assert_same(read(written(tree), tree), tree)


# --- numbers


@pytest.mark.parametrize(
    ("stored", "like", "loaded"),
    [
        (3, 1.0, 3.0),
        (3, 1j, 3 + 0j),
        (True, 0, 1),
        (2.0, 0, 2),
        (1, False, True),
        (2**64 - 1, 0, 2**64 - 1),
    ],
)
def test_a_number_takes_the_type_of_like_if_it_keeps_its_value(stored, like, loaded):
    assert_same(read(written(stored), like), loaded)


def test_not_a_number_stays_what_it_is():
    assert np.isnan(read(written(float("nan")), 0.0))


@pytest.mark.parametrize(
    ("stored", "like"),
    [
        *[(2.5, 1), (3, True), (1 + 2j, 1.0), (1 + 2j, True), (2**53 + 1, 1.0)],
        *[(float("nan"), True), (float("inf"), 1), (np.ones(1), 1.0), (np.array("3"), 1)],
    ],
)
def test_a_number_that_would_change_is_refused(stored, like):
    with pytest.raises(RuntimeError, match=r"a leaf of the file does not match the one in `like`"):
        read(written(stored), like)


# --- what does not fit


@pytest.mark.parametrize(
    ("stored", "like", "expected", "got"),
    [
        (jnp.ones(2), jnp.ones(3), "f32[3]", "f32[2]"),
        (jnp.ones((1, 1)), jnp.ones(1), "f32[1]", "f32[1,1]"),
        (jnp.ones(2), jnp.ones(2, "int32"), "i32[2]", "f32[2]"),
        (np.ones(2), jnp.ones(2), "f32[2]", "f64[2]"),
        (jnp.ones(2), jax.ShapeDtypeStruct((2,), "int32"), "i32[2]", "f32[2]"),
        (np.float32(1), np.float64(1), "f64[]", "f32[]"),
        (np.arange(2.0), np.arange(2), "i64[2]", "f64[2]"),
        (2.5, 1, "int 1", "ndarray f64[]"),
    ],
)
def test_another_shape_or_dtype_is_refused_by_path(stored, like, expected, got):
    with pytest.raises(RuntimeError, match=r"does not match the one in `like`") as caught:
        read(written({"a": [1.0, stored]}), {"a": [1.0, like]})
    text = f"where: like['a'][1]\n  expected: {expected}\n  got: {got}\n"
    assert text in str(caught.value)


def test_a_filter_that_changes_the_kind_is_refused():
    content = written([jnp.ones(2)])
    with pytest.raises(
        RuntimeError, match=r"expected: ArrayImpl f32\[2\]\n  got: ndarray f32\[2\]"
    ):
        read(content, [jnp.ones(2)], filter_spec=lambda f, x: np.load(f))


def test_a_file_with_leftover_data_is_refused_which_equinox_accepts(tmp_path):
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, [1.0, jnp.ones(2)])
    assert eqx.tree_deserialise_leaves(path, [0.0]) == [1.0]
    with pytest.raises(
        RuntimeError, match=r"holds more than the leaves of `like`(.|\n)*got: 136 more bytes"
    ):
        tree_deserialise_leaves(path, [0.0])


def test_several_trees_may_share_an_open_file(tmp_path):
    with open(tmp_path / "two", "wb") as file:
        file.write(b"header\n")
        tree_serialise_leaves(file, [jnp.ones(2)])
        tree_serialise_leaves(file, [3])
    with open(tmp_path / "two", "rb") as file:
        assert file.readline() == b"header\n"
        assert tree_deserialise_leaves(file, [jnp.zeros(2)])[0].tolist() == [1, 1]
        assert tree_deserialise_leaves(file, [0]) == [3]


def test_a_file_that_was_cut_off_is_refused_by_path(tmp_path):
    path = tmp_path / "model.eqx"
    tree = [jnp.ones(2), np.ones((2, 2))]
    tree_serialise_leaves(path, tree)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(
            RuntimeError, match=r"a leaf could not be read\n  where: like\[[01]\]"
        ) as caught:
            tree_deserialise_leaves(path, tree)
        assert "the file holds no array here" in str(caught.value)


def test_pickles_are_never_read_or_written():
    file = io.BytesIO()
    np.save(file, np.array([None]), allow_pickle=True)
    with pytest.raises(RuntimeError, match="Object arrays cannot be loaded"):
        read(file.getvalue(), [np.array([None])])
    with pytest.raises(
        RuntimeError, match="an array of Python objects cannot be stored without pickle"
    ):
        written([np.array([None])])
    with pytest.raises(
        TypeError, match="an array of Python objects cannot be stored without pickle"
    ):
        default_serialise_filter_spec(file, np.array([None]))
    with pytest.raises(RuntimeError, match="the file holds no array here"):
        default_deserialise_filter_spec(io.BytesIO(b"\x80\x04N."), 1.0)


def test_keys_are_refused_with_the_way_out():
    key = jax.random.key(0)
    with pytest.raises(
        RuntimeError, match=r"where: pytree\['k'\](.|\n)*use vernal.saving.save and load"
    ):
        written({"k": key})
    with pytest.raises(RuntimeError, match="cannot store typed PRNG keys"):
        read(b"", {"k": key})
    with pytest.raises(TypeError, match="cannot store typed PRNG keys"):
        default_serialise_filter_spec(io.BytesIO(), key)


def test_what_has_no_values_is_refused_by_path():
    with pytest.raises(
        RuntimeError, match=r"where: pytree\[0\](.|\n)*a ShapeDtypeStruct has no values"
    ):
        written([jax.ShapeDtypeStruct((2,), "float32")])
    with pytest.raises(RuntimeError, match=r"where: pytree\[0\](.|\n)*a Python int is too large"):
        written([2**70])


# --- filters


def skip(f, x):
    return x


def test_a_filter_decides_what_is_written_and_read():
    def only_arrays(f, x):
        if isinstance(x, jax.Array):
            np.save(f, np.asarray(x) + 1)

    tree = [jnp.zeros(2), 7]
    content = written(tree, filter_spec=only_arrays)
    assert content == written(tree, eqx, filter_spec=only_arrays)
    loaded = read(content, tree, filter_spec=[default_deserialise_filter_spec, skip])
    assert loaded[0].tolist() == [1, 1] and loaded[1] == 7


def test_a_prefix_of_filters_may_be_made_from_the_model():
    net = vernal_net(1.0, 0.3)
    chosen = jax.tree.map(lambda x: skip if x.ndim == 1 else default_serialise_filter_spec, net)
    content = written(net, filter_spec=chosen)
    assert written(net.layers[0].weight) in content and written(net.layers[0].bias) not in content
    back = jax.tree.map(lambda x: skip if x.ndim == 1 else default_deserialise_filter_spec, net)
    loaded = read(content, vernal_net(0.0, 0.5), filter_spec=back)
    assert loaded.layers[0].weight.all() and not loaded.layers[0].bias.any()
    assert loaded.layers[2].p == 0.3


def test_a_filter_for_a_whole_part():
    tree = {"a": [1.0, {"b": 2.0}], "c": 3.0}
    content = written(tree, filter_spec={"a": skip, "c": default_serialise_filter_spec})
    assert content == written(3.0)
    spec = {"a": skip, "c": default_deserialise_filter_spec}
    assert read(content, {"a": [0.0, {"b": 0.0}], "c": 0.0}, filter_spec=spec) == {
        "a": [0.0, {"b": 0.0}],
        "c": 3.0,
    }


@pytest.mark.parametrize("spec", [{"a": skip}, [skip], {"a": [skip], "c": skip}, None, 3])
def test_filters_that_are_no_prefix_are_refused(spec):
    with pytest.raises(ValueError, match="filter_spec is not a prefix of the tree"):
        written({"a": [1.0, 2.0], "c": 3.0}, filter_spec=spec)


def test_a_filter_that_cannot_be_called_is_refused():
    with pytest.raises(
        TypeError, match=r"a filter of filter_spec cannot be called\n  where: pytree\[1\]"
    ):
        written([1.0, 2], filter_spec=[skip, False])


def test_errors_of_a_filter_name_the_leaf_and_keep_their_cause():
    def fail(f, x):
        raise KeyError("hm")

    with pytest.raises(
        RuntimeError, match=r"could not be written\n  where: pytree\['a'\]\n  got: KeyError: 'hm'"
    ) as e:
        written({"a": 1.0}, filter_spec=fail)
    assert isinstance(e.value.__cause__, KeyError)


def test_is_leaf_gives_a_whole_node_to_the_filter():
    def is_pair(x):
        return isinstance(x, tuple)

    def write(f, x):
        np.save(f, np.array(x))

    def load(f, x):
        return tuple(np.load(f).tolist())

    content = written({"p": (1.0, 2.0)}, filter_spec=write, is_leaf=is_pair)
    assert read(content, {"p": (0.0, 0.0)}, filter_spec=load, is_leaf=is_pair) == {"p": (1.0, 2.0)}


# --- paths


@pytest.mark.parametrize(("name", "file"), [("m", "m.eqx"), ("m.eqx", "m.eqx"), ("m.bin", "m.bin")])
@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_the_suffix_is_added_where_there_is_none_as_equinox_does(tmp_path, name, file, kind):
    tree_serialise_leaves(kind(tmp_path / name), [1.0])
    assert os.listdir(tmp_path) == [file]
    assert tree_deserialise_leaves(kind(tmp_path / name), [0.0]) == [1.0]
    assert eqx.tree_deserialise_leaves(tmp_path / name, [0.0]) == [1.0]
