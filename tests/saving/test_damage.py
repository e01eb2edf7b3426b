"""Files that are damaged, and programs that die while writing."""

import os
import pathlib
import stat
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from vernal import tree_equal
from vernal.saving import (
    Checkpoints,
    load,
    load_metadata,
    save,
    tree_deserialise_leaves,
    tree_serialise_leaves,
)

TREE = {
    "w": jnp.arange(6.0).reshape(2, 3),
    "key": jax.random.key(0),
    "b": jnp.ones(3, jnp.bfloat16),
    "c": np.ones(2, complex),
    "none": jnp.zeros((0, 2)),
    "n": 3,
}
DAMAGED = "the file is damaged, or not a safetensors file"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, TREE, metadata={"lr": 0.1})
    return path


def test_a_file_that_was_cut_off_is_refused(path):
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=DAMAGED):
            load(path, like=TREE)
    for size in (0, 7, 8, 100):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=DAMAGED):
            load_metadata(path)


@pytest.mark.parametrize(
    ("write", "told"),
    [
        (lambda file: tree_serialise_leaves(file, TREE["w"]), "tree_deserialise_leaves"),
        (lambda file: np.save(file, TREE["c"]), "tree_deserialise_leaves"),
        (lambda file: np.savez(file, TREE["c"]), "numpy.load"),
    ],
)
def test_a_file_of_another_format_is_told_by_its_beginning(path, write, told):
    with open(path, "wb") as file:
        write(file)
    for read in (lambda: load(path, like=TREE), lambda: load_metadata(path)):
        with pytest.raises(ValueError, match=f"(?s)the file has another format.*{told}"):
            read()


def test_a_file_with_something_behind_it_is_refused(path):
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match=DAMAGED):
        load(path, like=TREE)


def test_every_flipped_bit_is_noticed(path):
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in {place % 8, (3 * place + 1) % 8, 5}:
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            for strict in (True, False):
                with pytest.raises(ValueError, match=DAMAGED):
                    load(path, like=TREE, strict=strict)


def test_flipped_data_and_a_flipped_header_are_told_apart(path):
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="the data of '.*' do not match their checksum"):
        load(path, like=TREE)
    assert load_metadata(path) == {"lr": 0.1}
    whole = bytes(whole).replace(b'\\"lr\\"', b'\\"lx\\"')
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="the header does not match its checksum"):
        load_metadata(path)


def test_a_text_file_is_no_safetensors_file(path):
    path.write_text("hello, this is not what you are looking for")
    with pytest.raises(ValueError, match=DAMAGED):
        load(path, like=TREE)


def test_a_file_that_does_not_exist_is_an_ordinary_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="No such file"):
        load(tmp_path / "nothing", like=TREE)


# --- crashes


def write_half(specs, path, texts):
    pathlib.Path(path).write_bytes(b"half of a file")
    raise KeyboardInterrupt("stop")


def fill_disk(specs, path, texts):
    raise safetensors.SafetensorError("no space left on device")


def refuse(*_):
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    ("place", "crash"),
    [
        ("vernal.saving._file.serialize_file", write_half),
        ("vernal.saving._file.serialize_file", fill_disk),
        ("os.fsync", refuse),
        ("os.chmod", refuse),
        ("os.replace", refuse),
    ],
)
@pytest.mark.parametrize("old", [True, False])
def test_a_crash_while_writing_leaves_the_old_file_and_no_other(
    path, monkeypatch, place, crash, old
):
    before = path.read_bytes()
    if not old:
        path.unlink()
    with monkeypatch.context() as broken:
        broken.setattr(place, crash)
        with pytest.raises((OSError, KeyboardInterrupt), match="no space left|stop"):
            save(path, {"w": jnp.zeros(3)})
    assert os.listdir(path.parent) == [path.name] * old
    assert not old or path.read_bytes() == before


def test_a_full_disk_is_an_error_of_the_system(path, monkeypatch):
    monkeypatch.setattr("vernal.saving._file.serialize_file", fill_disk)
    with pytest.raises(OSError, match=r"the file could not be written(.|\n)*no space left"):
        save(path, [1.0])


def test_a_crash_in_the_stream_format_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "model.eqx"
    tree_serialise_leaves(path, [1.0])
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match=r"a leaf could not be written\n  where: pytree\[1\]"):
        tree_serialise_leaves(path, [2.0, np.array([None])])
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["model.eqx"]


KILLED = """
import os, sys
import numpy as np
import vernal.saving._file as file
from vernal.saving import save
write = file.serialize_file
def die(specs, path, texts):
    write(specs, path, texts)
    os._exit(9)
file.serialize_file = die
save(sys.argv[1], {"w": np.zeros(3)})
"""


@pytest.mark.slow
def test_a_killed_program_leaves_the_old_file(path):
    before = path.read_bytes()
    source = str(pathlib.Path(__file__).parents[2] / "src")
    env = {**os.environ, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=env, timeout=120)
    assert done.returncode == 9
    assert path.read_bytes() == before
    load(path, like=TREE)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match="cannot be written, because its folder does not exist"
    ):
        save(tmp_path / "runs" / "model", [1.0])
    with pytest.raises(FileNotFoundError, match="its folder does not exist"):
        tree_serialise_leaves(tmp_path / "runs" / "model", [1.0])


@pytest.mark.parametrize("name", ["n" * 255, "ü" * 127])
def test_the_longest_names_of_files_are_fine(tmp_path, name):
    save(tmp_path / name, [1.0])
    assert load(tmp_path / name, like=[0.0]) == [1.0]
    assert os.listdir(tmp_path) == [name]


def test_a_file_name_that_is_too_long_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.replace", None)
    with pytest.raises(OSError, match=r"File name too long: .*n'$"):
        save(tmp_path / ("n" * 256), [1.0])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("backend", ["safetensors", "orbax"])
def test_long_names_of_leaves_are_fine(tmp_path, backend):
    tree = {"k" * 10_000: jnp.ones(2), "deep": {"c" * 300: {"d" * 300: jnp.zeros(3)}}}
    checkpoints = Checkpoints(tmp_path / "run", backend=backend)
    checkpoints.save(1, tree)
    assert tree_equal(checkpoints.restore(tree), tree)
    save(tmp_path / "file", tree)
    assert tree_equal(load(tmp_path / "file", tree), tree)


def test_a_relative_path_is_fine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("model", [1.0])
    tree_serialise_leaves("model", [2.0])
    assert sorted(os.listdir()) == ["model", "model.eqx"]
    assert load("model", like=[0.0]) == [1.0]
    assert tree_deserialise_leaves("model", like=[0.0]) == [2.0]


def test_links_and_permissions_stay(tmp_path):
    (tmp_path / "target").touch(mode=0o640)
    (tmp_path / "target").chmod(0o640)
    (tmp_path / "link").symlink_to("target")
    save(tmp_path / "link", [1.0])
    assert (tmp_path / "link").is_symlink() and load(tmp_path / "target", like=[0.0]) == [1.0]
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o640
    (tmp_path / "plain").touch()
    save(tmp_path / "new", [1.0])
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_writing_waits_for_the_disk_before_renaming(path, monkeypatch):
    events = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr("os.fsync", lambda fd: (events.append("sync"), sync(fd))[1])
    monkeypatch.setattr("os.replace", lambda a, b: (events.append("rename"), replace(a, b))[1])
    save(path, [1.0])
    assert events == ["sync", "rename", "sync"]
