"""Every public name that a user may need has a place in a guide: it is written there, in code.

`BETWEEN_ROOMS` are the public names that only rooms need of each other; the reference has them.
"""

import ast
import re
from pathlib import Path

from tests.architecture._names import public_objects

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "vernal"
# Pages that list names, and say nothing of how to use them.
LISTS = ("benchmarks.md", "from-equinox.md")

BETWEEN_ROOMS = {
    f"{room}.{name}"
    for room, names in {
        "harvest": """
            captures checks sows
        """,
        "linalg": """
            Decomposition Elementwise Nodes as_operator carried carried_dense combined decompose
            derivative divided_differences positive_int real_number symmetric_operator to_tree
            tolerance whole_number
        """,
        "modules": """
            BoundMethod Flat buffer_leaves frozen_leaves hooked is_frozen is_partly_frozen
            lazily module_classes note_of_place remember_flat
        """,
        "primitives": """
            linear_call_p
        """,
        "show": """
            BRACKET FROZEN UnnamedKey diff_text field_key human_bytes human_count is_traced
            key_names listed name_in_brackets name_of_text quoted short shown_name spec_text
            table unquoted
        """,
        "transforms": """
            define Recipe Signature Transformed awaited axis_names batch_text call_inside call_with_jvp
            captured check check_callable check_hides_nothing check_p chosen
            entries_without explicit_mesh fail_if gathered guard_traces here keep_rules
            linear_by_transpose one_way place_of_equation placed_like poison program_of replaced
            signature_of_call split_over summed_like traces_of traits_of unmapped_gathered
            varying_alike varying_axes varying_over vprim_p watch_traces without_checks
        """,
        "trees": """
            Node Paths Rest by_name everything_in has_shape is_missing is_sealed node_parts
            open_up picked_nodes refuse_sealed replace_parts set_attributes split
        """,
    }.items()
    for name in names.split()
}

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
    for file in SOURCE.glob("*/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level == 2 and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found.add(f"{node.value.id}.{node.attr}")
    return found


def test_every_public_name_has_a_place_in_a_guide():
    missing = without_place(public_objects(SOURCE), guides())
    assert [name for name in missing if name not in BETWEEN_ROOMS] == []


def test_names_between_rooms_are_public_and_used_by_another_room():
    public = {f"{places[-1]}.{name}" for name, places in homes(public_objects(SOURCE))}
    assert sorted(BETWEEN_ROOMS - public) == []
    assert sorted(BETWEEN_ROOMS - borrowed()) == []


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
