"""Who answers to `import equinox`. Each in a process of its own: this one has imported the real Equinox."""

import os
import subprocess
import sys
from pathlib import Path

import equinox
import pytest

import vernal.compat

SOURCES = Path(vernal.__file__).parents[1]


def run(*arguments, code=0, **environment):
    """Runs Python; returns what it printed."""
    variables = {**os.environ, "PYTHONPATH": str(SOURCES), "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=variables, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_install_refuses_when_the_real_one_is_there():
    with pytest.raises(RuntimeError, match="the real Equinox has been imported already"):
        vernal.compat.install()
    assert equinox.Module is not vernal.compat.equinox.Module


def test_uninstall_without_install_does_nothing():
    vernal.compat.uninstall()
    assert sys.modules["equinox"] is equinox


def test_install_gives_all_four_modules_and_uninstall_takes_them_back():
    program = """
import sys
import vernal.compat as compat
compat.install()
compat.install()
import equinox as eqx, equinox.internal as eqxi
from equinox import nn
from equinox.debug import assert_max_traces
from equinox.internal import ω
assert eqx.internal is eqxi and eqx.nn is nn and eqx.__version__ == "0.13.8"
assert eqx.filter_jit.__module__ == "vernal.transforms"
compat.uninstall()
import equinox as real
assert real is not eqx and "site-packages" in real.__file__
print("fine")
"""
    assert run("-c", program) == "fine\n"


def test_settings_of_equinox_hold():
    program = """
import vernal.compat as compat
compat.install()
import equinox as eqx, jax.numpy as jnp
print(eqx.error_if(jnp.ones(()), jnp.array(True), "wrong"))
"""
    assert run("-c", program, EQX_ON_ERROR="nan") == "nan\n"
    assert run("-c", program, EQX_ON_ERROR="off") == "1.0\n"
    assert run("-c", program, EQX_ON_ERROR="off", VERNAL_ON_ERROR="nan") == "nan\n"


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "asks.py"
    file.write_text(
        "import sys, equinox, neighbour\nprint(equinox.Module.__module__, __name__, sys.argv[1:])\n"
    )
    (tmp_path / "neighbour.py").write_text("")
    return file


def test_the_command_line_runs_a_script_or_a_module(script):
    expected = "vernal.compat.equinox __main__ ['a', '--b']\n"
    assert run("-m", "vernal", "compat", script, "a", "--b") == expected
    environment = {"PYTHONPATH": os.pathsep.join([str(SOURCES), str(script.parent)])}
    assert run("-m", "vernal", "compat", "-m", "asks", "a", "--b", **environment) == expected
    assert "which script?" in run("-m", "vernal", "compat", code=2)


def test_pytest_runs_a_suite_on_vernal(tmp_path):
    file = tmp_path / "test_something.py"
    file.write_text(
        "import equinox\n\ndef test_it():\n    assert equinox.Module.__module__ == 'vernal.compat.equinox'\n"
    )
    assert "1 passed" in run("-m", "pytest", "-q", "-p", "vernal.compat.pytest", file)
