"""The rooms of the package as attributes of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vernal

LATER = ["compat", "debug", "estimators", "linalg", "nn", "saving", "sharding", "testing"]
ROOMS = sorted(
    init.parent.name
    for init in Path(vernal.__file__).parent.glob("*/__init__.py")
    if not init.parent.name.startswith("_")
)


def in_a_new_process(code):
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys, vernal\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def test_some_rooms_are_imported_when_they_are_looked_at():
    code = """
listed = dir(vernal)
early = [name for name in [*{later}, "jax.extend"] if name in sys.modules or f"vernal.{{name}}" in sys.modules]
names = [getattr(vernal, name).__name__ for name in {rooms}]
same = [getattr(vernal, name) is sys.modules[f"vernal.{{name}}"] for name in {rooms}]
print(json.dumps([early, sorted(set({rooms}) - set(listed)), names, all(same)]))
"""
    found = in_a_new_process(code.format(later=LATER, rooms=ROOMS))
    assert found == [[], [], [f"vernal.{name}" for name in ROOMS], True]


def test_names_of_a_later_room_are_those_of_the_room():
    code = """
listed = dir(vernal)
names = ["load", "save", "tree_serialise_leaves", "default_deserialise_filter_spec"]
got = [getattr(vernal, name) for name in names]
print(json.dumps([set(names) <= set(listed), got == [getattr(vernal.saving, name) for name in names]]))
"""
    assert in_a_new_process(code) == [True, True]


def test_all_names_are_imported_by_a_star():
    found = in_a_new_process("""
from vernal import *
print(json.dumps([hasattr(nn, "Linear"), save is vernal.saving.save, Module is vernal.Module, "filter_jit" in dir()]))
""")
    assert found == [True, True, True, True]


def test_rooms_and_names_are_listed_once():
    assert set(LATER) < set(ROOMS) < set(dir(vernal))
    assert "Module" in dir(vernal)
    assert sorted(set(dir(vernal))) == dir(vernal)


def test_a_wrong_name_is_an_ordinary_attribute_error():
    with pytest.raises(
        AttributeError, match=r"module 'vernal' has no attribute 'shardings'"
    ) as info:
        vernal.shardings  # noqa: B018 (looking is what fails)
    assert (info.value.name, info.value.obj) == ("shardings", vernal)
    assert not hasattr(vernal, "sharding_")
    with pytest.raises(ImportError, match="cannot import name 'shardings'"):
        from vernal import shardings  # noqa: F401 (importing is what fails)


@pytest.mark.parametrize("name", ["jit", "grad", "cond", "closure_convert"])
def test_names_of_jax_lead_to_the_filtered_ones(name):
    with pytest.raises(
        AttributeError, match=f"no attribute '{name}': write `vernal.filter_{name}`"
    ):
        getattr(vernal, name)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("vernal.nn.initialize", "initialise"),
        ("vernal.Optimiser", "Optimizer"),
        ("vernal.tree_serialize_leaves", "tree_serialise_leaves"),
        ("vernal.nn.Parametrized", "Parametrised"),
    ],
)
@pytest.mark.sample(3)
def test_the_other_spelling_is_answered_with_ours(written, meant):
    done = subprocess.run(
        [sys.executable, "-c", f"import vernal.nn; {written}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(f"Did you mean: '{meant}'?")


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("static_field", r"write vernal\.field\(static=True\)"),
        ("internal", "python -m vernal.compat"),
        ("EquinoxRuntimeError", "write vernal.runtime.RuntimeCheckError"),
        ("vmap", "write `vernal.filter_vmap`"),
    ],
)
def test_names_of_equinox_and_jax_say_what_is_written_here(name, instead):
    with pytest.raises(AttributeError, match=instead):
        getattr(vernal, name)
