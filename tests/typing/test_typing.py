"""What type checkers tell our users: pyright and `mypy --strict` find exactly the errors marked in `cases/`.

A line that must be refused ends in `# error: <pyright rule> | <mypy code>`, with `-` where a checker has no objection.
Every other line must be accepted by both; `assert_type` in the cases fixes what is inferred. The cases are never run.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "cases"
_MARKER = re.compile(r"# error: (?P<pyright>[\w-]+) \| (?P<mypy>[\w-]+)$")
_MYPY_LINE = re.compile(
    r"^(?P<file>.+?):(?P<line>\d+): error: (?P<text>.*?)\s+\[(?P<code>[\w-]+)\]$"
)

Error = tuple[str, int, str]


def expected(checker: str) -> set[Error]:
    found: set[Error] = set()
    for path in sorted(CASES.glob("*.py")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            marker = _MARKER.search(line)
            assert marker or "# error" not in line, f"{path.name}:{number}: a broken marker"
            if marker and marker[checker] != "-":
                found.add((path.name, number, marker[checker]))
    return found


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    # 1 means that errors were found; anything above, that the checker itself failed.
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@cache
def pyright(folder: Path) -> dict[Error, str]:
    """The errors that pyright finds, each with its text."""
    # Without a configuration of its own the folder would be checked under the package's.
    config = folder / "pyrightconfig.json"
    options = ("--outputjson", "--pythonpath", sys.executable)
    report = json.loads(run("basedpyright", *options, "--project", str(config)))
    return {
        (Path(d["file"]).name, d["range"]["start"]["line"] + 1, d.get("rule", "syntax")): d[
            "message"
        ]
        for d in report["generalDiagnostics"]
        if d["severity"] == "error"
    }


@cache
def mypy(folder: Path) -> dict[Error, str]:
    """The errors that `mypy --strict` finds, each with its text."""
    output = run("mypy", "--strict", "--no-error-summary", "--hide-error-context", str(folder))
    found = {}
    for line in output.splitlines():
        if match := _MYPY_LINE.match(line):
            found[Path(match["file"]).name, int(match["line"]), match["code"]] = match["text"]
        else:
            assert ": note: " in line, output
    return found


CHECKERS = {"pyright": pyright, "mypy": mypy}


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_checker_finds_every_marked_error(checker):
    found = CHECKERS[checker](CASES)
    missed = sorted(expected(checker) - found.keys())
    assert not missed, "not refused:\n" + "\n".join(f"  {f}:{n}: {code}" for f, n, code in missed)


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_checker_accepts_every_other_line(checker):
    found = CHECKERS[checker](CASES)
    surprises = sorted(found.keys() - expected(checker))
    assert not surprises, "refused:\n" + "\n".join(
        f"  {f}:{n}: {code}: {found[f, n, code]}" for f, n, code in surprises
    )
