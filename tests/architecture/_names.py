"""Which names the package offers, and what every one of them owes: one path, one room, a docstring."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.architecture._checks import module_name, parse

_ARGUMENT_SECTIONS = ("Args:", "Arguments:", "Attributes:", "Fields:")


def exported_names(init: Path) -> list[str]:
    """The names that an `__init__` re-exports, `from ._x import y as y`, or defines."""
    names: list[str] = []
    body = parse(init).body
    # The front desk imports inside a `try`, and for type checkers what it imports when somebody looks.
    inner = [node for block in body if isinstance(block, ast.Try | ast.If) for node in block.body]
    for node in [*body, *inner]:
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def public_rooms(root: Path) -> list[Path]:
    """The `__init__` of every room that a user may import, the front desk first; `compat` only repeats names."""
    rooms = sorted(path for path in root.glob("*/__init__.py") if path.parent.name[0] != "_")
    return [root / "__init__.py", *(room for room in rooms if room.parent.name != "compat")]


def public_objects(root: Path) -> Iterator[tuple[str, str, Any]]:
    """(room, name, object) for everything that the rooms offer, sub-rooms themselves excepted."""
    for init in public_rooms(root):
        room = module_name(root, init)
        module = importlib.import_module(room)
        for name in exported_names(init):
            value = getattr(module, name)
            if not inspect.ismodule(value):
                yield room, name, value


def check_paths(objects: list[tuple[str, str, Any]], package: str) -> list[str]:
    """Each function and class is found where its `__module__` says, and in one room beside the front desk."""
    problems: list[str] = []
    rooms_of: dict[int, set[str]] = {}
    for room, name, value in objects:
        if not (inspect.isroutine(value) or inspect.isclass(value)):
            continue
        rooms_of.setdefault(id(value), set()).add(room)
        path = value.__module__
        if path.split(".")[0] != package or any(part[0] == "_" for part in path.split(".")):
            problems.append(f"{room}.{name}: its __module__ is {path!r}, which is no public room")
        elif getattr(importlib.import_module(path), value.__name__, None) is not value:
            problems.append(f"{room}.{name}: {path} does not offer {value.__name__!r}")
        if value.__name__ != name:
            problems.append(f"{room}.{name}: is called {value.__name__!r}")
    for room, name, value in objects:
        if len(rooms := rooms_of.get(id(value), set()) - {package}) > 1:
            problems.append(f"{room}.{name}: offered by several rooms: {sorted(rooms)}")
    return problems


def check_docstrings(objects: list[tuple[str, str, Any]]) -> list[str]:
    """Each function and class has its own docstring, with a section on its arguments if it takes any."""
    problems: list[str] = []
    for room, name, value in objects:
        if not (inspect.isroutine(value) or inspect.isclass(value)):
            continue
        doc = _own_docstring(value)
        if not doc:
            problems.append(f"{room}.{name}: no docstring")
        elif _arguments(value) and not any(section in doc for section in _ARGUMENT_SECTIONS):
            problems.append(f"{room}.{name}: no 'Args:' for {', '.join(_arguments(value))}")
    return problems


def _own_docstring(value: Any) -> str:
    """Not inherited, not the `Name(field: type)` that dataclasses write; a class's includes its `__init__`'s."""
    if not inspect.isclass(value):
        return value.__doc__ or ""
    doc = value.__dict__.get("__doc__") or ""
    if not isinstance(doc, str):
        # Instances have docstrings of their own: the descriptor that gives them also has the class's.
        doc = (doc.__doc__ if isinstance(doc, property) else value.__doc__) or ""
    if doc.startswith(f"{value.__name__}("):
        return ""
    init = value.__dict__.get("__init__")
    return doc and doc + "\n" + (getattr(init, "__doc__", None) or "")


def _arguments(value: Any) -> list[str]:
    """The named arguments a caller can give; exceptions take their message, which needs no words."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return []
    try:
        parameters = inspect.signature(value).parameters.values()
    except (ValueError, TypeError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.kind not in variadic]
