"""Whether pytrees are equal: exactly, or up to a tolerance.

The answer is a Python bool if only Python and NumPy values were compared, and a JAX bool once
elements of a JAX array were: they are on the device (and under `jax.jit` not known yet). Structure,
types, shapes and dtypes, which need no elements, are compared first, and eagerly.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool

from ..show import type_error

_Tolerance = tuple[float | int, float | int]


def _is_numpy(x: Any) -> bool:
    return isinstance(x, (np.ndarray, np.generic))


def _is_any_array(x: Any) -> bool:
    # Wider than `is_array`: NumPy arrays of strings or objects also have shapes and dtypes to compare.
    return isinstance(x, jax.Array) or _is_numpy(x)


def _type(x: Any) -> type:
    # A tracer and the array it stands for are one type.
    return jax.Array if isinstance(x, jax.Array) else type(x)


def _equal_arrays(x: Any, y: Any, tolerance: _Tolerance) -> bool | Bool[Array, ""]:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    rtol, atol = tolerance
    exact = (rtol == 0 and atol == 0) or not jnp.issubdtype(x.dtype, np.inexact)
    if _is_numpy(x) and _is_numpy(y):
        return bool(np.all(x == y if exact else np.isclose(x, y, rtol=rtol, atol=atol)))
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    else:
        x, y = jnp.asarray(x), jnp.asarray(y)
    return jnp.all(x == y if exact else jnp.isclose(x, y, rtol=rtol, atol=atol))


def _equal_leaves(x: Any, y: Any, typematch: bool, tolerance: _Tolerance) -> bool | Bool[Array, ""]:
    if typematch and _type(x) is not _type(y):
        return False
    if _is_any_array(x) and _is_any_array(y):
        return _equal_arrays(x, y, tolerance)
    if _is_any_array(x) or _is_any_array(y):
        return False
    return bool(x == y)


def _compare(
    name: str, pytrees: tuple[Any, ...], typematch: bool, tolerance: _Tolerance
) -> bool | Bool[Array, ""]:
    if not pytrees:
        raise type_error(
            "nothing to compare",
            where=f"{name}(*pytrees)",
            expected="at least one pytree, usually two",
            got="none",
            instead=f"{name}(a, b); unpack a list with `*` only if it is not empty",
        )
    leaves, treedef = jtu.tree_flatten(pytrees[0])
    on_device: list[Bool[Array, ""]] = []
    for other in pytrees[1:]:
        other_leaves, other_treedef = jtu.tree_flatten(other)
        if treedef != other_treedef:
            return False
        for x, y in zip(leaves, other_leaves, strict=True):
            same = _equal_leaves(x, y, typematch, tolerance)
            if isinstance(same, jax.Array):
                on_device.append(same)
            elif not same:
                return False
    return functools.reduce(jnp.logical_and, on_device) if on_device else True


def tree_equal(
    *pytrees: Any, typematch: bool = False, rtol: float | int = 0.0, atol: float | int = 0.0
) -> bool | Bool[Array, ""]:
    """Whether all pytrees are equal: in structure, and leaf by leaf.

    Two arrays are equal if they have the same shape, dtype and elements; typed PRNG keys, if their
    key data is the same. All other leaves are compared with `==`. An array never equals a Python
    number. NaN does not equal NaN, not even itself.

    Args:
        pytrees: at least one.
        typematch: whether leaves must also have the same type. If False, `1` equals `1.0`, and a
            NumPy array equals a JAX array with the same dtype and elements. Tracers count as JAX
            arrays.
        rtol: floating-point and complex arrays are equal if `abs(x - y) <= atol + rtol * abs(y)`
            everywhere. Python numbers, integer arrays and keys are always compared exactly.
        atol: see `rtol`.

    Returns:
        A Python bool if no elements of JAX arrays had to be compared; otherwise a JAX bool of shape
        `()`, a tracer under `jax.jit`. So `tree_equal(...) is True` is false for equal JAX arrays: use
        `bool(...)`.

    Raises:
        TypeError: if no pytree is given.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.trees import tree_equal
        >>> tree_equal([1, "text"], [1.0, "text"])
        True
        >>> tree_equal([1, "text"], [1.0, "text"], typematch=True)
        False
        >>> tree_equal({"x": jnp.arange(3)}, {"x": jnp.arange(3)})
        Array(True, dtype=bool)
    """
    return _compare("tree_equal", pytrees, typematch, (rtol, atol))


def tree_allclose(
    *pytrees: Any, rtol: float | int = 1e-5, atol: float | int = 1e-8
) -> bool | Bool[Array, ""]:
    """Whether all pytrees are equal, floating-point arrays up to a tolerance.

    This is `tree_equal` for tests: everything without rounding errors, types included, must be the
    same.

    Args:
        pytrees: at least one.
        rtol: floating-point and complex arrays are close if `abs(x - y) <= atol + rtol * abs(y)`
            everywhere. The defaults are NumPy's.
        atol: see `rtol`.

    Returns:
        A Python bool if no elements of JAX arrays had to be compared; otherwise a JAX bool of shape
        `()`.

    Raises:
        TypeError: if no pytree is given.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.trees import tree_allclose
        >>> bool(tree_allclose([jnp.ones(2), "text"], [jnp.ones(2) + 1e-6, "text"]))
        True
        >>> bool(tree_allclose([jnp.ones(2), "text"], [jnp.ones(2) + 1e-2, "text"]))
        False
    """
    return _compare("tree_allclose", pytrees, True, (rtol, atol))
