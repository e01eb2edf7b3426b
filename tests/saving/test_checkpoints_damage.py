"""Checkpoints that were damaged, folders that refuse, and programs that are killed while saving."""

import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from vernal.saving import Checkpoints
from vernal.saving._checkpoints_folder import end_turn, take_turn

BACKENDS = ["safetensors", "orbax"]
LIKE = {"w": np.zeros(50), "n": 0}


def state(step):
    return {"w": np.full(50, float(step)), "n": step}


@pytest.fixture
def run(tmp_path, request):
    """A folder with the checkpoints of steps 1 and 2."""
    with Checkpoints(tmp_path, backend=request.param) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step), metadata={"lr": 0.1})
    return checkpoints


def files_of(run, step):
    folder = pathlib.Path(run.folder, f"step-{step:08d}")
    return sorted(path for path in folder.rglob("*") if path.is_file())


def intact(run, step=1):
    restored = run.restore(LIKE, step)
    return restored["n"] == step and bool((restored["w"] == step).all())


both = pytest.mark.parametrize("run", BACKENDS, indirect=True)


@both
def test_every_damaged_or_missing_file_is_noticed_and_no_other_is_taken(run):
    files = files_of(run, 2)
    assert {"checkpoint.json", "arrays.safetensors"} & {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :]
        for content in (whole[:middle], flipped, whole + b"\0", None):
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            if content is None and path.name == "checkpoint.json":
                assert run.latest == 1
            elif content != whole:
                with pytest.raises((ValueError, FileNotFoundError)) as caught:
                    run.restore(LIKE)
                text = str(caught.value)
                assert "damaged" in text or (content is None and "No such file" in text)
                assert caught.value.__notes__ == ["Steps in this folder: 1, 2"]
            path.write_bytes(whole)
    assert intact(run, 1) and intact(run, 2)


@pytest.mark.parametrize("run", ["safetensors"], indirect=True)
def test_a_damaged_checkpoint_does_not_stop_the_run(run):
    manifest = files_of(run, 1)[1]
    assert manifest.name == "checkpoint.json"
    manifest.write_text(manifest.read_text().replace("0.1", "0.2"))
    with pytest.raises(
        ValueError, match=r"the checkpoint is damaged(.|\n)*checkpoint.json does not match"
    ):
        run.metadata(1)
    with Checkpoints(run.folder, keep=1, best="lr", backend="safetensors") as again:
        again.save(3, state(3), metadata={"lr": 0.3})
    assert again.steps == [2, 3] and again.best == 2


@pytest.mark.parametrize("run", ["safetensors"], indirect=True)
def test_nothing_in_a_checkpoint_can_run_code(run, monkeypatch):
    """Whatever the metadata says, it is data; and nothing is read that could be more."""
    evil = "cos\nsystem\n(S'touch owned'\ntR."
    code = {"__reduce__": ["os.system", ["exit"]], "py/object": "os.system", "!!python": evil}
    with run:
        run.save(3, state(3), metadata=code)

    def refuse(*_, **__):
        raise AssertionError("this runs code")

    for name in ("pickle.loads", "pickle.load", "pickle.Unpickler", "marshal.loads", "os.system"):
        monkeypatch.setattr(name, refuse)
    assert run.metadata() == code and intact(run, 3)
    path = pathlib.Path(run.folder, "step-00000003", "checkpoint.json")
    for content in (b"\x80\x04cos\nsystem\n.", b"[" * 100_000, b"7", b"[]", b'{"crc32": "0"}'):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="the checkpoint is damaged"):
            run.restore(LIKE)


def test_nothing_orbax_writes_is_a_pickle(tmp_path):
    with Checkpoints(tmp_path, backend="orbax") as checkpoints:
        checkpoints.save(1, state(1))
    assert not [path for path in files_of(checkpoints, 1) if path.read_bytes()[:1] == b"\x80"]
    assert intact(checkpoints)


@pytest.mark.parametrize("run", ["safetensors"], indirect=True)
def test_a_checkpoint_of_a_newer_version_says_so(run, monkeypatch):
    monkeypatch.setattr("vernal.saving._checkpoints_folder._VERSION", 2)
    with run:
        run.save(3, state(3))
    monkeypatch.undo()
    with pytest.raises(ValueError, match="was written by a newer version of Vernal"):
        run.restore(LIKE)
    assert intact(run)


# --- folders that refuse


@both
def test_a_full_disk_is_an_error_and_leaves_the_old_checkpoints(run):
    """The system refuses to write files of more than some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # One array: where Orbax fails while others are on their way, asyncio may complain about those later.
    big = {"w": np.random.default_rng(0).random(100_000)}
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        run.save(3, big)
        with pytest.raises(
            OSError, match=r"the checkpoint could not be saved(.|\n)*File too large"
        ):
            run.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert run.steps == [1, 2] and intact(run, 1) and intact(run, 2)
    assert sorted(os.listdir(run.folder)) == [".lock", "step-00000001", "step-00000002"]
    with run:
        run.save(3, big)
    assert run.steps == [1, 2, 3]


@pytest.mark.parametrize("run", ["safetensors"], indirect=True)
@pytest.mark.parametrize(
    "place", ["os.open", "os.mkdir", "os.fsync", "os.rename", "vernal.saving._file.serialize_file"]
)
def test_whatever_the_system_refuses_leaves_the_old_checkpoints(run, monkeypatch, place):
    """A read-only folder is one where all of these fail, but root may write there."""

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as broken:
        broken.setattr(place, refuse)
        with pytest.raises(OSError, match=r"could not be saved(.|\n)*Read-only file system"):
            run.save(3, state(3))
            run.wait()
    assert sorted(os.listdir(run.folder)) == [".lock", "step-00000001", "step-00000002"]
    with run:
        run.save(3, state(3))
    assert run.steps == [1, 2, 3] and intact(run, 1) and intact(run, 3)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    checkpoints = Checkpoints(tmp_path / "file" / "run", backend="safetensors")
    with pytest.raises(OSError, match=r"could not be saved(.|\n)*Not a directory"):
        checkpoints.save(1, state(1))


@pytest.mark.parametrize("run", ["safetensors"], indirect=True)
def test_an_old_checkpoint_that_cannot_be_removed_is_an_error_after_the_new_one_is_there(
    run, monkeypatch
):
    def refuse(path):
        raise PermissionError(f"not yours: {path}")

    monkeypatch.setattr("vernal.saving._checkpoints.remove", refuse)
    again = Checkpoints(run.folder, keep=1, backend="safetensors")
    again.save(3, state(3))
    with pytest.raises(OSError, match="an old checkpoint could not be removed(.|\n)*not yours"):
        again.wait()
    assert again.steps == [1, 2, 3] and intact(run, 3)


@pytest.mark.parametrize("run", ["safetensors"], indirect=True)
def test_files_of_others_stay_and_do_not_disturb(run):
    folder = pathlib.Path(run.folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "step-7").mkdir()
    (folder / "step-00000005").mkdir()
    (folder / "step-00000006").write_text("a file")
    assert run.steps == [1, 2]
    for step in (5, 6):
        with pytest.raises(
            ValueError, match=r"something exists under the name(.|\n)*not a checkpoint of Vernal"
        ):
            run.save(step, state(step))
    with Checkpoints(folder, keep=1, backend="safetensors") as again:
        again.save(9, state(9))
    assert again.steps == [9]
    others = ["notes.txt", "step-00000005", "step-00000006", "step-7"]
    assert sorted(os.listdir(folder)) == [
        ".lock",
        others[0],
        *others[1:3],
        "step-00000009",
        others[3],
    ]


@pytest.mark.parametrize("run", ["safetensors"], indirect=True)
def test_leftovers_are_removed_at_the_next_save_but_never_of_one_who_saves(run):
    left = pathlib.Path(run.folder, ".unfinished-0123")
    left.mkdir()
    (left / "checkpoint.json").write_text("{}")
    assert run.steps == [1, 2] and intact(run, 2)
    turn = take_turn(run.folder)
    assert not left.exists()
    left.mkdir()
    other = threading.Thread(target=lambda: end_turn(take_turn(run.folder)))
    other.start()
    other.join(timeout=0.3)
    assert other.is_alive() and left.exists()
    end_turn(turn)
    other.join(timeout=60)
    assert not other.is_alive() and not left.exists()


# --- programs that are killed


def environment():
    source = str(pathlib.Path(__file__).parents[2] / "src")
    return {**os.environ, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}


# One process imports everything, and starts a fresh saver for every line that it reads: the import is most of what
# a saver costs. It has no threads itself, so that it may be forked.
SAVERS = """
import os, sys, warnings
import numpy as np
from vernal.saving import Checkpoints
folder, backend = sys.argv[1:]
if backend == "orbax":
    import orbax.checkpoint
warnings.filterwarnings("ignore", "os.fork")

def save_for_ever():
    checkpoints = Checkpoints(folder, keep=2, best="loss", backend=backend)
    latest = checkpoints.latest
    step = 0 if latest is None else latest
    while True:
        step += 1
        tree = {f"w{i}": np.full((40, 50 + i), float(step)) for i in range(4)}
        checkpoints.save(step, {**tree, "n": step}, metadata={"step": step, "loss": (7 * step) % 11})
        # It has waited for the one before.
        os.write(1, b"%d\\n" % (step - 1))

for _ in sys.stdin:
    pid = os.fork()
    if not pid:
        save_for_ever()
    os.write(1, b"started %d\\n" % pid)
    os.waitpid(pid, 0)
    os.write(1, b"dead\\n")
"""


def kill_savers(folder, backend, times, longest):
    """Kills savers at random moments, and looks at what they leave each time.

    Returns:
        The number of times that something unfinished was left, and the latest step.
    """
    random.seed(0)
    like = {**{f"w{i}": np.zeros((40, 50 + i)) for i in range(4)}, "n": 0}
    checkpoints = Checkpoints(folder)
    unfinished, promised = 0, 0
    command = [sys.executable, "-c", SAVERS, str(folder), backend]
    with subprocess.Popen(
        command, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as savers:
        assert savers.stdin is not None and savers.stdout is not None
        for kill in range(times):
            before, lines = names_in(folder), []
            savers.stdin.write("go\n")
            savers.stdin.flush()
            while not lines or not lines[-1].startswith("started"):
                lines.append(savers.stdout.readline())
            pid = int(lines[-1].split()[1])
            # From when its first save begins to within its third: before that there is nothing to interrupt.
            for _ in range(random.randrange(4)):
                lines.append(savers.stdout.readline())
            while names_in(folder) == before:
                time.sleep(0.0005)
            time.sleep(random.uniform(0, longest))
            os.kill(pid, signal.SIGKILL)
            while lines[-1] != "dead\n":
                lines.append(savers.stdout.readline())
            promised = max([promised, *(int(line) for line in lines if line[0].isdigit())])
            unfinished += any(name.startswith(".unfinished") for name in names_in(folder))
            if checkpoints.latest is None:
                assert promised == 0
                continue
            assert checkpoints.latest >= promised
            for step in checkpoints.steps if kill % 10 == 0 else [checkpoints.latest]:
                found = checkpoints.restore(like, step)
                assert checkpoints.metadata(step)["step"] == found["n"] == step
                assert all((found[f"w{i}"] == step).all() for i in range(4))
        savers.stdin.close()
        assert savers.wait(60) == 0
    return unfinished, checkpoints.latest


def names_in(folder):
    return set(os.listdir(folder)) if os.path.isdir(folder) else set()


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize(("backend", "longest"), [("safetensors", 0.02), ("orbax", 0.1)])
def test_of_a_saver_killed_at_200_random_moments_every_checkpoint_is_whole(
    tmp_path, backend, longest
):
    unfinished, latest = kill_savers(tmp_path / "run", backend, 200, longest)
    # The moments were such that something was under way, and that something got done.
    assert unfinished > 50 and latest > 100
