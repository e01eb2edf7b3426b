"""Any pytree as text, fitted to a width by the algorithm of Wadler and Lindig
(https://github.com/patrick-kidger/wadler_lindig).

Modules are dataclasses and are printed by field. This file adds to `wadler_lindig` what JAX users want
to read (`weak_f32[2,3]`, `<wrapped function relu>`), and guarantees that printing never fails and never
waits for the device: the `repr` of a module, debuggers and error messages rely on that.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import wadler_lindig as wl

from ._values import array_text, function_text, is_deleted, spec_text

# Wide enough that everything fits on one line.
_ONE_LINE = 10**9

_Custom = Callable[[Any], wl.AbstractDoc | None]


def _customise(
    short_arrays: bool, struct_as_array: bool, truncate_leaf: Callable[[Any], bool] | None
) -> _Custom:
    def custom(value: Any) -> wl.AbstractDoc | None:
        if isinstance(value, type):
            # A class also occurs as the name before the fields of its instances, so leave it alone.
            return None
        if truncate_leaf is not None and truncate_leaf(value):
            return wl.TextDoc(f"{type(value).__name__}(...)")
        if isinstance(value, jax.ShapeDtypeStruct):
            return wl.TextDoc(spec_text(value)) if struct_as_array else None
        if isinstance(value, jax.Array | np.ndarray):
            if short_arrays:
                return wl.TextDoc(array_text(value))
            return wl.TextDoc(f"{spec_text(value)}(deleted)") if is_deleted(value) else None
        if isinstance(value, jax.Ref):
            return wl.TextDoc(f"Ref({spec_text(value)})") if short_arrays else None
        text = function_text(value)
        return None if text is None else wl.TextDoc(text)

    return custom


def _unprintable(value: Any, error: Exception) -> str:
    return f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"


def _guard(custom: _Custom, options: dict[str, Any]) -> _Custom:
    """The same customisation, but an object that cannot be printed is named instead."""
    active: set[int] = set()

    def guarded(value: Any) -> wl.AbstractDoc | None:
        if isinstance(value, type):
            return None
        if id(value) in active:
            return wl.TextDoc("<recursive>")
        active.add(id(value))
        try:
            doc = custom(value)
            if doc is None:
                # Printed here, not by the caller, so that a failure is caught at the innermost object.
                doc = wl.pdoc(value, custom=lambda x: None if x is value else guarded(x), **options)
            return doc
        except Exception as error:
            return wl.TextDoc(_unprintable(value, error))
        finally:
            active.discard(id(value))

    return guarded


def tree_pformat(
    pytree: Any,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] | None = None,
) -> str:
    """Any Python object as text; modules and other dataclasses by field, arrays by dtype and shape.

    Never fails: an object whose own `repr` fails is named instead, and a field without a value is
    shown as such. To change how instances of a class look, give it a method `__pdoc__(self, **kwargs)`
    that returns a `wadler_lindig` document or None; it gets all the options.

    Args:
        pytree: any object.
        width: the number of characters that a line should not exceed.
        indent: the number of spaces for each level.
        short_arrays: whether to show arrays as `f32[2,3]` (NumPy: `f32[2,3](numpy)`, weakly typed:
            `weak_f32[]`). False shows the elements, and so waits for them.
        struct_as_array: whether to show `jax.ShapeDtypeStruct` the same way.
        truncate_leaf: called with every object; if it returns True, only `ClassName(...)` is shown.

    Returns:
        The text, on several lines if it does not fit on one.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.show import tree_pformat
        >>> tree_pformat({"w": jnp.zeros((2, 3)), "b": None})
        "{'w': f32[2,3], 'b': None}"
    """
    custom = _customise(short_arrays, struct_as_array, truncate_leaf)
    options: dict[str, Any] = dict(
        indent=indent,
        short_arrays=short_arrays,
        # wadler_lindig does not use these two: it passes them on to `__pdoc__`.
        struct_as_array=struct_as_array,
        truncate_leaf=truncate_leaf,
    )
    try:
        return wl.pformat(pytree, width=width, custom=custom, **options)
    except Exception:
        # Guarding every object costs as much as printing it, so do it only after a failure, which is rare.
        try:
            return wl.pformat(pytree, width=width, custom=_guard(custom, options), **options)
        except Exception as error:
            return _unprintable(pytree, error)


def tree_pprint(
    pytree: Any,
    *,
    width: int = 80,
    indent: int = 2,
    short_arrays: bool = True,
    struct_as_array: bool = False,
    truncate_leaf: Callable[[Any], bool] | None = None,
) -> None:
    """Prints `tree_pformat` of the same arguments.

    Args:
        pytree: and all others: as for `tree_pformat`.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.show import tree_pprint
        >>> tree_pprint([jnp.zeros((), jnp.int8), "text"])
        [i8[], 'text']
    """
    print(
        tree_pformat(
            pytree,
            width=width,
            indent=indent,
            short_arrays=short_arrays,
            struct_as_array=struct_as_array,
            truncate_leaf=truncate_leaf,
        )
    )


def short(value: Any, *, limit: int = 80) -> str:
    """Any value on one line, for error messages.

    Args:
        value: any object, including a whole tree.
        limit: the maximum number of characters, at least 3; longer texts end in `...`.

    Returns:
        The text of `tree_pformat` on one line, except that a `jax.ShapeDtypeStruct` is shown as
        `f32[2](struct)`, and a local function without the function that defines it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.show import short
        >>> short(jnp.zeros((2, 3))), short(jax.random.key(0)), short(jnp.sin)
        ('f32[2,3]', 'key<fry>[]', '<wrapped function sin>')
        >>> short("x" * 100, limit=10)
        "'xxxxxx..."
    """
    if type(value) is jax.ShapeDtypeStruct:
        text = array_text(value)
    else:
        text = tree_pformat(value, width=_ONE_LINE, struct_as_array=True)
    text = re.sub(r"\s*\n\s*", " ", text)
    # The place where a local function was defined takes too much room in a message.
    text = re.sub(r"(?<=function )[\w.<>]*<locals>\.", "", text)
    return text if len(text) <= limit else text[: limit - 3] + "..."
