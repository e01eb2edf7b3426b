"""Floors: imports go down, through the `__init__` of the other room, and never in a circle."""

from pathlib import Path

import pytest

from tests.architecture._checks import check_cycles, check_floors, listing

SOURCE = Path(__file__).parents[2] / "src" / "vernal"


def test_imports_of_the_package_go_down_only():
    problems = check_floors(SOURCE)
    assert not problems, listing(problems)


def test_no_files_of_the_package_import_each_other_in_a_circle():
    problems = check_cycles(SOURCE)
    assert not problems, listing(problems)


HOUSE = {
    "__init__.py": "from .trees import split as split\n",
    "_ground/__init__.py": "from ._a import f as f\n",
    "_ground/_a.py": "import jax\ndef f(): pass\n",
    "trees/__init__.py": "from ._split import split as split\n",
    "trees/_split.py": "from .._ground import f\nfrom ._walk import walk\ndef split(): pass\n",
    "trees/_walk.py": "def walk(): pass\n",
    "nn/__init__.py": "",
    "optim/__init__.py": "",
    "saving/__init__.py": "",
    "saving/_file.py": "def save():\n    import safetensors.numpy\n",
    "__main__.py": "from . import split\nimport vernal\n",
}


def build(tmp_path: Path, **changes: str) -> Path:
    """A small correct house, with some files replaced; `trees/_walk.py` is given as `trees__walk`."""
    root = tmp_path / "vernal"
    names = {name.removesuffix(".py").replace("/", "_"): name for name in HOUSE}
    for name, text in {**HOUSE, **{names[key]: text for key, text in changes.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_correct_house_has_no_violations(tmp_path):
    root = build(tmp_path)
    assert check_floors(root) == []
    assert check_cycles(root) == []


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("_ground__a", "from ..trees import split\n", "_ground imports upwards, from trees"),
        ("_ground__a", "from .. import trees\n", "_ground imports upwards, from trees"),
        ("_ground__a", "import vernal.trees\n", "_ground imports upwards, from trees"),
        ("_ground__a", "from vernal.trees import split\n", "_ground imports upwards, from trees"),
        ("_ground__a", "if 0:\n    from ..trees import x\n", "_ground imports upwards, from trees"),
        ("nn___init__", "from ..optim import Adam\n", "nn and optim are on the same floor"),
        ("nn___init__", "from ..trees._split import split\n", "nn reaches past the __init__ of"),
        ("nn___init__", "from ..trees import _split\n", "nn reaches past the __init__ of trees"),
        (
            "nn___init__",
            "from ..trees import _help\n",
            "nn imports the private name _help of trees",
        ),
        ("nn___init__", "from .. import split\n", "a room imports the front desk"),
        ("nn___init__", "import vernal as eqx\n", "a room imports the front desk"),
        ("nn___init__", "from ..cellar import wine\n", "the room 'cellar' is on no floor"),
        ("nn___init__", "def f():\n    from ..trees import x\n", "vernal.trees is imported inside"),
        ("nn___init__", "def f():\n    import jax\n", "jax is imported inside a function"),
        ("nn___init__", "g = lambda: __import__('jax')\n", "jax is imported inside a function"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, text, problem):
    root = build(tmp_path, **{file: text})
    assert any(problem in found for found in check_floors(root)), check_floors(root)


def test_a_room_that_is_not_in_the_table_is_found(tmp_path):
    root = build(tmp_path)
    (root / "attic").mkdir()
    (root / "attic" / "__init__.py").write_text("")
    assert check_floors(root) == ["vernal/attic/__init__.py:1: the room 'attic' is on no floor"]


@pytest.mark.parametrize(
    "text",
    [
        "from ._split import split\n",
        "from vernal.trees import split\n",
        "def f():\n    from ._split import split\n",
    ],
)
def test_a_cycle_between_files_is_found(tmp_path, text):
    (found,) = check_cycles(build(tmp_path, trees__walk=text))
    assert "import cycle" in found
    assert "vernal.trees._walk" in found
