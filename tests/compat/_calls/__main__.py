"""Runs calls, and writes what they gave: `python -m tests.compat._calls FILE equinox|vernal light|heavy`.

A process of its own, without what the tests run under: in one, Equinox is the real one; in the other it is Vernal,
first through `vernal.compat`, then as `import vernal as eqx`.

`python -m tests.compat._calls` runs all of it, and writes the differences that it finds to `differences.json`, and
their kinds to `src/vernal/compat/_seen.py`.
"""

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

from .compare import HEAD, KNOWN, SEEN, differences, gather, kinds  # noqa: E402 (the configuration comes first)
from .describe import outcome, signatures  # noqa: E402
from .registry import GENERATORS, is_heavy, load, texts  # noqa: E402


def names_of(equinox):
    """Every public name, and what it stands for."""
    parts = (
        (equinox, ""),
        (equinox.nn, "nn."),
        (equinox.debug, "debug."),
        (equinox.internal, "internal."),
    )
    return {
        prefix + name: value
        for module, prefix in parts
        for name, value in vars(module).items()
        if name[0] != "_" and not isinstance(value, types.ModuleType)
    }


def native_object(name, vernal, internal):
    """What stands for a name with `import vernal as eqx`; one of `equinox.internal` is in one of those rooms."""
    *part, last = name.split(".")
    rooms = {"": [vernal], "nn": [vernal.nn], "debug": [vernal.debug]}.get("".join(part), internal)
    return next((getattr(room, last) for room in rooms if last in dir(room)), None)


def run_generator(generator, value, eqx):
    """What the calls of a generator gave: pairs of the text of a call and its outcome."""
    found = []
    steps = generator(value, eqx)
    while True:
        with redirect_stdout(io.StringIO()):
            call = next(steps, None)
            if call is None:
                return found
            function, *args = call if isinstance(call, tuple) else (call,)
            text = texts(generator)[steps.gi_frame.f_lineno]
            found.append((text, outcome(function, args, eqx)))


def numbered(pairs):
    """The same as a dictionary: of calls with the same text, each has its number."""
    found = {}
    for text, answer in pairs:
        number = sum(key.partition("  # ")[0] == text for key in found)
        found[f"{text}  # {number}" if number else text] = answer
    return found


def run(names, eqx, weight):
    """Everything that is compared, name by name."""
    return {
        name: {
            "signatures": signatures(value),
            "calls": numbered(
                pair
                for generator in GENERATORS[name]
                for pair in run_generator(generator, value, eqx)
            ),
        }
        for name, value in names.items()
        if name in GENERATORS and is_heavy(name) == (weight == "heavy")
    }


def main(path, which, weight):
    load()
    if which == "equinox":
        import equinox
        import equinox.internal

        found = {
            "equinox": run(names_of(equinox), equinox, weight),
            "names": sorted(names_of(equinox)),
            "version": equinox.__version__,
        }
    else:
        import vernal
        from vernal.compat import equinox
        from vernal.compat._differences import ROOMS

        native = {name: native_object(name, vernal, ROOMS) for name in names_of(equinox)}
        native = {name: value for name, value in native.items() if value is not None}
        eqx = types.SimpleNamespace(**{n: getattr(vernal, n) for n in dir(vernal)})
        eqx.internal = types.SimpleNamespace(
            **{
                name.removeprefix("internal."): v
                for name, v in native.items()
                if name[:9] == "internal."
            }
        )
        found = {
            "compat": run(names_of(equinox), equinox, weight),
            "native": run(native, eqx, weight),
        }
    Path(path).write_text(json.dumps(found), encoding="utf-8")


def write():
    """Writes the differences of all calls and, for the table of names, which kinds of them there are."""
    known, calls = {}, 0
    for weight in ("light", "heavy"):
        found = gather(weight)
        known.update({name: differences(found, name) for name in found["equinox"]})
        calls += sum(len(seen["calls"]) for seen in found["equinox"].values())
    known = {name: known[name] for name in sorted(known) if known[name]}
    print(f"{calls} calls; {len(known)} names differ in some way")
    KNOWN.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    lines = [f'    "{name}": {json.dumps(kinds(known[name]))},\n' for name in known]
    SEEN.write_text(HEAD + "SEEN = {\n" + "".join(lines) + "}  # fmt: skip\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:]) if sys.argv[1:] else write()
