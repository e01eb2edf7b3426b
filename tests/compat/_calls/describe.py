"""What a call gives, as JSON: values, shapes, types, weak types, the classes of errors and of warnings."""

import builtins
import dataclasses
import inspect
import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

RELATIVE, ABSOLUTE = 1e-4, 1e-5


def _array(x: Any, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "type": str(x.dtype),
        "weak": bool(getattr(x, "weak_type", False)),
        "shape": list(x.shape),
    }


def _numbers(x: Any) -> Any:
    values = np.asarray(x)
    if np.iscomplexobj(values):
        return [values.real.astype(float).tolist(), values.imag.astype(float).tolist()]
    return values.tolist() if values.dtype.kind in "biu" else values.astype(float).tolist()


def _plain(x: Any) -> Any:
    """Of what JSON has a name for, with its class."""
    if x is None or isinstance(x, bool | str):
        return x
    if isinstance(x, int | float):
        return {"python": type(x).__name__, "values": x}
    return {"python": type(x).__name__, "values": [x.real, x.imag]}


def _object(x: Any, eqx: Any) -> Any:
    """A module of the calls, or one that has a public name: its class and what is in its public fields."""
    name = type(x).__name__
    known = getattr(eqx, name, None) or getattr(eqx.nn, name, None)
    if not type(x).__module__.startswith("tests.") and known is not type(x):
        return {"object": "another", "callable": callable(x)}
    fields = [f.name for f in dataclasses.fields(x) if f.name[0] != "_" and hasattr(x, f.name)]
    return {"object": name, "fields": {f: describe(getattr(x, f), eqx) for f in fields}}


def describe(x: Any, eqx: Any) -> Any:
    """A value as JSON.

    Args:
        x: the value.
        eqx: what stands for Equinox.

    Returns:
        A tree that `difference` compares with another.
    """
    if x is None or isinstance(x, bool | int | float | complex | str):
        return _plain(x)
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return {**_array(x, "key"), "values": _numbers(jax.random.key_data(x))}
        return {**_array(x, "jax"), "values": _numbers(x)}
    if isinstance(x, np.ndarray | np.generic):
        return {**_array(x, type(x).__name__), "values": _numbers(x)}
    if isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer):
        return _array(x, "shape" if isinstance(x, jax.ShapeDtypeStruct) else "tracer")
    if isinstance(x, type | types.FunctionType | types.BuiltinFunctionType):
        return {"named": x.__name__}
    if isinstance(x, tuple | list):
        return {"sequence": type(x).__name__, "items": [describe(y, eqx) for y in x]}
    if isinstance(x, dict):
        return {"dict": {str(k): describe(v, eqx) for k, v in x.items()}}
    if isinstance(x, set | frozenset):
        return {"set": sorted(map(str, x))}
    if isinstance(x, jtu.PyTreeDef):
        return {"leaves": x.num_leaves}
    if isinstance(x, np.dtype):
        return {"dtype": x.name}
    if dataclasses.is_dataclass(x):
        return _object(x, eqx)
    return {"object": "another", "callable": callable(x)}


def _class_of_error(error: BaseException, eqx: Any) -> list[str]:
    """The names under which it can be caught, the narrowest first."""
    names = []
    for cls in type(error).__mro__:
        if cls is getattr(eqx, "EquinoxRuntimeError", None):
            names.append("EquinoxRuntimeError")
        elif cls is getattr(eqx, "EquinoxTracetimeError", None):
            names.append("EquinoxTracetimeError")
        elif getattr(builtins, cls.__name__, None) is cls or cls.__module__ in (
            "dataclasses",
            "jax.errors",
        ):
            names.append(cls.__name__)
        elif cls.__module__.startswith("jax"):
            names.append("jax." + cls.__name__)
    return names


def outcome(function: Callable[..., Any], args: tuple[Any, ...], eqx: Any) -> dict[str, Any]:
    """Calls a function, and describes what it gives or raises, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = {"gives": describe(function(*args), eqx)}
        except Exception as error:
            found = {"raises": _class_of_error(error, eqx), "text": str(error)[:300]}
    return {**found, "warns": sorted({w.category.__name__ for w in caught})}


def _default(value: Any) -> str:
    if isinstance(value, types.FunctionType | type):
        return value.__name__
    text = repr(value)
    return "<object>" if " at 0x" in text or "sentinel" in text else text


def _parameters(callable_: Any) -> Any:
    try:
        signature = inspect.signature(callable_)
    except (TypeError, ValueError):
        return None
    return [
        [p.name, p.kind.name, None if p.default is p.empty else _default(p.default)]
        for p in signature.parameters.values()
    ]


def signatures(obj: Any) -> dict[str, Any]:
    """The parameters of a name and, if it is a class, of its public methods and of calling an instance.

    Args:
        obj: a function or a class; anything else has none.

    Returns:
        For each callable, `""` for the name itself, its parameters.
    """
    found = {"": _parameters(obj)} if callable(obj) else {}
    if not isinstance(obj, type):
        return found
    for name in dir(obj):
        value = inspect.getattr_static(obj, name)
        if name != "__call__" and (name[0] == "_" or not callable(getattr(obj, name, None))):
            continue
        if value is not inspect.getattr_static(type, name, None) and not isinstance(value, type):
            found[name] = _parameters(getattr(obj, name))
    return found


def difference(theirs: Any, ours: Any) -> str | None:
    """How one outcome differs from another, in words that are the same at every run; or None.

    What ours has on top of theirs, further fields or classes of an error, is no difference.

    Args:
        theirs: what Equinox gave.
        ours: what Vernal gave.

    Returns:
        The words.
    """
    if "raises" in theirs or "raises" in ours:
        raised, raises = (found.get("raises", ["a value"])[0] for found in (theirs, ours))
        if raised not in ours.get("raises", ()):
            return f"{raised} became {raises}"
    if theirs["warns"] != ours["warns"]:
        return f"warnings {theirs['warns']} became {ours['warns']}"
    return _difference(theirs.get("gives"), ours.get("gives"), "")


def _difference(theirs: Any, ours: Any, place: str) -> str | None:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = theirs if place.endswith("fields") else {**theirs, **ours}
        pairs = [(f"{place} {k}", theirs.get(k, ABSENT), ours.get(k, ABSENT)) for k in keys]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = [(f"{place} {i}", *both) for i, both in enumerate(zip(theirs, ours, strict=True))]
    elif _number(theirs) and _number(ours):
        near = math.isclose(theirs, ours, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        same = near or (math.isnan(theirs) and math.isnan(ours))
        return None if same else f"other{place}"
    else:
        words = place.endswith((" kind", " type", " weak", " python"))
        became = f": {theirs} became {ours}" if words else ""
        return None if theirs == ours else f"other{place}{became}"
    return next(filter(None, (_difference(a, b, where) for where, a, b in pairs)), None)


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


ABSENT = "nothing"
NAMED = {"POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"}


def signature_difference(theirs: list[Any] | None, ours: list[Any] | None) -> str | None:
    """How ours takes other arguments than theirs.

    Args:
        theirs: the parameters of Equinox's.
        ours: those of Vernal's.

    Returns:
        None where both take the same; else what is different or, where every call of theirs is one of ours, what more
        ours takes.
    """
    if theirs is None or theirs == ours:
        return None
    if ours is None:
        return "it is not there"
    more = []
    mine = {name: (i, kind, default) for i, (name, kind, default) in enumerate(ours)}
    any_keyword = any(kind == "VAR_KEYWORD" for _, kind, _ in theirs)
    for i, (name, kind, default) in enumerate(theirs):
        if kind == "VAR_KEYWORD" and any(k in ("VAR_KEYWORD", "KEYWORD_ONLY") for _, k, _ in ours):
            continue
        if kind == "VAR_POSITIONAL" and any(k == "VAR_POSITIONAL" for _, k, _ in ours):
            continue
        if (
            kind == "POSITIONAL_ONLY"
            and i < len(ours)
            and ours[i][1] in ("POSITIONAL_ONLY", "VAR_POSITIONAL")
        ):
            continue
        if name not in mine:
            return f"no parameter `{name}`"
        j, kind_, default_ = mine[name]
        if kind_ != kind and (kind, kind_) != ("KEYWORD_ONLY", "POSITIONAL_OR_KEYWORD"):
            return f"`{name}` is {kind_.lower()}, not {kind.lower()}"
        if kind == "POSITIONAL_OR_KEYWORD" and i != j:
            return f"`{name}` is parameter {j}, not {i}"
        if default is None and default_ is not None:
            more.append(f"no `{name}`")
        elif default != default_ and default not in ("<object>", "<lambda>"):
            return f"the default of `{name}` is {default_}, not {default}"
    known = {name for name, _, _ in theirs}
    for name, kind, default in ours:
        if name not in known and kind in NAMED and not any_keyword:
            if default is None:
                return f"`{name}` is needed"
            more.append(f"`{name}`")
    return "also takes " + ", ".join(more) if more else None
