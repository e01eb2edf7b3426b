"""`vernal`, the command that installing the package makes: the same as `python -m vernal`."""

import subprocess
import sys
from pathlib import Path

COMMAND = Path(sys.executable).with_name("vernal")


def run(*words, cwd):
    done = subprocess.run(
        [COMMAND, *words], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_help_begins_with_what_was_typed_and_has_an_example_for_every_command(tmp_path):
    code, text, _ = run("--help", cwd=tmp_path)
    assert code == 0
    assert text.startswith("usage: vernal [-h] COMMAND")
    examples = text.split("examples:")[1]
    assert all(f"vernal {name} " in examples for name in ("compiles", "compat", "launch"))
    code, _, text = run("compat", cwd=tmp_path)
    assert code == 2
    assert "which script? For example: vernal compat train.py" in text


def test_a_script_runs_as_python_would_run_it(tmp_path):
    (tmp_path / "train.py").write_text("import sys; print(sys.argv, sys.path[0], __name__)")
    for name in ("compiles", "compat"):
        code, printed, _ = run(name, "train.py", "--epochs", "3", cwd=tmp_path)
        assert code == 0
        assert printed.strip() == f"['train.py', '--epochs', '3'] {tmp_path} __main__"
