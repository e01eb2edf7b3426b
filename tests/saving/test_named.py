"""Trees in safetensors files, by name."""

import enum
import inspect
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vernal import Module, field
from vernal.saving import LoadReport, load, load_metadata, save
from vernal.show import path_text
from vernal.trees import named_leaves

JAX_DTYPES = [
    *(
        "bool",
        "int2",
        "uint2",
        "int4",
        "uint4",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
    ),
    *("float16", "bfloat16", "float32", "complex64", "float4_e2m1fn"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3b11fnuz"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
NUMPY_DTYPES = [*JAX_DTYPES, "int64", "uint64", "float64", "complex128"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def bits(array):
    array = np.asarray(array)
    return array.dtype, array.shape, array.tobytes()


def assert_same(loaded, saved):
    assert jax.tree.structure(loaded) == jax.tree.structure(saved)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(saved), strict=True):
        assert type(a) is type(b)
        if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            assert a.dtype == b.dtype
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if isinstance(b, (jax.Array, np.ndarray, np.generic)):
            assert bits(a) == bits(b)
            assert not isinstance(b, jax.Array) or a.sharding == b.sharding
        else:
            assert a is b or repr(a) == repr(b)


# --- round trips


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    raw = draw(st.binary(min_size=0, max_size=16)) + b"\1"
    count = int(np.prod(shape)) * dtype.itemsize
    content = (raw * (count // len(raw) + 1))[:count]
    if dtype.kind == "b" or dtype.name[:4] in ("int2", "int4", "uint") or dtype.name.endswith("fn"):
        # Bytes beyond what the dtype has bits for are no values of it.
        content = bytes(byte & 1 for byte in content)
    value = np.frombuffer(content, dtype).reshape(shape)
    kind = draw(st.sampled_from(["numpy", "fortran", "scalar", "jax"]))
    if kind == "jax" and dtype.name in JAX_DTYPES:
        return jnp.asarray(np.array(value))
    if kind == "scalar" and value.shape == ():
        return value[()]
    return np.asfortranarray(value) if kind == "fortran" else np.array(value)


leaves = st.one_of(
    arrays(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.complex_numbers(),
    st.just(jax.nn.relu),
    st.text(max_size=3),
    st.builds(jax.random.key, st.integers(0, 9), impl=st.sampled_from(["threefry2x32", "rbg"])),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
        st.tuples(inner, st.none()),
    ),
    max_leaves=8,
)


@given(tree=trees)
def test_any_tree_comes_back_bit_for_bit(tmp_path, tree):
    save(tmp_path / "tree", tree)
    assert_same(load(tmp_path / "tree", like=tree), tree)


@pytest.mark.parametrize("dtype", JAX_DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
@pytest.mark.sample(6)
def test_every_dtype_of_jax_comes_back(path, dtype, shape):
    saved = jnp.ones(shape, dtype)
    save(path, [saved])
    assert_same(load(path, like=[jnp.zeros(shape, dtype)]), [saved])
    assert_same(load(path, like=[jax.ShapeDtypeStruct(shape, dtype)]), [saved])


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_keep_their_kind(path, impl):
    keys = {
        "one": jax.random.key(1, impl=impl),
        "many": jax.random.split(jax.random.key(2, impl=impl), (2, 3)),
    }
    save(path, keys)
    assert_same(load(path, like=keys), keys)
    assert_same(load(path, like=jax.eval_shape(lambda: keys)), keys)


def test_a_key_of_another_kind_is_refused(path):
    save(path, [jax.random.key(1, impl="rbg")])
    with pytest.raises(ValueError, match=r"0: expected key<urbg>\[\], found key<rbg>\[\]"):
        load(path, like=[jax.random.key(1, impl="unsafe_rbg")])
    with pytest.raises(ValueError, match=r"0: expected u32\[4\], found key<rbg>\[\]"):
        load(path, like=[jnp.zeros(4, "uint32")])


def test_big_endian_arrays_keep_their_byte_order(path):
    saved = np.arange(3, dtype=">f4")
    save(path, [saved])
    [loaded] = load(path, like=[saved])
    assert loaded.dtype.str == ">f4" and (loaded == saved).all()
    [loaded] = load(path, like=[np.zeros(3, "<f4")])
    assert loaded.dtype.str == "<f4" and (loaded == saved).all()


def test_loaded_numpy_arrays_are_writable_and_outlive_the_file(path):
    save(path, [np.arange(3.0)])
    [loaded] = load(path, like=[np.zeros(3)])
    path.write_bytes(bytes(path.stat().st_size))
    loaded[0] = 7.0
    assert loaded.tolist() == [7.0, 1.0, 2.0]


def test_loaded_jax_arrays_outlive_the_file(path):
    saved = jnp.arange(4096.0)
    save(path, [saved])
    [loaded] = load(path, like=[saved])
    path.write_bytes(bytes(path.stat().st_size))
    assert (loaded == saved).all()


class Net(Module):
    weight: jax.Array
    bias: jax.Array | None
    activation: object
    width: int = field(static=True)


class Ten(Module):
    width: int = field(static=True)
    activation: object
    bias: jax.Array | None
    weight: jax.Array


def test_modules_are_saved_by_name_and_keep_the_structure_of_like(path):
    net = Net(jnp.ones((2, 3)), jnp.arange(2.0), jax.nn.relu, 3)
    save(path, net)
    assert set(safetensors.numpy.load_file(path)) == {"weight", "bias"}
    loaded = load(path, like=jax.tree.map(jnp.zeros_like, net))
    assert_same(loaded, net)
    assert loaded.activation is jax.nn.relu


def test_the_order_of_fields_does_not_matter(path):
    net = Net(jnp.ones(2), jnp.zeros(2), jax.nn.relu, 3)
    save(path, net)
    loaded = load(path, like=Ten(4, jnp.tanh, jnp.full(2, 7.0), jnp.full(2, 7.0)))
    assert (loaded.weight == 1).all() and (loaded.bias == 0).all()
    assert loaded.width == 4 and loaded.activation is jnp.tanh


def test_a_skeleton_takes_the_place_of_a_model(path):
    net = Net(jnp.ones((2, 3)), jnp.arange(2.0), jax.nn.relu, 3)
    save(path, net)
    skeleton = jax.eval_shape(lambda: net)
    assert_same(load(path, like=skeleton), net)


def test_a_tree_may_be_a_single_leaf_or_nothing(path):
    save(path, jnp.arange(3.0))
    assert load(path, like=jnp.zeros(3)).tolist() == [0, 1, 2]
    with pytest.raises(
        ValueError, match=r"got: \(the tree itself\): expected f32\[2\], found f32\[3\]"
    ):
        load(path, like=jnp.zeros(2))
    save(path, None)
    assert load(path, like=None) is None


def test_the_name_that_the_format_keeps_for_itself_can_be_used(path):
    tree = {"__metadata__": jnp.ones(2), '"__metadata__"': jnp.zeros(3), "vernal": np.ones(1)}
    save(path, tree, metadata={"vernal": 1})
    assert_same(load(path, like=tree), tree)
    assert load_metadata(path) == {"vernal": 1}


def test_strings_functions_and_enumerations_are_structure(path):
    class Color(enum.IntEnum):
        RED = 1
        BLUE = 2

    save(path, [1, "text", Color.RED, jnp.tanh])
    assert load(path, like=[0, "other", Color.BLUE, jnp.sin]) == [1, "other", Color.BLUE, jnp.sin]


# --- devices


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("spec", [P("a", "b"), P(("a", "b")), P(), P(None, "a")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
@pytest.mark.sample(3)
def test_sharded_arrays_come_back_sharded(path, mesh, spec, dtype):
    saved = jax.device_put(jnp.arange(64).astype(dtype).reshape(8, 8), NamedSharding(mesh, spec))
    save(path, [saved])
    assert_same(load(path, like=[saved]), [saved])
    struct = jax.ShapeDtypeStruct((8, 8), dtype, sharding=saved.sharding)
    assert_same(load(path, like=[struct]), [saved])
    [alone] = load(path, like=[jnp.zeros((8, 8), dtype)])
    assert bits(alone) == bits(saved)


def test_sharded_keys_come_back_sharded(path, mesh):
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("a")))
    save(path, keys)
    assert_same(load(path, like=keys), keys)


def test_a_device_is_chosen_only_where_like_chose_one(path):
    save(path, {"free": jnp.ones(2), "put": jnp.ones(2)})
    device = jax.devices()[3]
    loaded = load(path, like={"free": jnp.zeros(2), "put": jax.device_put(jnp.zeros(2), device)})
    assert not loaded["free"].committed
    assert loaded["put"].committed and loaded["put"].devices() == {device}


def test_donated_arrays_may_say_what_is_expected(path):
    like = jnp.ones(2)
    save(path, [like])
    like.delete()
    assert load(path, like=[like])[0].tolist() == [1.0, 1.0]


def test_numbers_stay_weakly_typed(path):
    tree = {"rate": jnp.asarray(0.1), "count": jnp.asarray(3), "strong": jnp.float32(0.1)}
    save(path, tree)
    placed = jax.device_put(tree["rate"], jax.devices()[1])
    for like in (tree, jax.eval_shape(lambda: tree), {**tree, "rate": placed}):
        loaded = load(path, like)
        assert [loaded[k].weak_type for k in ("rate", "count", "strong")] == [True, True, False]
        assert all(loaded[k] == tree[k] and loaded[k].dtype == tree[k].dtype for k in tree)
    assert loaded["rate"].devices() == placed.devices()


def test_64_bits_are_not_shortened(path):
    save(path, [np.ones(2)])
    with pytest.raises(ValueError, match=r"JAX would truncate float64 to 32 bits(.|\n)*where: 0"):
        load(path, like=[jax.ShapeDtypeStruct((2,), np.float64)])
    with jax.enable_x64(True):
        [loaded] = load(path, like=[jax.ShapeDtypeStruct((2,), np.float64)])
    assert loaded.dtype == "float64"


# --- what does not fit


@pytest.fixture
def saved(path):
    save(path, {"a": jnp.ones(2), "b": jnp.ones((2, 3)), "old": np.ones(2), "n": 3})
    return path


LIKE = {"a": np.zeros(2, "float32"), "b": np.zeros((3, 2), "float32"), "new": np.zeros(2), "n": 1.5}
LINES = [
    "new: missing, expected f64[2]",
    "old: not expected, found f64[2]",
    "b: expected f32[3,2], found f32[2,3]",
    "n: expected f64[], found i64[]",
]


def test_one_error_lists_all_that_does_not_fit(saved):
    with pytest.raises(ValueError, match="the file does not fit the tree") as caught:
        load(saved, like=LIKE)
    assert all(line in str(caught.value) for line in LINES)
    assert "a: " not in str(caught.value)


def test_what_fits_is_loaded_if_asked_for(saved):
    tree, report = load(saved, like=LIKE, strict=False)
    assert tree["a"].tolist() == [1, 1]
    assert tree["b"] is LIKE["b"] and tree["new"] is LIKE["new"] and tree["n"] == 1.5
    assert report == LoadReport(
        missing={"new": "f64[2]"},
        extra={"old": "f64[2]"},
        misshapen={"b": ("f32[3,2]", "f32[2,3]"), "n": ("f64[]", "i64[]")},
    )
    assert str(report).splitlines() == LINES


def test_a_report_of_nothing_says_so(saved):
    tree, report = load(
        saved, {"a": jnp.ones(2), "b": jnp.ones((2, 3)), "old": np.ones(2), "n": 0}, strict=False
    )
    assert report == LoadReport() and str(report) == "everything fits" and tree["n"] == 3


@pytest.mark.parametrize("name", ["new", "b"])
def test_a_skeleton_has_no_value_to_keep(saved, name):
    like = {**LIKE, name: jax.ShapeDtypeStruct((7,), jnp.float32)}
    with pytest.raises(ValueError, match="only a shape and dtype have no value to keep") as caught:
        load(saved, like=like, strict=False)
    assert f"got: {name}: " in str(caught.value) and "n: " not in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "like"),
    [
        (jnp.ones((1, 1)), jnp.ones(1)),
        (jnp.ones(1), jnp.ones(())),
        (jnp.ones(2), jnp.ones(2, "int32")),
        (jnp.ones(2, "float8_e4m3fn"), jnp.ones(2, "float8_e5m2")),
        (jnp.ones(2, "int4"), jnp.ones(2, "uint8")),
        (np.ones(2, "complex128"), np.ones((2, 2))),
        (jnp.ones(()), 1.0),
        (True, 1),
        (1, True),
        (1.0, 1),
        (np.ones(1), 1.0),
    ],
)
def test_another_shape_or_dtype_is_refused(path, stored, like):
    save(path, {"x": stored})
    with pytest.raises(ValueError, match="x: expected .*, found "):
        load(path, like={"x": like})


def test_a_dtype_that_no_leaf_can_have_is_refused(path):
    entry = '{"x":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'.ljust(56)
    path.write_bytes(len(entry).to_bytes(8, "little") + entry.encode() + b"\0")
    with pytest.raises(
        ValueError, match=r"x: expected f32\[2\], found F4\[2\], which this version of JAX"
    ):
        load(path, like={"x": jnp.ones(2)})


# --- what cannot be stored


class Odd:
    def __jax_array__(self):
        return jnp.ones(2)


@pytest.mark.parametrize(
    ("leaf", "error", "text"),
    [
        (np.array(["a"]), TypeError, "an array of dtype <U1 cannot be stored"),
        (np.array([None]), TypeError, "an array of dtype object cannot be stored"),
        (np.zeros(2, jax.dtypes.float0), TypeError, "cannot be stored"),
        (
            np.zeros(2, "longdouble"),
            TypeError,
            "expected: a dtype that means the same on every machine",
        ),
        (Odd(), TypeError, "a Odd can be stored as an array, but not restored from one"),
        (
            jax.ShapeDtypeStruct((2,), "float32"),
            ValueError,
            "a ShapeDtypeStruct has no values to store",
        ),
        (2**64, ValueError, "a Python int is too large to be stored(.|\n)*got: 65 bits"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(path, leaf, error, text):
    with pytest.raises(error, match=text) as caught:
        save(path, {"layers": [1.0, leaf]})
    assert "where: layers.1" in str(caught.value)
    assert not path.exists()


def test_deleted_arrays_are_refused_by_name(path):
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(ValueError, match=r"the elements of an array cannot be read\n  where: x"):
        save(path, {"x": gone})


def test_nothing_is_written_or_read_while_tracing(path):
    with pytest.raises(
        TypeError, match=r"files cannot be written or read inside a function that is being traced"
    ):
        jax.jit(lambda x: save(path, {"x": x}))(jnp.ones(2))
    save(path, {"x": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"inside a function that is being traced\n  where: x"):
        jax.jit(lambda x: load(path, {"x": x}))(jnp.ones(2))


# --- metadata and other programs

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(metadata=st.dictionaries(st.text(), json_values))
def test_metadata_come_back(tmp_path, metadata):
    save(tmp_path / "m", [1.0], metadata=metadata)
    assert load_metadata(tmp_path / "m") == metadata
    assert load(tmp_path / "m", like=[0.0]) == [1.0]


def test_no_metadata_are_empty_metadata(path):
    save(path, [1.0])
    assert load_metadata(path) == {}


@pytest.mark.parametrize("value", [np.float32(1), jnp.ones(2), jnp.tanh, {1, 2}, b"bytes"])
def test_metadata_that_json_cannot_hold_are_refused(path, value):
    with pytest.raises(TypeError, match=r"the metadata cannot be written as JSON") as caught:
        save(path, [], metadata={"a": [0, {"b": value}]})
    assert "where: metadata['a'][1]['b']" in str(caught.value)


def test_metadata_keys_that_would_become_strings_are_refused(path):
    with pytest.raises(
        TypeError, match=r"the keys of `metadata` must be strings(.|\n)*metadata\['a'\]\[3\]"
    ):
        save(path, [], metadata={"a": {3: 4}})


@pytest.mark.parametrize("dtype", [d for d in NUMPY_DTYPES if not d.startswith("float8_e")])
def test_other_programs_can_read_the_file(path, dtype):
    value = np.ones((2, 3), dtype)
    save(path, {"layer": [value]})
    [(name, found)] = safetensors.numpy.load_file(path).items()
    assert name == "layer.0"
    assert found.tobytes() == value.tobytes()
    assert found.dtype == dtype or found.dtype in ("uint8", "float64")


def test_float8_has_the_code_of_the_format(path):
    save(path, [jnp.ones(2, "float8_e4m3fn")])
    with safetensors.safe_open(path, "np") as file:
        assert file.get_slice("0").get_dtype() == "F8_E4M3"


def test_files_of_other_programs_can_be_read(path):
    arrays = {"w": np.ones((2, 3), "float32"), "layers.0.b": np.arange(3), "n": np.array(7)}
    safetensors.numpy.save_file(arrays, path, {"format": "np"})
    loaded = load(path, like={"w": jnp.zeros((2, 3)), "layers": [{"b": np.zeros(3, int)}], "n": 0})
    assert named_leaves(loaded).keys() == arrays.keys()
    assert loaded["w"].tolist() == arrays["w"].tolist() and loaded["n"] == 7
    assert load_metadata(path) == {"format": "np"}


def test_a_file_of_a_newer_version_is_refused(path, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr("vernal.saving._file._VERSION", 2)
        save(path, [1.0])
    with pytest.raises(
        ValueError, match=r"written by a newer version of Vernal(.|\n)*got: version 2"
    ):
        load(path, like=[1.0])


def test_keys_of_an_unknown_kind_are_refused(path, monkeypatch):
    with monkeypatch.context() as other:
        other.setattr("jax.random.key_impl", lambda key: "xorshift")
        save(path, [jax.random.key(0)])
    with pytest.raises(
        ValueError, match=re.escape("expected key<fry>[], found xorshift[2], which this version")
    ):
        load(path, like=[jax.random.key(0)])


def test_arguments_in_the_wrong_order_are_refused(path):
    # Beartype would answer first.
    with pytest.raises(TypeError, match=r"(?s)`path` is not a path.*the path first: save\("):
        inspect.unwrap(save)({"w": jnp.ones(2)}, path)
    with pytest.raises(TypeError, match=r"(?s)`path` is not a path.*the path first: load\("):
        inspect.unwrap(load)({"w": jnp.ones(2)}, path)


@pytest.mark.parametrize("like", [Module, lambda: None])
def test_what_makes_a_model_is_no_model(path, like):
    save(path, {})
    with pytest.raises(
        TypeError, match=r"(?s)`like` must be a model, not a function that makes one.*eval_shape"
    ):
        load(path, like)


def test_text_paths_and_no_suffix_are_taken_as_they_are(tmp_path):
    save(str(tmp_path / "model"), [1.0])
    assert os.listdir(tmp_path) == ["model"]
    assert load(str(tmp_path / "model"), like=[0.0]) == [1.0]


def test_nothing_in_the_file_is_a_pickle(path):
    save(path, {"f": jax.nn.relu, "x": jnp.ones(2)}, metadata={"a": 1})
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    assert set(json.loads(raw[8 : 8 + size])) == {"__metadata__", "x"}
    assert raw[8 + size :] == np.ones(2, "float32").tobytes()


def test_integers_of_numpy_are_the_keys_of_python(tmp_path):
    tree = {np.int64(3): jnp.ones(2), np.uint8(7): {np.int32(-1): jnp.zeros(1)}}
    save(tmp_path / "tree.safetensors", tree)
    like = {3: jnp.zeros(2), 7: {-1: jnp.ones(1)}}
    for skeleton in (like, tree):
        loaded = load(tmp_path / "tree.safetensors", skeleton)
        assert jnp.array_equal(loaded[3], tree[3]) and jnp.array_equal(loaded[7][-1], tree[7][-1])
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert [path_text(path) for path in paths] == ["[3]", "[7][-1]"]
