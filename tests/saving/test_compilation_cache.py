"""The second process of a training script compiles nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, optax
import vernal
from vernal import nn

vernal.saving.compilation_cache(sys.argv[1])
counts = {"hits": 0, "misses": 0}

def count(event, **_):
    for name in counts:
        counts[name] += event == f"/jax/compilation_cache/cache_{name}"

jax.monitoring.register_event_listener(count)
keys = jax.random.split(jax.random.key(0), 3)
model = nn.Sequential([
    nn.Linear(3, 8, key=keys[0]), nn.BatchNorm(8), jax.nn.gelu, nn.Dropout(0.1), nn.MLP(8, 1, 8, 2, key=keys[1])
])
optimiser = vernal.Optimizer(optax.adamw, learning_rate=1e-2)
checked = sys.argv[2] == "checked"

@vernal.filter_jit(donate="all")
def step(model, state, key):
    key, now = jax.random.split(key)
    x = jax.random.normal(now, (16, 3))
    def loss(model):
        y, model = nn.apply(model, x, key=now)
        if checked:
            y = vernal.error_if(y, ~jnp.isfinite(y).all(), "the outputs must be finite")
        return jnp.mean((y - x[:, :1]) ** 2), model
    (value, model), slopes = vernal.filter_value_and_grad(loss, has_aux=True)(model)
    model, state = optimiser.update(model, slopes, state)
    return value, model, state, key

packed = vernal.pack((model, optimiser.init(model), keys[2]))
state = packed.unpack()
for _ in range(3):
    value, *state = step(*state)
print(json.dumps({"loss": float(value), **counts}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("checked", ["plain", "checked"])
def test_the_second_process_compiles_nothing(checked, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_ENABLE_COMPILATION_CACHE", None)

    def run():
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cache"), checked]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first, second = run(), run()
    assert first["misses"] > 3
    assert second["loss"] == first["loss"]
    # A program that calls Python, as a check does, is cached from JAX 0.12 on.
    if checked == "plain" or jax.__version_info__ >= (0, 12):
        assert second["misses"] == 0
    assert second["hits"] >= first["misses"] - (checked == "checked")
