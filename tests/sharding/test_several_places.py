"""Placing, making and collecting arrays in a program of two processes, with two devices each."""

import subprocess
import sys

import pytest

SCRIPT = """
import jax, numpy as np
from jax import P
import vernal
from vernal import nn
from vernal.sharding import *

initialise()
rank = jax.process_index()
key = jax.random.key(0)
whole = nn.Linear(4, 8, key=key)
rules = {"weight": P(("rows", "columns"), None), "bias": P()}

# The devices of a process are neighbours along the last axis.
mesh, other = make_mesh(rows=2, columns=2), make_mesh(rows=-1, automatic=True)
assert dict(other.shape) == {"rows": 4}
for model in (init_sharded(lambda key: nn.Linear(4, 8, key=key), key, mesh, rules), place(whole, mesh, rules)):
    assert len(model.weight.addressable_shards) == 2 and model.weight.shape == (8, 4)
    moved = place(model, other, {"weight": P(None, "rows"), "bias": P("rows")})
    for tree in (model, moved, place(gather(moved), mesh, rules)):
        back = gather(tree)
        assert isinstance(back.weight, np.ndarray)
        np.testing.assert_allclose(back.weight, whole.weight, rtol=1e-6)

state = place({"key": key, "keys": jax.random.split(key, 4)}, mesh, {"keys": P("rows")})
np.testing.assert_array_equal(*map(jax.random.key_data, (gather(state)["key"], key)))
assert state["keys"].sharding.spec == P("rows")

# Each process gives its own rows of the batch; along an axis within the processes, both give all.
keys = jax.random.split(key, 8)
mine = {"x": np.arange(8.0)[4 * rank : 4 * rank + 4], "keys": keys[4 * rank : 4 * rank + 4], "name": "train"}
batch = shard_batch(mine, mesh, "rows")
assert batch["x"].shape == (8,) and batch["name"] == "train"
np.testing.assert_array_equal(gather(batch)["x"], np.arange(8.0))
np.testing.assert_array_equal(*map(jax.random.key_data, (gather(batch)["keys"], keys)))
np.testing.assert_array_equal(gather(shard_batch(np.arange(8.0), mesh, "columns")), np.arange(8.0))
again = shard_batch(batch, mesh, ("rows", "columns"))
assert again["x"].addressable_shards[0].data.shape == (2,)
try:
    shard_batch(np.zeros(3), mesh, ("rows", "columns"))
except ValueError as error:
    assert "for 2 parts" in str(error)

y = jax.jit(lambda model, x: (model(x) ** 2).sum())(model, np.ones(4, np.float32))
np.testing.assert_allclose(y, (whole(np.ones(4, np.float32)) ** 2).sum(), rtol=1e-5)
print("done", rank)
"""


@pytest.mark.slow
def test_two_processes_share_models_and_batches(tmp_path):
    script = tmp_path / "places.py"
    script.write_text(SCRIPT)
    words = ["launch", "--processes", "2", "--devices-per-process", "2", str(script)]
    found = subprocess.run(
        [sys.executable, "-m", "vernal", *words], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "done 0" in found.stdout and "done 1" in found.stdout
