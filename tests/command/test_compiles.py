"""`python -m vernal compiles`: the script runs as it would without, and every compilation is reported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vernal.__main__ import main

SOURCE = str(Path(__file__).parents[2] / "src")

PURE = """
import os
# Read when JAX is imported: by this script, not before.
os.environ["JAX_ENABLE_X64"] = "1"
import sys, jax, numpy as np

@jax.jit
def step(x):
    return x + 1

print(sys.argv, sys.path[0], __name__, __file__)
print(os.environ.get("PYTHONPATH"), [x for x in os.environ if "VERNAL" in x], sorted(sys.path))
print(step(np.ones(2)).dtype, step(np.ones(3)).dtype)
"""

EQUINOX = """
import equinox as eqx, jax, numpy as np
model = eqx.nn.Linear(2, 1, key=jax.random.key(0))

@eqx.filter_jit
def step(model, x):
    return model(x)

print(step(model, np.ones(2, np.float32)).shape)
print(step(model, np.ones(2, np.int32)).shape)
"""

VERNAL = """
import vernal, numpy as np

@vernal.filter_jit
def step(x, n):
    return n * x

print(step(np.ones(2), 2), step(np.ones(2), 3))
"""

# Everything that comes to an end, in an order that can be told from the output.
THE_END = """
import atexit, os, sys, threading
import jax, numpy as np
atexit.register(print, "at exit")
double = jax.jit(lambda x: 2 * x)

def late():
    threading.main_thread().join()
    print("in a thread", double(np.ones(2)))

threading.Thread(target=late).start()
os.chdir("/")
print("last line")
if len(sys.argv) > 1:
    exec(sys.argv[1])
"""


def python(*words, cwd, path=SOURCE):
    """Runs Python with the package at hand: (exit code, output, errors)."""
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": ""}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def compiles(*words, cwd, path=SOURCE):
    return python("-m", "vernal", "compiles", *words, cwd=cwd, path=path)


def write(folder, **scripts):
    for name, text in scripts.items():
        (folder / f"{name}.py").write_text(text)


def row(report, function):
    """The cells of a function's row: place, times and what follows; later lines of it as well."""
    (found,) = re.findall(rf"^ {function} +(.*(?:\n {{30,}}.*)*)", report, re.MULTILINE)
    return found


@pytest.mark.slow
def test_a_script_of_pure_jax_prints_what_it_always_does(tmp_path):
    write(tmp_path, train=PURE)
    words = ["train.py", "--html", "-m", "a b"]
    code, out, errors = python(*words, cwd=tmp_path)
    assert (code, errors) == (0, "")
    assert "float64 float64" in out
    watched = compiles("--html", "report.html", *words, cwd=tmp_path)
    assert watched[:2] == (0, out)
    report = watched[2]
    assert report.startswith("\nvernal: compilations of train.py --html -m a b\n2 compilations of ")
    assert re.match(r"train\.py:7 +2 .* x: f64\[2\] -> f64\[3\]", row(report, "step"))
    assert report.splitlines()[-1] == f"page: {tmp_path / 'report.html'}"
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "x: f64[2] -&gt; f64[3]" in page and "Compilations of train.py" in page


@pytest.mark.slow
def test_a_script_of_equinox_is_reported(tmp_path):
    write(tmp_path, train=EQUINOX)
    code, out, report = compiles("train.py", cwd=tmp_path)
    assert (code, out) == (0, "(1,)\n(1,)\n")
    # The place is the call in the script: the definition is hidden inside of Equinox.
    assert re.search(r"^ step +train\.py:9 +1 .* first call", report, re.MULTILINE)
    assert re.search(r"^ step +train\.py:10 +1 .* f32\[2\] -> i32\[2\]", report, re.MULTILINE)
    assert re.search(r"train\.py:3 .* JAX's own function, outside of `jit`", report)


@pytest.mark.slow
def test_a_script_of_vernal_is_reported_with_vernals_reasons(tmp_path):
    write(tmp_path, train=VERNAL)
    code, out, report = compiles("train.py", cwd=tmp_path)
    assert (code, out) == (0, "[2. 2.] [3. 3.]\n")
    assert re.match(r"train\.py:4 +2 .* n: 2 -> 3", row(report, "step"))


@pytest.mark.slow
def test_a_module_runs_as_after_python_m(tmp_path):
    write(tmp_path, train=PURE)
    words = ["-m", "train", "-m", "x"]
    want = python(*words, cwd=tmp_path)
    code, out, report = compiles(*words, cwd=tmp_path)
    assert (code, out) == want[:2]
    assert "vernal: compilations of -m train -m x\n" in report


@pytest.mark.slow
@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "sys.exit(7)",
        "sys.exit('why')",
        "raise RuntimeError('why')",
        "raise KeyboardInterrupt",
    ],
)
def test_the_report_is_the_last_thing_and_changes_no_exit_code(tmp_path, ending):
    write(tmp_path, train=THE_END)
    code, out, errors = python("train.py", ending, cwd=tmp_path)
    watched_code, watched_out, report = compiles(
        "--html", "report.html", "train.py", ending, cwd=tmp_path
    )
    assert (watched_code, watched_out) == (code, out)
    assert out.splitlines()[0] == "last line" and out.splitlines()[-1] == "at exit"
    # What the script wrote there, with its traceback, and then once the report.
    assert report.startswith(errors)
    report = report.removeprefix(errors)
    assert report.count("vernal: compilations of") == 1
    assert report.startswith("\nvernal: compilations of")
    # It was compiled after the last line, in a thread.
    assert re.match(r"train\.py:5 +1 .* first call", row(report, "<lambda>"))
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_a_fork_of_the_script_reports_nothing(tmp_path):
    write(tmp_path, train="import os\nchild = os.fork()\nif child:\n    os.waitpid(child, 0)\n")
    code, _, report = compiles("train.py", cwd=tmp_path)
    assert code == 0
    assert report.count("vernal: compilations of") == 1


@pytest.mark.slow
def test_both_outputs_in_one_file_are_in_order(tmp_path):
    write(tmp_path, train="print('from the script')")
    command = [sys.executable, "-m", "vernal", "compiles", "train.py"]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "PYTHONWARNINGS": ""}
    with open(tmp_path / "log", "w") as log:
        subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=log, stderr=log, check=True, timeout=250
        )
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [
        "from the script",
        "",
        "vernal: compilations of train.py",
        "nothing was compiled: JAX was not imported",
    ]


@pytest.mark.slow
def test_another_sitecustomize_still_runs_and_options_of_python_are_kept(tmp_path):
    write(tmp_path, train="import sys\nprint(sys.flags.dont_write_bytecode, sys.warnoptions)")
    (tmp_path / "site").mkdir()
    write(tmp_path / "site", sitecustomize="import os, sys\nprint('site', sorted(sys.path))\n")
    path = os.pathsep.join([SOURCE, str(tmp_path / "site")])
    options = ["-B", "-W", "error"]
    code, out, _ = python(*options, "train.py", cwd=tmp_path, path=path)
    watched = python(*options, "-m", "vernal", "compiles", "train.py", cwd=tmp_path, path=path)
    assert code == watched[0] == 0
    # The first line is of the process that becomes the other one.
    assert watched[1].splitlines()[-2:] == out.splitlines()
    assert out.splitlines()[-1] == "1 ['error']"


@pytest.mark.slow
def test_a_script_that_shadows_what_vernal_needs_still_runs(tmp_path):
    (tmp_path / "inside").mkdir()
    write(tmp_path / "inside", train=PURE, wadler_lindig="raise RuntimeError('mine')\n")
    code, out, report = compiles("inside/train.py", cwd=tmp_path)
    assert code == 0 and "float64" in out
    assert "nothing was recorded: RuntimeError: mine" in report


@pytest.mark.slow
def test_vernal_is_found_where_the_command_found_it(tmp_path):
    write(tmp_path, train=PURE)
    code, _, report = python(
        "-m", "vernal", "compiles", str(tmp_path / "train.py"), cwd=SOURCE, path=""
    )
    assert code == 0
    assert "train.py:7" in row(report, "step")


@pytest.mark.slow
def test_a_page_that_cannot_be_written_is_told_of(tmp_path):
    write(tmp_path, train=PURE)
    code, _, report = compiles("--html", ".", "train.py", cwd=tmp_path)
    assert code == 0
    assert "the page could not be written: " in report.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "arguments are required: COMMAND"),
        (["compile"], "invalid choice: 'compile'"),
        (["compiles"], "which script?"),
        (["compiles", "-m"], "which script?"),
        (["compiles", "--html"], "--html: expected one argument"),
        (["compiles", "--html", "nowhere/a.html", "train.py"], "there is no folder"),
    ],
)
def test_a_wrong_command_is_refused(words, problem, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_options_that_would_switch_the_watching_off_are_refused(tmp_path):
    command = (
        f"import sys; sys.path.insert(0, {SOURCE!r}); from vernal.__main__ import main; main()"
    )
    code, _, errors = python("-E", "-c", command, "compiles", "train.py", cwd=tmp_path)
    assert code == 2
    assert "leave out -E, -I and -S" in errors


def test_help_tells_what_is_run(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["compiles", "--help"])
    assert caught.value.code == 0
    assert "(SCRIPT | -m MODULE) [ARGS...]" in capsys.readouterr().out
