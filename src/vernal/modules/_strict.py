"""Enforces "abstract or final".

A class is either abstract, and meant to be subclassed, or final, and meant to be instantiated. So
the code that runs for `model.method` is found in one class, without following overridden methods.
"""

import types
from typing import Any

from . import _refusals as refuse
from ._methods import Method

_METHODS = (Method, types.FunctionType, property, classmethod, staticmethod)


def is_abstract(cls: Any) -> bool:
    """Whether a module class cannot be instantiated."""
    return bool(
        cls._vernal_is_abstract
        or cls.__abstractmethods__
        or cls.__abstractvars__
        or cls.__abstractclassvars__
    )


def check_strict(cls: Any, strict: bool | None) -> None:
    """Applies the rule to a new class, if it or one of its bases asks for it."""
    bases = [b for b in cls.__mro__[1:] if "_vernal_strict" in b.__dict__]
    strict_bases = [b for b in bases if b._vernal_strict]
    if strict is False and strict_bases:
        raise refuse.strict(
            cls,
            f"a subclass of the strict `{strict_bases[0].__qualname__}` cannot switch strictness off",
            "strict=True, or the option left out",
            "derive from a class that is not strict",
        )
    cls._vernal_strict = bool(strict) or bool(strict_bases)
    if not cls._vernal_strict:
        return
    for base in bases:
        if base.__dict__.get("_vernal_root", False):
            continue
        if not is_abstract(base):
            raise refuse.strict(
                cls,
                f"`{base.__qualname__}` is final, because it can be instantiated",
                "bases that are abstract",
                f"move what both share into an abstract base, or hold a `{base.__qualname__}` in a field",
            )
    for name, value in cls.__dict__.items():
        if not isinstance(value, _METHODS) or name.startswith("_vernal"):
            continue
        if name in cls.__dict__.get("__annotations__", {}):
            # A field's default.
            continue
        _check_override(cls, name, bases)


# Generated for every class.
_GENERATED = frozenset({"__replace__", "__init_subclass__"})


def _check_override(cls: Any, name: str, bases: list[Any]) -> None:
    if name in _GENERATED:
        return
    if name == "__init__" and cls.__dict__.get("_vernal_generated_init", False):
        return
    for base in bases:
        if base.__dict__.get("_vernal_root", False) or name not in base.__dict__:
            continue
        theirs = base.__dict__[name]
        if name == "__init__" and base.__dict__.get("_vernal_generated_init", False):
            continue
        if name == "__check_init__" or getattr(theirs, "__isabstractmethod__", False):
            continue
        raise refuse.strict(
            cls,
            f"`{name}` is already implemented by `{base.__qualname__}`",
            "each method to be implemented only once",
            f"make `{base.__qualname__}.{name}` abstract, or give the new method another name",
        )
