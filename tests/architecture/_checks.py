"""The rules of the house as functions over a source tree.

Each check takes the folder of a package (`src/vernal`) and returns its violations as lines of text, `file:line: what`,
so that it can be run on the package and, in the same way, on small trees that break the rule on purpose.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The front desk (the package's own `__init__`) stands above all rooms: it imports any, and none imports it.
FRONT_DESK = ""
FLOORS: dict[str, int] = {
    room: floor
    for floor, rooms in enumerate(
        [
            ["_ground"],
            ["show"],
            ["trees"],
            ["modules"],
            ["transforms"],
            ["primitives"],
            ["harvest"],
            ["runtime"],
            ["loops"],
            ["linalg"],
            ["nn", "optim", "estimators", "sharding", "saving"],
            ["debug", "testing"],
            ["compat", "_launch"],
            [FRONT_DESK],
            # The command line, and what it runs in the processes that it starts.
            ["__main__", "_startup"],
        ]
    )
    for room in rooms
}

# Optional or heavy packages, which a function may import at the moment of use.
LATE_IMPORTS = frozenset(
    {
        "rich",
        "matplotlib",
        "torch",
        "orbax",
        "treescope",
        "safetensors",
        "optax",
        "tqdm",
        "flatbuffers",
    }
)

PRIVATE_JAX = re.compile(r"jax\.(_src|interpreters|extend)(\.|$)")
DOOR = ("_ground", "_jax_private.py")
RETIREMENT = re.compile(r"#.*\bJAX \d+\.\d+")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


class Import(NamedTuple):
    """One imported name: `module` is absolute, `name` is None for `import module`."""

    line: int
    module: str
    name: str | None
    inside_function: bool


def source_files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


@functools.cache
def parse(path: Path) -> ast.Module:
    """The tree of a file, for reading only: every check asks for the same ones."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(root: Path, path: Path) -> str:
    parts = [root.name, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(root: Path, path: Path) -> list[Import]:
    """Every import of a file, also those in functions and by `importlib.import_module("...")`."""
    package = module_name(root, path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found: list[Import] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(node.lineno, alias.name, None, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            found.extend(Import(node.lineno, module, alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node.func) and node.args:
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                found.append(Import(node.lineno, target.value, None, inside))
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside or function)

    visit(parse(path), False)
    return found


def _is_dynamic_import(func: ast.expr) -> bool:
    return (isinstance(func, ast.Attribute) and func.attr == "import_module") or (
        isinstance(func, ast.Name) and func.id in ("import_module", "__import__")
    )


def _target_of(root: Path, imported: Import) -> str | None:
    """The module of the package that an import reads, or None if it is of another package."""
    if imported.module.split(".")[0] != root.name:
        return None
    parts = imported.module.split(".")[1:]
    if imported.name is not None:
        inside = root.joinpath(*parts, imported.name)
        if inside.with_suffix(".py").exists() or inside.is_dir():
            parts = [*parts, imported.name]
    return ".".join([root.name, *parts])


def room_of(root: Path, module: str) -> str:
    """The room a module lies in; the front desk is the room with the empty name."""
    return (module.split(".") + [FRONT_DESK])[1]


def check_floors(root: Path) -> list[str]:
    """Imports go to lower floors, through the other room's `__init__`, and never late to dodge a cycle."""
    problems: list[str] = []
    for path in source_files(root):
        here = room_of(root, module_name(root, path))
        if here not in FLOORS:
            problems.append(f"{_at(root, path, 1)}: the room {here!r} is on no floor")
            continue
        for imported in imports_of(root, path):
            place = _at(root, path, imported.line)
            target = _target_of(root, imported)
            if imported.inside_function and imported.module.split(".")[0] not in LATE_IMPORTS:
                problems.append(f"{place}: {imported.module} is imported inside a function")
            if target is not None and room_of(root, target) != here:
                problems += [f"{place}: {what}" for what in _crossing(here, target, imported.name)]
    return problems


def _crossing(here: str, target: str, name: str | None) -> Iterator[str]:
    """What is wrong with room `here` importing `name` from the module `target` of another room."""
    there = room_of(Path(), target)
    if there not in FLOORS:
        yield f"the room {there!r} is on no floor"
    elif there == FRONT_DESK and here != "__main__":
        yield "a room imports the front desk"
    elif FLOORS[there] == FLOORS[here]:
        yield f"{here} and {there} are on the same floor and must not know each other"
    elif FLOORS[there] > FLOORS[here]:
        yield f"{here} imports upwards, from {there}"
    if target.count(".") > 1:
        yield f"{here} reaches past the __init__ of {there}, into {target}"
    elif name is not None and name.startswith("_") and name not in FLOORS:
        yield f"{here} imports the private name {name} of {there}"


def check_cycles(root: Path) -> list[str]:
    """No two files need each other, directly or through others."""
    modules = {module_name(root, path): path for path in source_files(root)}
    edges = {
        name: sorted(
            {
                target
                for imported in imports_of(root, path)
                if (target := _target_of(root, imported)) in modules and target != name
            }
        )
        for name, path in modules.items()
    }
    done: set[str] = set()
    problems: list[str] = []

    def walk(name: str, trail: list[str]) -> None:
        if name in trail:
            cycle = [*trail[trail.index(name) :], name]
            problems.append(f"{_at(root, modules[name], 1)}: import cycle " + " -> ".join(cycle))
        elif name not in done:
            for target in edges[name]:
                walk(target, [*trail, name])
            done.add(name)

    for name in modules:
        walk(name, [])
    return problems


def check_private_jax(root: Path) -> list[str]:
    """Private JAX is named only in the door, and there beside the JAX version that retires it."""
    problems: list[str] = []
    for path in source_files(root):
        is_door = path.relative_to(root).parts == DOOR
        lines = path.read_text(encoding="utf-8").splitlines()
        for line, what in _private_jax_uses(parse(path)):
            if not is_door:
                problems.append(f"{_at(root, path, line)}: {what} is private JAX")
            elif not _has_retirement(lines, line):
                problems.append(
                    f"{_at(root, path, line)}: {what} has no comment '... JAX <version>'"
                )
    return problems


def _private_jax_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if PRIVATE_JAX.match(alias.name):
                    yield alias.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if PRIVATE_JAX.match(full):
                    yield alias.lineno, full
        elif isinstance(node, ast.Attribute) and PRIVATE_JAX.fullmatch(dotted := ast.unparse(node)):
            yield node.lineno, dotted


def _has_retirement(lines: list[str], line: int) -> bool:
    """The comment stands on the line itself or in the block of comments directly above it."""
    if RETIREMENT.search(lines[line - 1]):
        return True
    above = line - 2
    while above >= 0 and lines[above].lstrip().startswith("#"):
        if RETIREMENT.search(lines[above]):
            return True
        above -= 1
    return False


def check_sizes(root: Path) -> list[str]:
    """Files and functions that a reader can hold in mind, and files that say what they are for.

    A longer function has its reason in a comment `# Long: ...` directly above it.
    """
    problems: list[str] = []
    for path in source_files(root):
        lines = path.read_text(encoding="utf-8").splitlines()
        tree = parse(path)
        if not ast.get_docstring(tree):
            problems.append(f"{_at(root, path, 1)}: the file does not open with a docstring")
        if len(lines) > MAX_FILE_LINES:
            problems.append(f"{_at(root, path, 1)}: {len(lines)} lines (at most {MAX_FILE_LINES})")
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            top = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            excused = top >= 2 and lines[top - 2].lstrip().startswith("# Long: ")
            if (length := _length(node)) > MAX_FUNCTION_LINES and not excused:
                what = f"{node.name} has {length} lines (at most {MAX_FUNCTION_LINES})"
                problems.append(f"{_at(root, path, node.lineno)}: {what}")
    return problems


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    docstring = 0
    if ast.get_docstring(node) is not None:
        docstring = (first.end_lineno or first.lineno) - first.lineno + 1
    return (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


# Written in pieces, so that this file does not contain what it forbids.
FORBIDDEN_TEXT = {
    "an unfinished spot": re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b"),
    "a path of somebody's machine": re.compile(r"(?<![\w.\-])/(root|home|work|tmp|Users)" r"/\w"),
    "the address of a package registry": re.compile(
        r"(pypi\.o" r"rg|pythonhosted\.o" r"rg|--(extra-)?index-u" r"rl|conda\.ana" r"conda)"
    ),
}


def check_text(files: list[Path], root: Path) -> list[str]:
    """Text that must not be in the project, whatever the file."""
    return [
        f"{_at(root, path, number)}: {what}: {line.strip()[:80]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for what, pattern in FORBIDDEN_TEXT.items()
        if pattern.search(line)
    ]


def check_constraints(files: list[Path], root: Path) -> list[str]:
    """Constraints are plain `name==version` lines."""
    return [
        f"{_at(root, path, number)}: not 'name==version': {line}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!_]+", line)
    ]


def _at(root: Path, path: Path, line: int) -> str:
    return f"{path.relative_to(root.parent)}:{line}"


def listing(problems: list[str]) -> str:
    """The message of a failed check: one violation a line."""
    return f"{len(problems)} violation(s):\n  " + "\n  ".join(problems)
