"""Predicates for leaves, from which every filter is built."""

import functools
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np


@functools.lru_cache(maxsize=512)
def _numeric(dtype: np.dtype) -> bool:
    # NumPy calls bfloat16 and its kin "void" (kind V), and float0 too: only JAX's own type lattice
    # tells them apart.
    # NumPy counts durations among the integers.
    is_number = jnp.issubdtype(dtype, np.number) and dtype.kind != "m"
    return is_number or jnp.issubdtype(dtype, np.bool_)


def is_array(element: Any) -> TypeGuard[jax.Array | np.ndarray | np.generic]:
    """Whether `element` is an array that JAX can compute with.

    Args:
        element: any Python object.

    Returns:
        True for JAX arrays, tracers, typed PRNG keys, and numeric or boolean NumPy arrays and
        scalars. False for NumPy arrays of objects, strings or dates, which no transformation
        accepts, and for `jax.ShapeDtypeStruct`.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from vernal import is_array
        >>> is_array(jnp.ones(3)), is_array(np.float32(1)), is_array(1.0)
        (True, True, False)
        >>> is_array(np.array(["text"]))
        False
    """
    if isinstance(element, jax.Array):
        return True
    if isinstance(element, (np.ndarray, np.generic)):
        return _numeric(element.dtype)
    return False


def has_shape(x: Any) -> bool:
    """Whether `x` is an array, or a `jax.ShapeDtypeStruct` in place of one.

    Args:
        x: any Python object.

    Example:
        >>> import jax
        >>> from vernal.trees import has_shape
        >>> has_shape(jax.ShapeDtypeStruct((2,), "float32")), has_shape(1.0)
        (True, False)
    """
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def is_array_like(element: Any) -> bool:
    """Whether `jnp.asarray` can turn `element` into a JAX array.

    Args:
        element: any Python object.

    Returns:
        True for everything `is_array` accepts, Python numbers, and objects with a `__jax_array__`
        method.

    Example:
        >>> from vernal import is_array_like
        >>> is_array_like(1.0), is_array_like("text")
        (True, False)
    """
    return (
        isinstance(element, (bool, int, float, complex))
        or is_array(element)
        or hasattr(type(element), "__jax_array__")
    )


def is_inexact_array(element: Any) -> TypeGuard[jax.Array | np.ndarray | np.generic]:
    """Whether `element` is an array of real or complex floating-point numbers, and so differentiable.

    Args:
        element: any Python object.

    Returns:
        True if `is_array(element)` and its dtype is floating or complex.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import is_inexact_array
        >>> is_inexact_array(jnp.ones(3)), is_inexact_array(jnp.arange(3)), is_inexact_array(1.0)
        (True, False, False)
    """
    return is_array(element) and jnp.issubdtype(element.dtype, np.inexact)


def is_inexact_array_like(element: Any) -> bool:
    """Whether `element` is, or can be turned into, a floating-point array.

    Args:
        element: any Python object.

    Returns:
        True for everything `is_inexact_array` accepts, Python floats and complex numbers, and
        objects whose `__jax_array__` gives such an array.

    Example:
        >>> from vernal import is_inexact_array_like
        >>> is_inexact_array_like(1.0), is_inexact_array_like(1)
        (True, False)
    """
    if isinstance(element, (float, complex)):
        return True
    if hasattr(type(element), "__jax_array__"):
        return jnp.issubdtype(jnp.asarray(element).dtype, np.inexact)
    return is_inexact_array(element)
