"""What Equinox gave in one process, and Vernal in another, side by side."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import vernal

from .describe import difference, signature_difference

ROOT = Path(__file__).parents[3]
KNOWN = Path(__file__).with_name("differences.json")
SEEN = ROOT / "src" / "vernal" / "compat" / "_seen.py"
HEAD = '''"""Where the calls of a name have shown a difference: in `vernal.compat`, and with `import vernal as eqx`.

Written by `python -m tests.compat._calls`. `more`: Equinox raises, or has no such parameter. `errors`: both
raise, other classes. `refuses`: only Vernal raises. `values`: both give something, not the same.
"""

'''
WAYS = ("compat", "native")


def gather(weight: str) -> dict[str, Any]:
    """Runs the calls in two processes at once.

    Args:
        weight: `"light"` or `"heavy"`.

    Returns:
        What each of them wrote, in one dictionary.
    """
    sources = os.pathsep.join([str(Path(vernal.__file__).parents[1]), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": sources, "JAX_PLATFORMS": "cpu"}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.compat._calls", f"{folder}/{which}", which, weight],
                env=environment,
                cwd=ROOT,
                stderr=subprocess.PIPE,
                text=True,
            )
            for which in ("equinox", "vernal")
        ]
        for process in running:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
        for path in sorted(Path(folder).iterdir()):
            found.update(json.loads(path.read_text(encoding="utf-8")))
    return found


def differences(found: dict[str, Any], name: str) -> dict[str, Any]:
    """How a name differs from Equinox's.

    Args:
        found: what `gather` returned.
        name: the name.

    Returns:
        For `"compat"` and `"native"`, where there is a difference: the differing calls and, under the names of
        methods with `signature of` in front, the differing signatures; or `"absent"`.
    """
    every: dict[str, Any] = {}
    theirs = found["equinox"][name]
    for way in WAYS:
        if name not in found[way]:
            every[way] = "absent"
            continue
        ours, differing = found[way][name], {}
        for method, parameters in theirs["signatures"].items():
            if words := signature_difference(parameters, ours["signatures"].get(method)):
                differing[f"signature of {method or name}"] = words
        for call, outcome in theirs["calls"].items():
            if words := difference(outcome, ours["calls"][call]):
                differing[call] = words
        if differing:
            every[way] = differing
    return every


def kinds(differing: dict[str, Any]) -> list[list[str]]:
    """The kinds of the differences of a name, for each of the two ways."""
    return [_kinds(differing.get(way, {})) for way in WAYS]


def _kinds(differing: Any) -> list[str]:
    if differing == "absent":
        return ["absent"]
    return sorted({_kind(words) for words in differing.values()})


def _kind(words: str) -> str:
    if words.startswith("also takes"):
        return "more"
    before, became, after = words.partition(" became ")
    if words.startswith(("other", "warnings")) or not became:
        return "values"
    if "a value" not in (before, after):
        return "errors"
    return "refuses" if before == "a value" else "more"
