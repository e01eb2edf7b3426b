"""Runs all calls, and writes what they gave: `python -m tests.compat._calls FILE equinox|vernal`.

A process of its own, without what the tests run under: in one, Equinox is the real one; in the other it is Vernal,
first through `vernal.compat`, then as `import vernal as eqx`.
"""

import importlib
import io
import json
import sys
import types
from contextlib import redirect_stdout
from pathlib import Path

import jax

# As in `tests/conftest.py`, and for the same reason.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_num_cpu_devices", 2)

from .describe import outcome, signatures  # noqa: E402 (the configuration comes first)
from .registry import COMPAT, GENERATORS, NATIVE, as_call  # noqa: E402

for path in sorted(Path(__file__).parent.glob("of_*.py")):
    importlib.import_module(f"{__package__}.{path.stem}")

INTERNAL_ROOMS = ("trees", "modules", "transforms", "primitives", "runtime", "loops", "debug", "testing")


def names_of(equinox):
    """Every public name, and what it stands for."""
    parts = ((equinox, ""), (equinox.nn, "nn."), (equinox.debug, "debug."), (equinox.internal, "internal."))
    return {
        prefix + name: value
        for module, prefix in parts
        for name, value in vars(module).items()
        if name[0] != "_" and not isinstance(value, types.ModuleType)
    }


def native_object(name, vernal):
    """What stands for a name with `import vernal as eqx`; a name of `equinox.internal` may be in any room."""
    *part, last = name.split(".")
    internal = [getattr(vernal, room) for room in INTERNAL_ROOMS]
    rooms = {"": [vernal], "nn": [vernal.nn], "debug": [vernal.debug]}.get("".join(part), internal)
    return next((vars(room)[last] for room in rooms if last in vars(room)), None)


def run_generator(generator, value, eqx):
    """What the calls of a generator gave, each with its line and where it is known to differ."""
    found = []
    steps = generator(value, eqx)
    while True:
        printed = io.StringIO()
        with redirect_stdout(printed):
            step = next(steps, None)
            if step is None:
                return found
            call = as_call(step)
            place = f"{Path(generator.__code__.co_filename).name}:{steps.gi_frame.f_lineno}"
            answer = outcome(call.function, call.args, eqx)
        found.append({"place": place, "differs_on": call.differs_on, **answer})


def run(names, eqx):
    """Everything that is compared, name by name."""
    return {
        name: {
            "signatures": signatures(value),
            "calls": [
                found
                for generator in GENERATORS.get(name, ())
                for found in run_generator(generator, value, eqx)
            ],
        }
        for name, value in names.items()
    }


def main(path, which):
    if which == "equinox":
        import equinox
        import equinox.internal

        found = {which: run(names_of(equinox), equinox), "version": equinox.__version__}
    else:
        import vernal
        from vernal.compat import equinox

        native = {name: native_object(name, vernal) for name in names_of(equinox)}
        eqx = types.SimpleNamespace(**vars(vernal))
        eqx.internal = types.SimpleNamespace()
        for name, value in native.items():
            if name.startswith("internal.") and value is not None:
                setattr(eqx.internal, name.removeprefix("internal."), value)
        found = {
            COMPAT: run(names_of(equinox), equinox),
            NATIVE: run({name: value for name, value in native.items() if value is not None}, eqx),
        }
    Path(path).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
