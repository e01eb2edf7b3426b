"""Programs whose sources are somewhere else, or nowhere: compiled files that were moved, a zip
archive, a frozen application, Python without assertions and docstrings.

Each runs the same program, `PROGRAM`, and must see the same as an ordinary run; the lines of
`explain()` name the user's file by the same name and line.
"""

import compileall
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipapp
from typing import Any

import pytest

import vernal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SOURCES = pathlib.Path(vernal.__file__).parent
PROGRAM = '''\
"""A program in which everything happens that looks at code: run it, and it prints what it saw."""

import functools
import json

import jax
import jax.numpy as jnp
import optax

import vernal


class Net(vernal.Module):
    w: jax.Array
    act: object
    name: str = "net"

    def __call__(self, x):
        return self.act(self.w * x)


def scaled(k):
    return lambda x: k * x


@vernal.filter_jit
def step(model, f, x):
    y = f(model(x))
    return vernal.error_if(y, jnp.any(y < 0), "a negative number")


@vernal.filter_jit
def train(opt, model, state, x):
    grads = vernal.filter_grad(lambda model: jnp.sum(model(x)))(model)
    return opt.update(model, grads, state)


@vernal.filter_jit
def updated(opt, grads):
    return opt.update(grads, opt.init(grads))[0]


def main():
    seen = []
    model = Net(jnp.float32(2.0), functools.partial(jax.nn.leaky_relu, negative_slope=0.5))
    f, g = scaled(3.0), scaled(5.0)
    for function, n in ((f, 2), (f, 3), (g, 2), (g, 3), (f, 2), (jnp.tanh, 4)):
        seen.append(round(float(step(model, function, jnp.ones(n))[0]), 4))
    try:
        step(model, f, -jnp.ones(2))
        seen.append("no error")
    except vernal.runtime.RuntimeCheckError as error:
        seen.append("a negative number" in str(error))
    for rate in (0.5, 0.25):
        opt = vernal.Optimizer(optax.sgd, rate)
        model, _ = train(opt, model, opt.init(model), jnp.ones(2))
        seen.append(float(model.w))
    for _ in range(3):
        seen.append(float(updated(optax.sgd(0.5), jnp.ones(2))[0]))
    copy = jax.tree.map(lambda leaf: leaf, Net(jnp.float32(1.0), f))
    seen.append(copy.act is f)
    counts = [step.trace_count, train.trace_count, updated.trace_count]
    explained = [step.explain(), train.explain(), updated.explain()]
    place = vernal.__file__
    print(json.dumps({"seen": seen, "counts": counts, "explained": explained, "place": place}))


if __name__ == "__main__":
    main()
'''
SEEN = [6.0, 6.0, 10.0, 10.0, 6.0, 0.964, True, 1.0, 0.5, -0.5, -0.5, -0.5, True]
COUNTS = [5, 1, 1]
LEFT_OUT = ("torch", "transformers", "sklearn", "matplotlib", "equinox", "flax", "orbax", "pytest",
            "hypothesis", "beartype", "tkinter", "PIL", "pandas", "IPython", "tensorflow")  # fmt: skip


def run(command: list[Any], folder: pathlib.Path, path: Any = None, **more: str) -> dict[str, Any]:
    """What the program printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**kept, "JAX_PLATFORMS": "cpu", **more}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def without_times(lines: list[str]) -> list[str]:
    return [re.sub(r"[0-9.]+ s\b", "T s", line) for line in lines]


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory) -> dict[str, Any]:
    """The program, run as everybody does."""
    folder = tmp_path_factory.mktemp("ordinary")
    (folder / "program.py").write_text(PROGRAM)
    seen = run([sys.executable, "program.py"], folder, SOURCES.parent)
    assert pathlib.Path(seen["place"]) == SOURCES / "__init__.py"
    return seen


def check(seen: dict[str, Any], ordinary: dict[str, Any], inside: Any) -> None:
    assert str(inside) in seen["place"], f"the package was taken from {seen['place']}, not {inside}"
    assert seen["seen"] == SEEN
    assert seen["counts"] == COUNTS
    assert without_times(seen["explained"]) == without_times(ordinary["explained"])


def copied(folder: pathlib.Path) -> pathlib.Path:
    """A folder that holds the package and the program, without compiled files."""
    folder.mkdir()
    shutil.copytree(SOURCES, folder / "vernal", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "program.py").write_text(PROGRAM)
    return folder


def test_the_ordinary_run(ordinary):
    check(ordinary, ordinary, SOURCES)
    assert "program.py:" in ordinary["explained"][0]


@pytest.mark.parametrize("named", ["/nowhere/at/all", "."])
def test_compiled_files_that_were_moved(ordinary, named, tmp_path):
    built = copied(tmp_path / "built")
    assert compileall.compile_dir(built, ddir=named, quiet=1, legacy=True, force=True)
    for source in built.rglob("*.py"):
        source.unlink()
    moved = tmp_path / "moved"
    built.rename(moved)
    assert (moved / "program.pyc").exists() and not list(moved.rglob("*.py"))
    check(run([sys.executable, moved / "program.pyc"], tmp_path, moved), ordinary, moved)


def test_compiled_files_that_were_moved_with_their_cache_folders(ordinary, tmp_path):
    built = copied(tmp_path / "built")
    assert compileall.compile_dir(built, ddir="/nowhere", quiet=1, force=True,
                                  invalidation_mode=_unchecked())  # fmt: skip
    moved = tmp_path / "moved"
    built.rename(moved)
    # The sources are there, and are not what was compiled.
    for source in (moved / "vernal").rglob("*.py"):
        source.write_text("raise ImportError('not the compiled file')\n")
    check(run([sys.executable, "program.py"], moved, moved), ordinary, moved)


def _unchecked() -> Any:
    import py_compile

    return py_compile.PycInvalidationMode.UNCHECKED_HASH


def test_a_zip_archive_on_the_path(ordinary, tmp_path):
    built = copied(tmp_path / "built")
    (built / "program.py").rename(tmp_path / "program.py")
    archive = shutil.make_archive(str(tmp_path / "library"), "zip", built)
    shutil.rmtree(built)
    check(run([sys.executable, "program.py"], tmp_path, archive), ordinary, archive)


def test_a_zip_application(ordinary, tmp_path):
    built = copied(tmp_path / "built")
    archive = tmp_path / "application.pyz"
    zipapp.create_archive(built, archive, main="program:main", compressed=True)
    shutil.rmtree(built)
    check(run([sys.executable, archive], tmp_path), ordinary, archive)


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (["-O"], {}),
        (["-OO"], {}),
        ([], {"PYTHONDONTWRITEBYTECODE": "1"}),
        (["-OO"], {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}),
        (["-X", "no_debug_ranges"], {}),
        (["-X", "frozen_modules=off"], {}),
    ],
    ids=lambda given: " ".join(given) or "plain",
)
def test_options_of_python(options, more, ordinary, tmp_path):
    folder = copied(tmp_path / "copy")
    seen = run([sys.executable, *options, "program.py"], folder, folder, **more)
    check(seen, ordinary, folder)


def test_a_program_from_a_string_and_from_standard_input(ordinary, tmp_path):
    for command in (["-c", PROGRAM], ["-c", f"exec({PROGRAM!r})"]):
        seen = run([sys.executable, *command], tmp_path, SOURCES.parent)
        assert (seen["seen"], seen["counts"]) == (SEEN, COUNTS)


def test_a_frozen_application(ordinary, tmp_path):
    """By PyInstaller: no sources, and the names of files are relative."""
    (tmp_path / "program.py").write_text(PROGRAM)
    left_out = [word for name in LEFT_OUT for word in ("--exclude-module", name)]
    subprocess.run(
        [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "ERROR", "--paths",
         str(SOURCES.parent), *left_out, "program.py"],
        cwd=tmp_path, check=True, capture_output=True,
        env={**os.environ, "PYINSTALLER_CONFIG_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    frozen = tmp_path / "dist" / "program"
    check(run([frozen / "program"], tmp_path), ordinary, frozen)
