"""`GetKey`: fresh keys that can be replayed."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from vernal.testing import GetKey

ROOT = Path(__file__).parents[2]


def draw(getkey: GetKey, n: int) -> jax.Array:
    return jnp.stack([jax.random.key_data(getkey()) for _ in range(n)])


def test_keys_are_typed_and_all_different():
    getkey = GetKey()
    assert jnp.issubdtype(getkey().dtype, jax.dtypes.prng_key)
    drawn = {tuple(map(int, row)) for row in draw(getkey, 20)}
    assert len(drawn) == 20


def test_the_same_seed_gives_the_same_keys_in_the_same_order():
    first = GetKey()
    keys = draw(first, 5)
    assert (keys == draw(GetKey(first.seed), 5)).all()


def test_two_sources_have_different_seeds():
    assert len({GetKey().seed for _ in range(10)}) > 1


def test_repr_shows_the_seed_and_the_number_of_calls():
    getkey = GetKey(seed=7)
    draw(getkey, 3)
    assert repr(getkey) == "GetKey(seed=7, calls=3)"


def test_the_fixture_takes_its_seed_from_the_environment(request, monkeypatch):
    monkeypatch.setenv("VERNAL_GETKEY_SEED", "11")
    assert request.getfixturevalue("getkey").seed == 11


def test_the_report_of_a_failure_names_the_seed(tmp_path):
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test_fails(getkey):\n    getkey()\n    assert False\n")
    done = subprocess.run(
        # Without tracebacks: what names the seed must not be the argument that a traceback shows.
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--tb=line", "-rA", str(failing)],
        cwd=ROOT,
        env={**os.environ, "VERNAL_GETKEY_SEED": "12"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "GetKey(seed=12, calls=1): replay with VERNAL_GETKEY_SEED=12" in done.stdout
