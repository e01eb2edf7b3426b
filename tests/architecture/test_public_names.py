"""Every public object has one path, one room and a docstring."""

import types
from pathlib import Path

from tests.architecture._checks import listing
from tests.architecture._names import (
    check_docstrings,
    check_paths,
    exported_names,
    public_objects,
)

SOURCE = Path(__file__).parents[2] / "src" / "vernal"


def test_every_public_object_is_where_its_module_says():
    problems = check_paths(list(public_objects(SOURCE)), "vernal")
    assert not problems, listing(problems)


def test_every_public_object_is_documented():
    problems = check_docstrings(list(public_objects(SOURCE)))
    assert not problems, listing(problems)


def test_only_explicit_exports_count(tmp_path):
    init = tmp_path / "__init__.py"
    init.write_text(
        "import jax\nfrom .._ground import publish\nfrom ._a import f as f, g, h as _h\nx = _y = 1\n"
    )
    assert exported_names(init) == ["f", "x"]


def room(monkeypatch, name: str, **values) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(values)
    monkeypatch.setitem(__import__("sys").modules, name, module)
    return module


def function(module: str, name: str = "f"):
    def f(x):
        """Does.

        Args:
            x: a thing.
        """

    f.__module__, f.__name__ = module, name
    return f


def test_an_object_in_its_room_and_at_the_front_desk_is_right(monkeypatch):
    f = function("house.trees")
    room(monkeypatch, "house.trees", f=f)
    assert check_paths([("house", "f", f), ("house.trees", "f", f)], "house") == []
    assert check_docstrings([("house.trees", "f", f)]) == []


def test_a_private_foreign_or_wrong_path_is_found(monkeypatch):
    room(monkeypatch, "house.trees")
    for module, problem in [
        ("house.trees._split", "no public room"),
        ("elsewhere", "no public room"),
        ("house.trees", "does not offer"),
    ]:
        (found,) = check_paths([("house.trees", "f", function(module))], "house")
        assert problem in found


def test_a_second_name_or_a_second_room_is_found(monkeypatch):
    f = function("house.trees")
    room(monkeypatch, "house.trees", f=f)
    assert "is called 'f'" in check_paths([("house.trees", "g", f)], "house")[0]
    assert (
        "several rooms" in check_paths([("house.trees", "f", f), ("house.nn", "f", f)], "house")[0]
    )


def test_missing_inherited_and_silent_docstrings_are_found():
    class Parent:
        """Documented."""

    class Child(Parent):
        pass

    class Forwarding:
        @property
        def __doc__(self):
            """Documented, although instances forward theirs."""

    def silent(x):
        """Does."""

    def nothing():
        """Takes nothing."""

    objects = [Child, silent, nothing, Forwarding]
    found = check_docstrings([("r", x.__name__, x) for x in objects])
    assert found == ["r.Child: no docstring", "r.silent: no 'Args:' for x"]
