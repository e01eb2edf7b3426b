"""Every public name has a place in a guide: it is written there, in code.

A room imports what other rooms alone need of it without `as` in its `__init__`: those names are not public.
"""

import ast
import re
from pathlib import Path

from tests.architecture._checks import parse
from tests.architecture._names import public_objects

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vernal"
# Pages that list names, and say nothing of how to use them.
LISTS = ("benchmarks.md", "from-equinox.md")

_CODE = re.compile(r"^ *```.*?^ *```|`[^`]+`", re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(r"from (?:vernal\.)?(\w+) import ([\w, ]+)")


def guides():
    """The text of all guides."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    return "\n".join(page.read_text(encoding="utf-8") for page in pages if page.name not in LISTS)


def written(text):
    """The names in the code of a text: `room.name` and, where it is no everyday word, `name`."""
    found = set()
    for code in _CODE.findall(text):
        for dotted in re.findall(r"\w+(?:\.\w+)*", code):
            parts = dotted.split(".")
            found |= {part for part in parts if part != part.lower() or "_" in part or part == "ω"}
            found |= {".".join(pair) for pair in zip(parts, parts[1:], strict=False)}
        for room, names in _IMPORT.findall(code):
            found |= {f"{room}.{name.strip()}" for name in names.split(",")}
    return found


def homes(objects):
    """The rooms of each public name; what two rooms offer is one name."""
    rooms = {}
    for room, name, value in objects:
        rooms.setdefault((name, id(value)), []).append(room.rpartition(".")[2])
    return [(name, places) for (name, _), places in rooms.items()]


def without_place(objects, text):
    """The public names that a text does not have, as `room.name`."""
    code = written(text)
    return sorted(
        f"{places[-1]}.{name}"
        for name, places in homes(objects)
        if name not in code and not any(f"{place}.{name}" in code for place in places)
    )


def borrowed():
    """What the files of one room take from another, as `room.name`."""
    found = set()
    for file in SOURCE.glob("*/**/*.py"):
        depth = len(file.relative_to(SOURCE).parts)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == depth and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.add(f"{node.value.id}.{node.attr}")
    return found


def between_rooms():
    """What the rooms' `__init__` import without `as`, as `room.name`."""
    return {
        f"{init.parent.name}.{alias.name}"
        for init in SOURCE.glob("[a-z]*/__init__.py")
        for node in parse(init).body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
        if alias.asname is None
    }


def test_every_public_name_has_a_place_in_a_guide():
    assert without_place(public_objects(SOURCE), guides()) == []


def test_names_between_rooms_are_used_by_another_room():
    assert sorted(between_rooms() - borrowed()) == []


def test_a_name_is_found_in_code_only():
    f, scan = object(), object()
    objects = [
        ("vernal", "tree_at", f),
        ("vernal.trees", "tree_at", f),
        ("vernal.loops", "scan", scan),
    ]
    assert without_place(objects, "tree_at and loops.scan, in words") == [
        "loops.scan",
        "trees.tree_at",
    ]
    assert without_place(objects, "`tree_at`, and a `scan`") == ["loops.scan"]
    assert (
        without_place(
            objects, "`eqx.tree_at`\n```python\nfrom vernal.loops import map, scan\n```\n"
        )
        == []
    )
