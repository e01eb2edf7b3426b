"""Checkpoints that two processes save together, and that another number of processes restores."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vernal._launch import _reserved_port
from vernal.saving import Checkpoints

pytestmark = pytest.mark.slow

# Makes the state of the test, saves it, and restores it to another sharding. Arguments: which process, port, folder.
PROCESS = """
import collections, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
rank, port, folder = int(sys.argv[1]), *sys.argv[2:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from vernal.saving import Checkpoints

mesh = jax.make_mesh((4,), ("d",))
def on(*spec):
    return NamedSharding(mesh, P(*spec))
def spread(value, *spec):
    return jax.make_array_from_callback(value.shape, on(*spec), lambda at: value[at])
def refused(error, checkpoints, step, tree):
    try:
        checkpoints.save(step, tree)
    except error as caught:
        return str(caught)
    raise AssertionError("this should have been refused")

matrix = np.arange(64.0, dtype="float32").reshape(8, 8)
split = jax.jit(lambda key: jax.random.split(key, 8), out_shardings=on("d"))
state = {
    "w": spread(matrix, "d"), "copied": spread(matrix[0]), "small": spread(np.ones((4, 2), "int8").astype("int4"), "d"),
    "keys": split(jax.random.key(0)), "key": jax.random.key(1), "alone": jnp.arange(3.0), "position": 5,
}
for backend in ("safetensors", "orbax"):
    with Checkpoints(f"{folder}/{backend}", backend=backend, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {**state, "position": step}, metadata={"step": step})
        text = refused((ValueError, RuntimeError), checkpoints, 3, state)
        assert ("something exists under the name" if rank == 0 else "another process failed") in text
        text = refused(ValueError, checkpoints, 4, {**state, "position": rank})
        assert "leaves differ between the processes" in text and "position" in text
        more = {"z": np.ones(1)} if rank else {}
        text = refused(ValueError, checkpoints, 4, {**state, **more})
        assert "the processes save different leaves" in text and "process 0: none" in text, text
        assert "process 1: z float64[1]" in text, text
        text = refused(ValueError, checkpoints, 4, {**state, "alone": np.ones(3 + rank, "float32")})
        assert "process 0: alone float32[3]" in text and "process 1: alone float32[4]" in text, text
        text = refused(ValueError, checkpoints, 4, {**state, "w": matrix if rank else state["w"]})
        assert "process 0: w float32[8, 8] of all processes" in text, text
        ordered = collections.OrderedDict(sorted({"a": matrix, "b": matrix}.items(), reverse=rank == 1))
        text = refused(ValueError, checkpoints, 4, ordered)
        assert "the same leaves in different orders" in text and "process 1: b, a" in text, text
        text = refused(ValueError, checkpoints, 5 + rank, state)
        assert "the processes save different steps" in text and "process 0: 5, process 1: 6" in text
    assert checkpoints.steps == [2, 3]
    like = {**state, "w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=on(None, "d"))}
    found = checkpoints.restore(like)
    assert found["w"].sharding == on(None, "d") and found["position"] == 3
    for name, whole in [("w", matrix), ("copied", matrix[0]), ("small", np.ones((4, 2)))]:
        assert found[name].sharding == like[name].sharding
        for shard in found[name].addressable_shards:
            assert np.array_equal(np.asarray(shard.data, "float32"), whole[shard.index])
    same = jax.jit(lambda a, b: (jax.random.key_data(a) == jax.random.key_data(b)).all())
    assert found["keys"].sharding == state["keys"].sharding and bool(same(found["keys"], state["keys"]))
    checkpoints.remove(3)
    assert checkpoints.latest == 2
print("process", rank, "is done")
"""


def test_two_processes_save_together_and_one_restores(tmp_path):
    source = str(pathlib.Path(__file__).parents[2] / "src")
    env = {**os.environ, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    with _reserved_port() as port:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROCESS, str(rank), str(port), str(tmp_path)],
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        try:
            texts = [process.communicate(timeout=250)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    for rank, text in enumerate(texts):
        assert f"process {rank} is done" in text, text

    mesh = jax.make_mesh((8,), ("x",))
    keys = jax.random.split(jax.random.key(0), 8)
    like = {
        "w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P(None, "x"))),
        "copied": np.zeros(8, "float32"),
        "small": jnp.zeros((4, 2), "int4"),
        "keys": keys,
        "key": jax.random.key(0),
        "alone": jnp.zeros(3),
        "position": 0,
    }
    matrix = np.arange(64.0).reshape(8, 8)
    for backend in ("safetensors", "orbax"):
        checkpoints = Checkpoints(tmp_path / backend)
        found = checkpoints.restore(like)
        assert found["w"].sharding == like["w"].sharding and np.array_equal(found["w"], matrix)
        assert np.array_equal(found["copied"], matrix[0]) and (found["small"] == 1).all()
        assert (found["keys"] == keys).all() and found["key"] == jax.random.key(1)
        assert found["alone"].tolist() == [0, 1, 2] and found["position"] == 2
        assert checkpoints.metadata() == {"step": 2}
