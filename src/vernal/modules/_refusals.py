"""The errors for a badly built module. Each names the class, the field and the path, and says what to
write instead."""

import collections
import inspect
from typing import Any

import jax.tree_util as jtu
import numpy as np

from ..show import message, path_text, short, type_error, value_error

# What to write instead of a value that can change.
_UNCHANGING: dict[type, str] = {
    list: "a tuple, or the field without `static=True`",
    dict: "a tuple of pairs, a module, or the field without `static=True`",
    set: "a frozenset",
    bytearray: "bytes",
    collections.deque: "a tuple",
    np.ndarray: "a tuple of Python values",
}


def _at(cls: type, name: str, path: tuple[Any, ...] = ()) -> str:
    return f"{path_text((jtu.GetAttrKey(name), *path))} of {cls.__module__}.{cls.__qualname__}"


def not_initialised(cls: type, name: str) -> TypeError:
    return type_error(
        f"Field `{name}` was not initialized",
        where=_at(cls, name),
        expected=f"`self.{name} = ...` in `__init__` or `__post_init__`",
        got="no value",
        instead=f"assign it, or give the field a default: `{name}: ... = value`",
    )


_COPY = (
    "model = vernal.tree_at(lambda m: m.{name}, model, new_value), or dataclasses.replace(model, {name}=...); "
    "for state that calls change, a vernal.nn.Variable"
)


def frozen(cls: type, name: str, verb: str) -> str:
    """The error for an assignment. A class may say in `_vernal_instead` how its values change."""
    return message(
        f"cannot {verb} `{name}`: modules are immutable once they are built",
        where=_at(cls, name),
        instead=getattr(cls, "_vernal_instead", _COPY).format(name=name),
    )


def undeclared(cls: type, name: str, known: tuple[str, ...]) -> str:
    return message(
        f"`{name}` is not a field of `{cls.__qualname__}`",
        where=_at(cls, name),
        expected="one of the declared fields: " + (", ".join(known) or "(none)"),
        got=f"self.{name} = ...",
        instead=f"declare it in the class body: `{name}: SomeType`",
    )


def method_of_self(cls: type, name: str, method: str) -> ValueError:
    return value_error(
        "Cannot assign methods in __init__: the module would contain itself",
        where=_at(cls, name),
        got=f"self.{name} = self.{method}",
        instead=f"call `self.{method}` where it is needed, or define a method `{name}` that calls it",
    )


def cycle(cls: type, name: str, path: tuple[Any, ...]) -> ValueError:
    return value_error(
        "a module cannot contain itself: a cycle is not a tree",
        where=_at(cls, name, path),
        expected="a value that does not lead back to the module or container that holds it",
        got="a reference to the object being built",
        instead="store an index, a name or a function of the module rather than the object",
    )


def array_in_static(cls: type, name: str, path: tuple[Any, ...], value: Any) -> ValueError:
    return value_error(
        "an array cannot be static: structure is compared by value at every call of a compiled function",
        where=_at(cls, name, path),
        expected="a hashable Python value without arrays",
        got=short(value),
        instead=f"declare `{name}` without `static=True` (use jax.lax.stop_gradient if it must not be trained), "
        "or store a tuple of Python numbers",
    )


def hidden_in_callable(cls: type, name: str, path: tuple[Any, ...], value: Any) -> ValueError:
    return value_error(
        "arrays inside this function would be constants: never trained, updated, saved or moved",
        where=_at(cls, name, path),
        expected="a module, or a function that holds no arrays",
        got=short(value),
        instead="store the module itself and transform it where it is called, e.g. `jax.vmap(self.layer)(x)`; "
        "in place of functools.partial use vernal.Partial",
    )


def hidden_in_object(cls: type, name: str, path: tuple[Any, ...], value: Any) -> ValueError:
    kind = type(value).__qualname__
    return value_error(
        f"arrays inside this object would be constants: `{kind}` is not a registered pytree",
        where=_at(cls, name, path),
        expected="an array, a module, a list, tuple or dict, or an object of a registered class",
        got=short(value),
        instead=f"make `{kind}` a vernal.Module, or register it (jax.tree_util.register_dataclass)",
    )


def unhashable(cls: type, name: str, path: tuple[Any, ...], value: Any) -> ValueError:
    otherwise = "a module, a frozen dataclass, a tuple or a frozenset"
    return value_error(
        "structure is compared at every call of a compiled function, and this value can change in place",
        where=_at(cls, name, path),
        expected="an array, a module, or an immutable, hashable value",
        got=short(value),
        instead=_UNCHANGING.get(type(value), otherwise),
    )


def mutable_default(cls_name: str, name: str, value: Any) -> ValueError:
    return value_error(
        f"mutable default {short(value)} for a field: every instance would share it",
        where=f"{cls_name}.{name}",
        expected="an immutable default",
        got=type(value).__name__,
        instead=f"{name}: ... = vernal.field(default_factory=lambda: ...)",
    )


def note_arguments(cls: type, error: TypeError) -> None:
    """Adds the arguments of a class to Python's error for wrong ones, which names the class that has the `__init__`."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return  # raised inside `__init__`
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [
        stars.get(p.kind, "") + p.name + ("" if p.default is p.empty else "=...")
        for p in inspect.signature(cls).parameters.values()
    ]
    error.add_note(f"The arguments of {cls.__name__}: {', '.join(names) or 'none'}")
    if "missing" in str(error) and "'key'" in str(error):
        error.add_note(
            "A key: key=jax.random.key(0), and a different one for each layer (jax.random.split)"
        )


def owing(cls: Any) -> TypeError:
    """The error for an instance of a class that owes something to its bases."""
    if cls.__abstractclassvars__:
        return abstract(cls, sorted(cls.__abstractclassvars__), "class attributes")
    if cls.__abstractvars__:
        return abstract(cls, sorted(cls.__abstractvars__), "attributes")
    return abstract(cls, [cls.__qualname__], "class (declared with is_abstract=True)")


def abstract(cls: type, names: list[str], what: str) -> TypeError:
    return type_error(
        f"Can't instantiate abstract class {cls.__qualname__} with abstract {what}: {', '.join(names)}",
        where=f"{cls.__module__}.{cls.__qualname__}",
        expected="a class that provides them",
        instead="instantiate a subclass that defines " + ", ".join(f"`{n}`" for n in names),
    )


def strict(cls: type, what: str, expected: str, instead: str) -> TypeError:
    return type_error(
        f"strict module: {what}",
        where=f"{cls.__module__}.{cls.__qualname__}",
        expected=expected,
        instead=instead,
    )


def unknown_layout(name: str, layout: Any) -> ValueError:
    return value_error(
        "unknown class option",
        where=f"class {name}(..., layout={layout!r})",
        expected="'arrays' (fields are sorted by their values) or 'fields' (every field is a child)",
        got=short(layout),
        instead=f"class {name}(vernal.Module)",
    )


def virtual_subclass(cls: type, subclass: Any) -> ValueError:
    return value_error(
        "modules cannot have virtual subclasses: only a real subclass is a pytree",
        where=f"{cls.__qualname__}.register({getattr(subclass, '__qualname__', subclass)})",
        instead=f"class {getattr(subclass, '__name__', 'Sub')}({cls.__qualname__}): ...",
    )


def no_wrapped(cls: type) -> TypeError:
    return type_error(
        "module_update_wrapper needs a class with a property `__wrapped__`",
        where=f"{cls.__module__}.{cls.__qualname__}",
        expected="a property named `__wrapped__`, which returns what is wrapped",
        got="no such property",
        instead="@property\n    def __wrapped__(self): return self.fn",
    )
