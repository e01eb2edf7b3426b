"""Importing the package changes nothing but its own modules (and what JAX knows of its pytrees)."""

import json
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"

# Run in a fresh interpreter. What the package depends on is imported first: its side effects are its own.
WATCH = """
import json, sys
before_anything = set(sys.modules)
import atexit, logging, os, signal, types, warnings
import jax, jax.numpy, jaxtyping, numpy, typing_extensions, wadler_lindig
{dependencies}

# A new logger is harmless; one that others use must stay as it is.
loggers = [logging.getLogger(name) for name in [None, "jax", *logging.Logger.manager.loggerDict]]

def logger_state():
    return [(x.name, x.level, repr(x.handlers), repr(x.filters)) for x in loggers]

def state():
    # A submodule of JAX that is imported for the first time becomes an attribute of `jax`: that is how Python works.
    names = {{k: id(v) for k, v in vars(jax).items() if not isinstance(v, types.ModuleType)}}
    return {{
        "jax.config.values": {{k: repr(v) for k, v in jax.config.values.items()}},
        "jax.__dict__": names,
        "jax.numpy.__dict__": {{k: id(v) for k, v in vars(jax.numpy).items()}},
        "jax.lax.__dict__": {{k: id(v) for k, v in vars(jax.lax).items()}},
        "atexit": atexit._ncallbacks(),
        "loggers": logger_state(),
        "warnings": [repr(f) for f in warnings.filters],
        "hooks": [repr(sys.excepthook), repr(sys.displayhook), repr(sys.meta_path), repr(sys.path_hooks)],
        "signals": [repr(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "environment": dict(os.environ),
    }}

before = state()
import {package}
after = state()
print(json.dumps({{
    "changed": [k for k in before if before[k] != after[k]],
    "late": sorted({late!r} & {{m.split(".")[0] for m in set(sys.modules) - before_anything}}),
    "backends": bool(jax._src.xla_bridge._backends),
}}))
"""
LATE = {"rich", "matplotlib", "torch", "sklearn", "orbax", "treescope", "equinox"}


def watch(package: str, cwd, dependencies: str = "") -> dict:
    script = WATCH.format(package=package, dependencies=dependencies, late=LATE)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_the_package_has_no_side_effect(tmp_path):
    seen = watch(
        "vernal, vernal.debug, vernal.nn, vernal.saving",
        tmp_path,
        "import optax, safetensors.numpy",
    )
    assert seen == {"changed": [], "late": [], "backends": False}


def test_the_watch_sees_what_it_is_for(tmp_path):
    (tmp_path / "rude.py").write_text(
        "import atexit, logging, os, signal, sys, warnings, jax, rich\n"
        "jax.jit = lambda f: f\n"
        "jax.numpy.sin = jax.lax.sin = None\n"
        "jax.config.update('jax_enable_x64', True)\n"
        "atexit.register(int)\n"
        "logging.getLogger('jax').addHandler(logging.NullHandler())\n"
        "warnings.simplefilter('ignore')\n"
        "sys.excepthook = print\n"
        "signal.signal(signal.SIGINT, lambda *ignored: None)\n"
        "os.environ['RUDE'] = '1'\n"
        "jax.devices()\n"
    )
    seen = watch("rude", tmp_path)
    assert set(seen["changed"]) == {
        "jax.config.values",
        "jax.__dict__",
        "jax.numpy.__dict__",
        "jax.lax.__dict__",
        "atexit",
        "loggers",
        "warnings",
        "hooks",
        "signals",
        "environment",
    }
    assert seen["late"] == ["rich"]
    assert seen["backends"]
