"""One value in a few characters: `f32[2,3]`, `weak_f32[]`, `key<fry>[]`, `<function relu>`.

Only `differing_values` reads the elements of an array.
"""

import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)

_KINDS = {
    "bfloat": "bf",
    "float": "f",
    "uint": "u",
    "int": "i",
    "complex": "c",
}
_NUMBER = re.compile(rf"({'|'.join(_KINDS)})(\d.*)")


def dtype_text(dtype: Any) -> str:
    """`f32`, `bf16`, `f8_e4m3fn`, `u8`, `c64`, `bool`, `key<fry>`; others as NumPy writes them."""
    if dtype == jax.dtypes.float0:
        # NumPy sees it as a structured dtype with one empty field.
        return "float0"
    text = str(dtype)
    found = _NUMBER.fullmatch(text)
    return text if found is None else _KINDS[found[1]] + found[2]


def is_weak(value: Any) -> bool:
    """Whether an array is weakly typed. NumPy arrays and keys never are."""
    return bool(getattr(value, "weak_type", False))


def spec_text(value: Any) -> str:
    """Shape and dtype of anything that has both.

    Args:
        value: an array, a `jax.ShapeDtypeStruct`, an abstract value.

    Returns:
        For example `weak_f32[2,3]`.

    Example:
        >>> import jax
        >>> from vernal.show import spec_text
        >>> spec_text(jax.ShapeDtypeStruct((2, 3), "float32"))
        'f32[2,3]'
    """
    dims = ",".join(map(str, value.shape))
    return f"{'weak_' if is_weak(value) else ''}{dtype_text(value.dtype)}[{dims}]"


def array_text(value: Any) -> str:
    """`spec_text`, with a suffix if the array is not JAX's: `f64[2](numpy)`, `f32[2](struct)`."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"{spec_text(value)}(struct)"
    if isinstance(value, np.ndarray | np.generic):
        return f"{spec_text(value)}(numpy)"
    return spec_text(value)


def is_traced(value: Any) -> bool:
    """Whether a value stands for an array that is known only when a compiled program runs.

    Args:
        value: any Python object.

    Returns:
        True for JAX's tracers.

    Example:
        >>> import jax
        >>> from vernal.show import is_traced
        >>> seen = []
        >>> _ = jax.jit(lambda x: seen.append(is_traced(x)))(1.0)
        >>> seen, is_traced(1.0)
        ([True], False)
    """
    return isinstance(value, Tracer)


def is_deleted(value: Any) -> bool:
    """Whether a JAX array was donated or deleted, so that its elements are gone."""
    return isinstance(value, jax.Array) and not is_traced(value) and value.is_deleted()


def function_text(value: Any) -> str | None:
    """`<function f>`, `<wrapped function f>` (of `jax.jit`, `jax.custom_jvp`, `functools.wraps`), or
    None for anything else.

    Classes and instances of dataclasses (modules) have better names.
    """
    if isinstance(value, type) or hasattr(type(value), "__dataclass_fields__"):
        return None
    wrapped = callable(value) and getattr(value, "__wrapped__", None) is not None
    if not wrapped and not isinstance(value, types.FunctionType):
        return None
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(name, str):
        return None
    return f"<{'wrapped ' if wrapped else ''}function {name}>"


def _elements(value: Any) -> np.ndarray:
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(value))
    return np.asarray(value)


def _why_unknown(value: Any) -> str | None:
    if is_traced(value):
        return "traced, its values are not known"
    if isinstance(value, jax.ShapeDtypeStruct):
        return "only a shape, without values"
    if is_deleted(value):
        return "deleted, its values are gone"
    return None


def differing_values(a: Any, b: Any) -> tuple[str, str] | None:
    """Compares two arrays of the same shape and dtype by value; NaN equals NaN. Returns None if they agree, otherwise a
    description of each that names the first place where they differ. Values that cannot be read never agree, unless
    both are `ShapeDtypeStruct`, which have none."""
    if a is b or (isinstance(a, jax.ShapeDtypeStruct) and isinstance(b, jax.ShapeDtypeStruct)):
        return None
    unknown = _why_unknown(a), _why_unknown(b)
    if unknown != (None, None):
        texts = [
            array_text(x) + (f" ({why})" if why else "")
            for x, why in zip((a, b), unknown, strict=True)
        ]
        return texts[0], texts[1]
    try:
        x, y = _elements(a), _elements(b)
        differs = np.atleast_1d((x != y) & ~((x != x) & (y != y)))
        if not differs.any():
            return None
        first = tuple(int(i) for i in np.argwhere(differs)[0])
        at = f" at {list(first)}" if x.ndim else ""
        count = f" ({int(differs.sum())} of {differs.size} differ)" if x.ndim else ""
        left, right = (np.atleast_1d(v)[first] for v in (x, y))
        return f"{array_text(a)} with {left}{at}", f"{array_text(b)} with {right}{at}{count}"
    except Exception as error:
        # Arrays sharded over other processes, or arrays of Python objects that cannot be compared.
        return array_text(a), f"{array_text(b)} (not comparable: {type(error).__name__})"
