"""`python -m vernal launch`: several processes run a script, and nothing is left behind, whatever ends first.

Most of it is tested without JAX, which the launcher itself does not need: its file is loaded by itself.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vernal.__main__ import main

SOURCE = Path(__file__).parents[2] / "src"

# Runs its arguments in two processes, with less patience than usual.
LAUNCH = f"""
import sys
sys.path.insert(0, {str(SOURCE / "vernal")!r})
import _launch
_launch._GRACE = 1.0
sys.exit(_launch.launch([sys.executable, *sys.argv[1:]], 2, 3))
"""

# Starts a child that starts a child, and notes all that is to end. The names of the files are process ids.
FAMILY = """
import os, subprocess, sys, time
rank, folder = os.environ["VERNAL_RANK"], sys.argv[1]

def note():
    open(os.path.join(folder, str(os.getpid())), "w").close()

if len(sys.argv) == 3:
    note()
    depth = int(sys.argv[2])
    if depth:
        subprocess.Popen([sys.executable, __file__, folder, str(depth - 1)])
    time.sleep(600)

note()
subprocess.Popen([sys.executable, __file__, folder, "1"])
while len(os.listdir(folder)) < 6:
    time.sleep(0.02)
"""


def start(script, *words):
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, str(script), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script, *words):
    process = start(script, *words)
    out, errors = process.communicate(timeout=120)
    return process.returncode, out, errors


def family(tmp_path, ending):
    """A script whose two processes have children and grandchildren; then `ending` happens."""
    script, folder = tmp_path / "family.py", tmp_path / "family"
    script.write_text(FAMILY + ending)
    folder.mkdir()
    return script, folder


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def all_there(folder):
    wait_for(lambda: len(os.listdir(folder)) == 6)


def is_alive(pid):
    try:
        # A zombie has ended; whoever adopted it has not looked yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(folder):
    pids = os.listdir(folder)
    assert len(pids) == 6
    wait_for(lambda: not any(map(is_alive, pids)))


def test_processes_know_their_places_and_their_lines_come_out_whole(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "for i in range(200):\n"
        "    print(i, end=' ', flush=True)\n"
        "    print('x' * 3000)\n"
        "print('bad', file=sys.stderr)\n"
        "names = 'VERNAL_PROCESSES VERNAL_RANK JAX_NUM_CPU_DEVICES JAX_LOCAL_DEVICE_IDS'\n"
        "address = os.environ['VERNAL_COORDINATOR']\n"
        "assert os.environ['JAX_COORDINATOR_BIND_ADDRESS'] == address\n"
        "print(address.split(':')[0], *map(os.environ.get, names.split()), *sys.argv[1:], repr(sys.stdin.read()))\n"
        "print('without an end', end='')\n"
    )
    code, out, errors = run(tmp_path / "script.py", "-m", "a b")
    assert code == 0
    assert sorted(errors.splitlines()) == ["[0] bad", "[1] bad"]
    for rank, devices in ((0, "0,1,2"), (1, "3,4,5")):
        mine = [line[4:] for line in out.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine[:200] == [f"{i} {'x' * 3000}" for i in range(200)]
        assert mine[200:] == [f"127.0.0.1 2 {rank} 3 {devices} -m a b ''", "without an end"]
    assert len(out.splitlines()) == 2 * 202


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        (
            "sys.exit(3 if rank == '1' else time.sleep(600))",
            3,
            "process 1 of 2 failed with exit code 3;",
        ),
        (
            "os.kill(os.getpid(), 9) if rank == '0' else time.sleep(600)",
            137,
            "process 0 of 2 was killed by SIGKILL; the others were stopped",
        ),
        # The one that ends because another was lost is not the one that failed first.
        (
            "os._exit(75) if rank == '0' else time.sleep(0.3)\nsys.exit(4)",
            4,
            "process 1 of 2 failed with exit code 4;",
        ),
        # Whoever does not end when asked is killed, its children too.
        (
            "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "sys.exit(75 if rank == '1' else time.sleep(600))",
            75,
            "process 1 of 2 failed with exit code 75;",
        ),
        ("", 0, ""),
    ],
    ids=["exit", "kill", "told of a loss", "stubborn", "no failure"],
)
@pytest.mark.sample(3)
def test_the_first_failure_ends_all_and_children_of_children(tmp_path, ending, code, words):
    script, folder = family(tmp_path, ending)
    found, _, errors = run(script, folder)
    assert found == code and (words in errors if words else errors == "")
    all_gone(folder)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=["Ctrl-C", "SIGTERM", "the launcher is killed"],
)
def test_whatever_ends_the_launcher_ends_all(tmp_path, number, code):
    script, folder = family(
        tmp_path,
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    print('ready')\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    print('tidied up')",
    )
    process = start(script, folder)
    all_there(folder)
    lines = [process.stdout.readline() for _ in range(2)]
    assert sorted(lines) == ["[0] ready\n", "[1] ready\n"]
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == code
    all_gone(folder)
    if number == signal.SIGINT:
        assert sorted(out.splitlines()) == ["[0] tidied up", "[1] tidied up"]
    if number != signal.SIGKILL:
        assert f"vernal launch: {number.name}: all processes were stopped" in errors


def test_a_reader_that_stops_reading_ends_all(tmp_path):
    script, folder = family(tmp_path, "while True: print('line')")
    process = start(script, folder)
    assert process.stdout.readline().endswith("line\n")
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    process.stderr.close()
    all_gone(folder)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--processes", "0", "x.py"], "--processes 0: at least 1"),
        (["--processes", "2", "--devices-per-process", "0", "x.py"], "--devices-per-process 0: at"),
        (["--processes", "2"], "which script"),
        (["x.py"], "--processes"),
    ],
)
def test_a_wrong_command_line_is_refused(capsys, words, error):
    with pytest.raises(SystemExit, match="2"):
        main(["launch", *words])
    assert error in capsys.readouterr().err
