"""Loading into a tree of another precision."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn, tree_equal
from vernal.saving import Checkpoints, Conversion, load, save
from vernal.testing import GetKey

FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"]
COMPLEX = ["complex64", "complex128"]
CURE = "give cast=True to convert to the precision of `like`"


def numbers(dtype):
    return np.asarray([0.0, 0.5, -1.25]).astype(jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("theirs", "ours"), [*itertools.permutations(FLOATS, 2), *itertools.permutations(COMPLEX, 2)]
)
def test_another_precision_is_refused_with_its_cure_or_converted(tmp_path, theirs, ours):
    save(tmp_path / "file", {"x": numbers(theirs)})
    like = {"x": np.zeros(3, jnp.dtype(ours))}
    with pytest.raises(ValueError, match=rf"(?s)does not fit.*x: expected .*found.*{CURE}"):
        load(tmp_path / "file", like)
    loaded = load(tmp_path / "file", like, cast=True)
    assert loaded["x"].dtype == ours
    np.testing.assert_array_equal(loaded["x"], numbers(theirs).astype(jnp.dtype(ours)))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("int32", "float32"),
        ("float32", "int32"),
        ("int32", "int16"),
        ("int16", "int32"),
        ("bool", "float32"),
        ("float32", "bool"),
        ("complex64", "float32"),
        ("float32", "complex64"),
        ("uint8", "int8"),
    ],
)
def test_no_number_changes_its_kind(tmp_path, theirs, ours):
    save(tmp_path / "file", {"x": numbers(theirs)})
    for cast in (False, True):
        with pytest.raises(ValueError, match=r"does not fit") as info:
            load(tmp_path / "file", {"x": np.zeros(3, ours)}, cast=cast)
        assert "cast=True" not in str(info.value)


def test_another_shape_is_no_matter_of_precision(tmp_path):
    save(tmp_path / "file", {"x": numbers("float32")})
    with pytest.raises(ValueError, match="does not fit") as info:
        load(tmp_path / "file", {"x": np.zeros(2, "float16")}, cast=True)
    assert "cast=True" not in str(info.value)


def model(dtype):
    made = nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    return jax.tree.map(lambda x: x.astype(dtype), made)


def test_a_model_is_loaded_into_a_skeleton_of_half_precision(tmp_path):
    save(tmp_path / "file", {"model": model(jnp.float32), "step": 3})
    like = {"model": jax.eval_shape(lambda: model(jnp.bfloat16)), "step": 0}
    loaded = load(tmp_path / "file", like, cast=True)
    assert tree_equal(loaded, {"model": model(jnp.bfloat16), "step": 3})
    assert tree_equal(load(tmp_path / "file", {"model": model(jnp.float32), "step": 0}, cast=True),
                      {"model": model(jnp.float32), "step": 3})  # fmt: skip


def test_a_skeleton_that_keeps_nothing_names_the_cure_too(tmp_path):
    save(tmp_path / "file", [numbers("float32")])
    like = [jax.ShapeDtypeStruct((3,), jnp.bfloat16)]
    with pytest.raises(ValueError, match=rf"(?s)no value to keep.*{CURE}"):
        load(tmp_path / "file", like, strict=False)
    (loaded,), report = load(tmp_path / "file", like, strict=False, cast=True)
    assert loaded.dtype == jnp.bfloat16 and not report.misshapen


def test_numbers_of_python_and_numpy_are_converted(tmp_path):
    save(tmp_path / "file", {"a": jnp.float32(0.5), "b": 0.25, "c": np.float64(2), "k": 1.5})
    like = {"a": 0.0, "b": jnp.float32(0), "c": np.float32(0), "k": jnp.asarray(0.0)}
    loaded = load(tmp_path / "file", like, cast=True)
    assert loaded == {"a": 0.5, "b": 0.25, "c": 2.0, "k": 1.5}
    assert [type(loaded["a"]), loaded["b"].dtype, type(loaded["c"])] == [float, "float32", np.float32]  # fmt: skip
    assert loaded["k"].weak_type


def test_pieces_on_several_devices_are_converted(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    save(tmp_path / "file", [np.arange(16.0, dtype="float32")])
    like = [jax.ShapeDtypeStruct((16,), jnp.bfloat16, sharding=sharding)]
    (loaded,) = load(tmp_path / "file", like, cast=True)
    assert loaded.sharding == sharding and loaded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(loaded), np.arange(16.0).astype(jnp.bfloat16))


def test_random_keys_stay_what_they_are(tmp_path):
    tree = {"key": jax.random.key(3), "x": jnp.ones(2)}
    save(tmp_path / "file", tree)
    like = {"key": jax.random.key(0), "x": jnp.zeros(2, jnp.bfloat16)}
    loaded = load(tmp_path / "file", like, cast=True)
    assert jax.random.key_data(loaded["key"]).tolist() == [0, 3]


def test_what_has_another_name_is_converted(tmp_path):
    save(tmp_path / "file", {"x": numbers("float32"), "y": numbers("float32")})
    like = {"a": jnp.zeros(3, jnp.bfloat16), "b": jnp.zeros(3, jnp.bfloat16)}
    rename = {"a": "x", "b": Conversion("y", lambda y: 2 * y)}
    loaded = load(tmp_path / "file", like, rename=rename, cast=True)
    assert loaded["a"].tolist() == [0.0, 0.5, -1.25] and loaded["b"].tolist() == [0.0, 1.0, -2.5]
    with pytest.raises(ValueError, match=rf"(?s)from 'x'.*{CURE}"):
        load(tmp_path / "file", like, rename=rename)


@pytest.mark.parametrize("backend", ["safetensors", "orbax"])
def test_a_checkpoint_is_restored_in_another_precision(tmp_path, backend):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    whole = GetKey()
    x = jax.random.normal(whole(), (8, 2))
    with Checkpoints(tmp_path, backend=backend) as checkpoints:
        checkpoints.save(1, {"x": jax.device_put(x, sharding), "y": x})
        like = {
            "x": jax.ShapeDtypeStruct((8, 2), jnp.bfloat16, sharding=sharding),
            "y": jax.ShapeDtypeStruct((8, 2), jnp.float16),
        }
        with pytest.raises(ValueError, match=CURE):
            checkpoints.restore(like)
        restored = checkpoints.restore(like, cast=True)
    assert restored["x"].sharding == sharding
    assert tree_equal(restored["x"], jax.device_put(x.astype(jnp.bfloat16), sharding))
    assert tree_equal(restored["y"], x.astype(jnp.float16))
