"""The command line: `vernal COMMAND`, or `python -m vernal COMMAND`."""

import argparse
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ._launch import launch
from .compat import install

_STARTUP = Path(__file__).resolve().parent / "_startup"

_PURPOSE = """\
Runs a Python script: with a report of what JAX compiles, with Vernal in place of Equinox, or in several processes.
"""

_EXAMPLES = """\
examples:
  vernal compiles train.py           why does my step compile again?
  vernal compat train.py             run a program that imports equinox on Vernal
  vernal launch --processes 4 train.py

`vernal COMMAND --help` describes one command. To choose the Python that runs it, write `python -m vernal`.
"""

_COMPILES = """\
Runs a script, and reports every compilation of JAX in it: of which function, where, how often, how
long tracing, lowering and compiling took, and why, where that is known. The table is printed to
the standard error when the script has ended; its own output and exit code are left alone.
"""

_COMPAT = """\
Runs a script with Vernal in the place of Equinox: `import equinox`, by the script or by a library that
is built on it, imports Vernal.
"""

_LAUNCH = """\
Starts several JAX processes on this machine that run the same script, for development and tests. The
script calls `vernal.sharding.initialise()` before it uses JAX. Every line that a process prints comes
out behind its rank. When one fails, or at Ctrl-C, all are stopped, and what they have started as well;
the exit code is that of the first that failed.
"""


def _parser() -> argparse.ArgumentParser:
    prog = "vernal" if Path(sys.argv[0]).stem == "vernal" else "python -m vernal"
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_PURPOSE,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    compiles = commands.add_parser(
        "compiles",
        help="run a script and report every compilation",
        description=_COMPILES,
        usage=f"{prog} compiles [-h] [--html FILE] (SCRIPT | -m MODULE) [ARGS...]",
    )
    compiles.add_argument(
        "--html", metavar="FILE", help="write a page with a timeline as well: one file, no network"
    )
    _add_program(compiles)
    compiles.set_defaults(run=_compiles, parser=compiles)
    compat = commands.add_parser(
        "compat",
        help="run a script with Vernal in the place of Equinox",
        description=_COMPAT,
        usage=f"{prog} compat [-h] (SCRIPT | -m MODULE) [ARGS...]",
    )
    _add_program(compat)
    compat.set_defaults(run=_compat, parser=compat)
    several = commands.add_parser(
        "launch",
        help="run a script in several JAX processes on this machine",
        description=_LAUNCH,
        usage=f"{prog} launch [-h] --processes N [--devices-per-process M] (SCRIPT | -m MODULE) [ARGS...]",
    )
    several.add_argument("--processes", metavar="N", type=int, required=True, help="how many")
    several.add_argument(
        "--devices-per-process",
        metavar="M",
        type=int,
        default=1,
        help="CPU devices of each process, or accelerators (default: 1)",
    )
    _add_program(several)
    several.set_defaults(run=_several, parser=several)
    return parser


def _add_program(command: argparse.ArgumentParser) -> None:
    run = command.add_argument_group("what is run, as after `python`")
    run.add_argument("-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER)
    run.add_argument("script", metavar="SCRIPT", nargs=argparse.REMAINDER)


def _program(options: argparse.Namespace) -> list[str]:
    """What is to be run, as after `python`."""
    command = options.script if options.module is None else ["-m", *options.module]
    if command in ([], ["-m"]):
        options.parser.error(f"which script? For example: {options.parser.prog} train.py")
    return command


def _compat(options: argparse.Namespace) -> None:
    command = _program(options)
    install()
    if command[0] == "-m":
        sys.argv = command[1:]
        # As `python -m`: the folder where it was started comes first.
        sys.path[0] = os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def _compiles(options: argparse.Namespace) -> NoReturn:
    parser: argparse.ArgumentParser = options.parser
    command = _program(options)
    if sys.flags.ignore_environment or sys.flags.no_site:
        parser.error("leave out -E, -I and -S: they keep Python from importing what watches")
    page = None if options.html is None else Path(options.html).resolve()
    if page is not None and not page.parent.is_dir():
        parser.error(f"--html {options.html}: there is no folder {page.parent}")
    before = os.environ.get("PYTHONPATH")
    settings = {
        # The script may change its directory.
        "page": None if page is None else str(page),
        "script": " ".join(command),
        "pythonpath": before,
    }
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_STARTUP), *([before] if before else [])]),
        "VERNAL_COMPILES": json.dumps(settings),
    }
    # In place of this process, which has imported JAX already: see _startup/sitecustomize.py.
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *_python_options(), *command], environment)


def _several(options: argparse.Namespace) -> NoReturn:
    for name in ("processes", "devices_per_process"):
        if (number := getattr(options, name)) < 1:
            options.parser.error(f"--{name.replace('_', '-')} {number}: at least 1")
    command = [sys.executable, *_python_options(), *_program(options)]
    sys.exit(launch(command, options.processes, options.devices_per_process))


def _python_options() -> list[str]:
    """What stands between `python` and `-m vernal`."""
    before = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]
    # Or between `python` and `-mvernal`.
    return before[: -2 if before[-1] == "vernal" else -1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command: the words that are given, or those of this process's command line."""
    options = _parser().parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
