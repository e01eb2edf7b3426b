"""Diffrax, Lineax, Optimistix and traceax, as they are installed, give on Vernal what they give on Equinox."""

import json
import os
import subprocess
import sys
from pathlib import Path

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal

from . import libraries, linear, models, pages, solves  # noqa: F401 (they fill the registry)
from .registry import PROBLEMS, answers

ROOT = Path(__file__).parents[2]


class WithEquinox:
    """Another process, in which `equinox` is the real one."""

    def __init__(self, errors):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.stack"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        self.errors = errors

    def ask(self, name):
        """Makes it begin with a problem."""
        self.process.stdin.write(name + "\n")
        self.process.stdin.flush()

    def answers(self, name):
        """The answers of a problem that it was asked for."""
        # Those of a test that has failed meanwhile come first.
        for line in self.process.stdout:
            found = json.loads(line)
            assert os.path.join("site-packages", "equinox") in found["equinox"]
            if found["name"] == name:
                return found["answers"]
        self.errors.seek(0)
        raise AssertionError(self.errors.read())


@pytest.fixture(scope="session")
def with_equinox(tmp_path_factory):
    with (tmp_path_factory.mktemp("equinox") / "errors").open("w+") as errors:
        other = WithEquinox(errors)
        yield other
        other.process.kill()
        other.process.communicate()


def test_equinox_is_vernal_here():
    assert equinox.filter_jit is vernal.filter_jit
    assert jnp.zeros(()).dtype == jnp.float64


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_answers_agree(name, with_equinox):
    # Both compute at the same time.
    with_equinox.ask(name)
    mine = answers(name)
    theirs = with_equinox.answers(name)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_a_method_of_a_module_that_holds_a_tracer_is_hashed_by_a_loop():
    # JAX 0.4.30 began to hash the functions of a loop, and Diffrax's closures could not be hashed.
    class Field(equinox.Module):
        scale: jax.Array

        def more(self, carry):
            return carry[0] < 3

        def step(self, carry):
            return carry[0] + 1, carry[1] * self.scale

    @jax.jit
    def run(scale):
        field = Field(scale)
        hoisted = equinox.filter_closure_convert(
            lambda c: (c[0] + 1, c[1] + scale), (jnp.array(0), scale)
        )
        carry = jax.lax.while_loop(field.more, field.step, (jnp.array(0), jnp.ones(())))
        return jax.lax.while_loop(lambda carry: carry[0] < 5, hoisted, carry)[1]

    assert run(jnp.array(2.0)) == 12.0
