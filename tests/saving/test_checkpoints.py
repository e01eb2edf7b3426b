"""Checkpoints of a run in a folder: what comes back, and which of them stay."""

import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vernal import Module
from vernal.saving import Checkpoints, Conversion
from vernal.saving._file import write

BACKENDS = ["safetensors", "orbax"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("a", "b"))


class Net(Module):
    weight: jax.Array
    activation: object


def small(step):
    return {"w": np.full(3, float(step)), "step": step}


def assert_same(loaded, saved):
    assert jax.tree.structure(loaded) == jax.tree.structure(saved)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(saved), strict=True):
        assert type(a) is type(b)
        if isinstance(b, jax.Array):
            assert a.sharding == b.sharding and a.committed == b.committed and a.aval == b.aval
            if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


# --- what comes back


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_a_run_needs_comes_back_in_one_tree(folder, mesh, backend):
    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    state = {
        "model": Net(put(jnp.arange(64.0).reshape(8, 8), "a", "b"), jnp.tanh),
        "optimiser": (put(jnp.ones((8, 8), "bfloat16"), "b"), jnp.asarray(0.1), jnp.int32(7)),
        "keys": [
            jax.random.key(3),
            jax.random.key(4, impl="rbg"),
            put(jax.random.split(jax.random.key(0), 8), "a"),
        ],
        "data": {"position": 12, "permutation": np.arange(5)[::-1], "seen": 1.5, "done": False},
        "small types": [
            jnp.ones(3, "int4"),
            jnp.ones((2, 2), "float8_e4m3"),
            put(jnp.ones(8, "uint4"), "a"),
        ],
        "none": [jnp.zeros((0, 3)), None, np.ones(2, complex), np.float64(1.0)],
        "a/b %": {"": jnp.ones(2), "#": 1},
    }
    with Checkpoints(folder, backend=backend) as checkpoints:
        assert checkpoints.save(7, state, metadata={"sizes": [8, 8]})
    assert_same(checkpoints.restore(like=state), state)
    skeleton = {"model": Net(jax.ShapeDtypeStruct((8, 8), "float32"), jnp.tanh)}
    restored, report = checkpoints.restore(skeleton, strict=False)
    assert np.array_equal(restored["model"].weight, state["model"].weight)
    assert restored["model"].activation is jnp.tanh
    assert "data.position" in report.extra and not report.missing and not report.misshapen
    assert checkpoints.metadata() == checkpoints.metadata(7) == {"sizes": [8, 8]}


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_come_in_the_shardings_of_like(folder, mesh, backend):
    def struct(mesh, *spec):
        return jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P(*spec)))

    value = np.arange(64.0, dtype="float32").reshape(8, 8)
    state = {"w": jax.device_put(value, NamedSharding(mesh, P("a", "b")))}
    with Checkpoints(folder, backend=backend) as checkpoints:
        checkpoints.save(1, state)
    other = jax.make_mesh((2,), ("x",), devices=jax.devices()[3:5])
    alone = jax.device_put(np.zeros_like(value), jax.devices()[6])
    for like in (
        struct(mesh, "b"),
        struct(other, None, "x"),
        struct(mesh),
        alone,
        np.zeros_like(value),
    ):
        loaded = checkpoints.restore(like={"w": like})["w"]
        assert np.array_equal(loaded, value)
        assert isinstance(like, np.ndarray) or loaded.sharding == like.sharding
    skeleton = jax.eval_shape(lambda: state)
    with jax.set_mesh(mesh):
        assert_same(checkpoints.restore(skeleton), state)
    with pytest.raises(ValueError, match=r"the mesh of a sharding has no devices\n  where: w"):
        checkpoints.restore(skeleton)


def test_a_run_may_change_and_donate_its_arrays_at_once(folder, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(
        "vernal.saving._checkpoints_safetensors.write", lambda *a: (go.wait(60), write(*a))
    )
    step = jax.jit(lambda x: x * 0.0 - 7.0, donate_argnums=0)
    state = {"donated": jnp.ones((64, 64)), "changed": np.ones(3)}
    like = {"donated": jnp.zeros((64, 64)), "changed": np.zeros(3)}
    metadata = {"losses": [3.0], "more": {"seen": 1}}
    checkpoints = Checkpoints(folder, backend="safetensors")
    checkpoints.save(1, state, metadata=metadata)
    assert checkpoints.steps == []
    new = step(state["donated"]).block_until_ready()
    state["changed"][:] = -7.0
    metadata["losses"].append(2.0)
    metadata["more"]["seen"] = 2
    assert state["donated"].is_deleted() and (new == -7).all()
    go.set()
    restored = checkpoints.restore(like)
    assert (restored["donated"] == 1).all() and (restored["changed"] == 1).all()
    assert checkpoints.metadata() == {"losses": [3.0], "more": {"seen": 1}}


def test_orbax_copies_before_arrays_are_donated(folder):
    step = jax.jit(lambda x: x * 0.0 - 7.0, donate_argnums=0)
    with Checkpoints(folder, backend="orbax", keep=None) as checkpoints:
        for number in range(3):
            state = {"donated": jnp.full((256, 256), number + 1.0), "changed": np.full(3, number)}
            checkpoints.save(number, state)
            step(state["donated"]).block_until_ready()
            state["changed"][:] = -7
    like = {"donated": jnp.zeros((256, 256)), "changed": np.zeros(3, int)}
    for number in range(3):
        restored = checkpoints.restore(like, number)
        assert (restored["donated"] == number + 1).all() and (restored["changed"] == number).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_another_name_or_form_now_is_migrated(folder, backend):
    state = {
        "blocks": [{"w": jnp.full(2, 1.0)}, {"w": jnp.full(2, 2.0)}],
        "head": jnp.arange(6.0).reshape(2, 3),
        "qkv": np.arange(6.0, dtype="float32"),
        "rng": jax.random.key(5),
        "old": 1,
    }
    with Checkpoints(folder, backend=backend) as checkpoints:
        checkpoints.save(1, state)
    like = {
        "encoder": {"layers": [{"weight": jnp.zeros(2)}, {"weight": jnp.zeros(2)}]},
        "twice": (jnp.zeros((2, 3)), jnp.zeros((2, 3))),
        "turned": jnp.zeros((3, 2)),
        "q": jnp.zeros(2),
        "kv": jnp.zeros(4),
        "key": jax.random.key(0),
        "new": jnp.full(1, 9.0),
        "old": 0,
    }
    rename = {
        "encoder.layers.*.weight": "blocks.*.w",
        "twice.0": "head",
        "twice.1": "head",
        "turned": Conversion("head", np.transpose),
        ("q", "kv"): "qkv",
        "key": "rng",
        "new": None,
    }
    found = checkpoints.restore(like, rename=rename)
    assert [float(layer["weight"][0]) for layer in found["encoder"]["layers"]] == [1.0, 2.0]
    assert all(np.array_equal(x, state["head"]) for x in (*found["twice"], found["turned"].T))
    assert found["q"].tolist() == [0, 1] and found["kv"].tolist() == [2, 3, 4, 5]
    assert found["key"] == state["rng"] and found["new"] is like["new"] and found["old"] == 1
    with pytest.raises(ValueError, match="encoder.layers.0.weight: missing, expected") as caught:
        checkpoints.restore(like)
    assert "rng: not expected, found key<fry>[]" in str(caught.value)
    with pytest.raises(
        ValueError, match=r"key: expected key<fry>\[\], found .*can only be renamed"
    ):
        checkpoints.restore(like, rename={**rename, "key": Conversion("rng", np.asarray)})
    with pytest.raises(ValueError, match="rule 'nothing'(.|\n)*no leaf there"):
        checkpoints.restore(like, rename={"nothing": "head"})


# --- which of them stay


def test_the_latest_and_the_best_are_kept(folder):
    losses = [5.0, 1.0, float("nan"), 3.0, 1.0, 4.0]
    with Checkpoints(folder, keep=2, best="loss", backend="safetensors") as checkpoints:
        assert checkpoints.steps == [] and checkpoints.latest is None and checkpoints.best is None
        assert repr(checkpoints) == f"Checkpoints({str(folder)!r}: empty)"
        for step, loss in enumerate(losses):
            checkpoints.save(10 * step, small(step), metadata={"loss": loss})
    assert checkpoints.steps == [10, 40, 50]
    assert (checkpoints.latest, checkpoints.best) == (50, 10)
    assert repr(checkpoints) == f"Checkpoints({str(folder)!r}: steps 10, 40, 50)"
    assert checkpoints.restore(small(0))["step"] == 5
    assert checkpoints.restore(small(0), step=checkpoints.best)["step"] == 1
    # Another object, as in a restarted program, with another idea of what is best.
    again = Checkpoints(str(folder), keep=1, best="loss", best_is="highest", backend="safetensors")
    assert again.best == 50
    again.save(np.int64(60), small(6), metadata={"loss": 0})
    again.wait()
    assert again.steps == checkpoints.steps == [50, 60]


def test_steps_are_skipped_unless_forced(folder):
    with Checkpoints(folder, every=10, keep=None, backend="safetensors") as checkpoints:
        saved = [checkpoints.save(step, small(step)) for step in range(0, 25, 5)]
        assert checkpoints.save(24, small(24), force=True)
    assert saved == [True, False, True, False, True]
    assert checkpoints.steps == [0, 10, 20, 24]


def test_a_run_goes_on_from_an_earlier_checkpoint_when_the_later_are_removed(folder):
    checkpoints = Checkpoints(folder, keep=None, backend="safetensors")
    for step in (1, 2, 3):
        checkpoints.save(step, small(step))
    with pytest.raises(ValueError, match="something exists under the name of this checkpoint"):
        checkpoints.save(2, small(2))
    checkpoints.remove(2)
    with pytest.raises(
        ValueError, match=r"there are checkpoints of later steps(.|\n)*a step after 3"
    ):
        checkpoints.save(2, small(2))
    checkpoints.remove(3)
    checkpoints.save(2, small(2))
    assert checkpoints.restore(small(0))["step"] == 2
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 3\n(.|\n)*the steps 1, 2"):
        checkpoints.remove(3)


def test_two_writers_take_turns(folder):
    one, two = (Checkpoints(folder, keep=None, backend="safetensors") for _ in range(2))
    for step in range(0, 10, 2):
        one.save(step, small(step))
        two.save(step + 1, small(step + 1))
    one.wait()
    two.wait()
    assert one.steps == list(range(10))
    assert not [name for name in os.listdir(folder) if name.startswith(".unfinished")]


def test_an_error_in_a_block_waits_for_the_save(folder):
    with (
        pytest.raises(ZeroDivisionError),
        Checkpoints(folder, backend="safetensors") as checkpoints,
    ):
        checkpoints.save(1, small(1))
        raise ZeroDivisionError
    assert checkpoints.steps == [1]


FORGETFUL = """
import sys
import numpy as np
from vernal.saving import Checkpoints
Checkpoints(sys.argv[1], backend="orbax").save(1, {"w": np.zeros(100_000), "step": 1})
"""


@pytest.mark.slow
def test_a_program_that_ends_without_waiting_keeps_its_last_checkpoint(folder):
    """Python ends the threads that Orbax needs before it waits for ours."""
    source = str(pathlib.Path(__file__).parents[2] / "src")
    env = {**os.environ, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    run = [sys.executable, "-c", FORGETFUL, str(folder)]
    subprocess.run(run, env=env, timeout=120, check=True)
    like = {"w": np.ones(100_000), "step": 0}
    assert Checkpoints(folder).restore(like)["step"] == 1


# --- what is refused


def test_arguments_that_cannot_be_used_are_refused(folder):
    for bad, text in [
        ({"keep": 0}, r"keep cannot be used(.|\n)*from 1 on"),
        ({"every": 0}, r"every cannot be used(.|\n)*from 1 on"),
        ({"best_is": "highest"}, r"best_is cannot be used(.|\n)*nothing, without `best`"),
        ({"best": "loss", "best_is": "max"}, r"best_is cannot be used(.|\n)*'lowest' or 'highest'"),
        ({"backend": "pickle"}, r"backend cannot be used(.|\n)*'orbax' or 'safetensors'"),
    ]:
        with pytest.raises(ValueError, match=text):
            Checkpoints(folder, **bad)
    with pytest.raises(ValueError, match="what to look for"):
        _ = Checkpoints(folder).best


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(folder):
    checkpoints = Checkpoints(folder, best="loss", backend="safetensors")
    gone = jnp.ones(2)
    gone.delete()
    good = {"loss": 1.0}
    for step, tree, metadata, error, text in [
        (-1, 0, good, ValueError, "a number from 0 on"),
        (1, 0, None, ValueError, "the metadata has no number for 'loss'"),
        (1, 0, {"loss": "low"}, ValueError, "the metadata has no number for 'loss'"),
        (
            1,
            0,
            {"loss": 1, "x": {1}},
            TypeError,
            r"cannot be written as JSON(.|\n)*metadata\['x'\]",
        ),
        (1, np.array(["a"]), good, TypeError, "dtype <U1 cannot be stored"),
        (1, {"x": gone}, good, ValueError, r"the elements of an array cannot be read\n  where: x"),
    ]:
        with pytest.raises(error, match=text):
            checkpoints.save(step, tree, metadata=metadata)
    assert checkpoints.steps == [] and os.listdir(folder) == [".lock"]
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint\n(.|\n)*none at all"):
        checkpoints.restore(0)
    checkpoints.save(1, {"x": 1}, metadata=good)
    with pytest.raises(ValueError, match=r"the file does not fit the tree(.|\n)*x: expected f64"):
        checkpoints.restore({"x": 1.0})


def test_what_orbax_wrote_is_not_read_without_it(folder, monkeypatch):
    with Checkpoints(folder, backend="orbax") as checkpoints:
        checkpoints.save(1, small(1))
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"Orbax is not installed(.|\n)*pip install orbax"):
        checkpoints.restore(small(0))
    with pytest.raises(ImportError, match="Orbax is not installed"):
        checkpoints.save(2, small(2))
    with Checkpoints(folder, backend="safetensors") as others:
        others.save(2, small(2))
    assert others.restore(small(0))["step"] == 2
