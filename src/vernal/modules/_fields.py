"""Declaring fields, and reading their annotations."""

import dataclasses
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
from typing_extensions import TypeAliasType

from ..show import short, type_error

_NUMBERS: dict[type, tuple[type, ...]] = {
    bool: (bool,),
    int: (int, float, complex),
    float: (float, complex),
    complex: (complex,),
}


def field(
    *,
    converter: Callable[[Any], Any] | None = None,
    static: bool = False,
    trainable: bool = True,
    **kwargs: Any,
) -> Any:
    """`dataclasses.field` with three more settings.

    Args:
        converter: called with the field's value once `__init__` has finished; its result is stored
            instead.
        static: if True, the value is always structure (part of the treedef), never a child. It must
            not hold arrays.
        trainable: if False, the arrays in this field, and in modules in this field, are buffers, such
            as running statistics: frozen from construction on, as by `vernal.freeze`. Derivatives,
            optimisers, weight decay and `vernal.unfreeze` leave them alone.
        **kwargs: as for `dataclasses.field`: `default`, `default_factory`, `init`, `repr`,
            `kw_only`, `metadata`, ...

    Returns:
        The field, to assign in the class body.

    Raises:
        TypeError: if `static` or `trainable` is not a bool; if `metadata` already has an entry named `"converter"`,
            `"static"` or `"trainable"` although the argument is given; if `trainable=False` is given with
            `static=True`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> class Scale(vernal.Module):
        ...     factor: jnp.ndarray = vernal.field(converter=jnp.asarray)
        ...     offset: jnp.ndarray = vernal.field(trainable=False)
        ...     name: str = vernal.field(static=True, default="scale")
        >>> scale = Scale([1.0, 2.0], jnp.zeros(2))
        >>> scale
        Scale(factor=f32[2], offset=f32[2])
        >>> vernal.trainable(scale)
        Scale(factor=True, offset=False)
    """
    for setting, flag in (("static", static), ("trainable", trainable)):
        if not isinstance(flag, bool):
            raise type_error(
                f"`{setting}` of a field must be True or False",
                where=f"field({setting}=...)",
                expected="True or False",
                got=short(flag),
            )
    if static and not trainable:
        raise type_error(
            "a static field cannot be declared trainable=False: it holds no arrays",
            where="field(static=True, trainable=False)",
            expected="only one of the two",
            instead="field(static=True) for structure, field(trainable=False) for arrays that are buffers",
        )
    metadata = dict(kwargs.pop("metadata", None) or {})
    for key, value, given in (
        ("converter", converter, converter is not None),
        ("static", static, static),
        ("trainable", trainable, not trainable),
    ):
        if not given:
            continue
        if key in metadata:
            raise type_error(
                f"`{key}` was given to `field` and also in its metadata",
                where=f"field(metadata={{'{key}': ...}})",
                got=short(metadata[key]),
                instead=f"field({key}=...)",
            )
        metadata[key] = value
    return dataclasses.field(metadata=metadata, **kwargs)


def resolve_annotation(cls: type, name: str, annotation: Any) -> Any:
    """The annotation of a field as an object, or None if it is a string that cannot be evaluated (yet)."""
    if not isinstance(annotation, str):
        return annotation
    for owner in cls.__mro__:
        if name in owner.__dict__.get("__annotations__", {}):
            module = sys.modules.get(owner.__module__)
            try:
                return eval(annotation, vars(module) if module else {}, dict(vars(owner)))
            except Exception:
                return None
    return None


def array_dtype_for(annotation: Any, number: Any) -> Any:
    """The dtype a Python number takes in a field of this annotation, or None if it stays a number.

    A number becomes an array where the annotation asks for an array and does not allow the number
    itself.
    """
    if isinstance(annotation, TypeAliasType):
        annotation = annotation.__value__
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return array_dtype_for(annotation.__origin__, number)
    if origin in (typing.Union, types.UnionType):
        options = typing.get_args(annotation)
        if any(option in _NUMBERS[type(number)] for option in options):
            return None
        found = (array_dtype_for(option, number) for option in options)
        return next((dtype for dtype in found if dtype is not None), None)
    if annotation is jax.Array:
        return _array_dtypes(number)[0]
    if not (isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)):
        return None
    if annotation.array_type is not jax.Array:
        return None
    allowed, candidates = annotation.dtypes, _array_dtypes(number)
    if not isinstance(allowed, (list, tuple)):
        return candidates[0]
    return next((dtype for dtype in candidates if dtype.name in allowed), None)


def _array_dtypes(number: Any) -> list[Any]:
    return [jnp.result_type(kind) for kind in _NUMBERS[type(number)]]
