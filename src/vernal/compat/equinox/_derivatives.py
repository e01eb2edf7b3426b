"""The derivatives with Equinox's convention: None stands where nothing was differentiated."""

import dataclasses
from collections.abc import Callable
from typing import Any

from ... import transforms
from ...modules import module_update_wrapper


def _with_none(transform: Callable[..., Any], fn: Any, options: dict[str, Any]) -> Any:
    if fn is None:
        return lambda fn: _with_none(transform, fn, options)
    return module_update_wrapper(dataclasses.replace(transform(fn, **options), missing=None))


def filter_grad(fun: Any = None, *, has_aux: bool = False, **options: Any) -> Any:
    """`vernal.filter_grad` with None for `vernal.NoGradient`.

    Args:
        fun: the function.
        has_aux: as there.
        **options: as there.

    Returns:
        As there.
    """
    return _with_none(transforms.filter_grad, fun, {"has_aux": has_aux, **options})


def filter_value_and_grad(fun: Any = None, *, has_aux: bool = False, **options: Any) -> Any:
    """`vernal.filter_value_and_grad` with None for `vernal.NoGradient`.

    Args:
        fun: the function.
        has_aux: as there.
        **options: as there.

    Returns:
        As there.
    """
    return _with_none(transforms.filter_value_and_grad, fun, {"has_aux": has_aux, **options})


def filter_jacfwd(fun: Any = None, has_aux: bool = False, **options: Any) -> Any:
    """`vernal.filter_jacfwd` with None for `vernal.NoGradient`.

    Args:
        fun: the function.
        has_aux: as there.
        **options: as there.

    Returns:
        As there.
    """
    return _with_none(transforms.filter_jacfwd, fun, {"has_aux": has_aux, **options})


def filter_jacrev(fun: Any = None, has_aux: bool = False, **options: Any) -> Any:
    """`vernal.filter_jacrev` with None for `vernal.NoGradient`.

    Args:
        fun: the function.
        has_aux: as there.
        **options: as there.

    Returns:
        As there.
    """
    return _with_none(transforms.filter_jacrev, fun, {"has_aux": has_aux, **options})


def filter_hessian(fun: Any = None, has_aux: bool = False, **options: Any) -> Any:
    """`vernal.filter_hessian` with None for `vernal.NoGradient`.

    Args:
        fun: the function.
        has_aux: as there.
        **options: as there.

    Returns:
        As there.
    """
    return _with_none(transforms.filter_hessian, fun, {"has_aux": has_aux, **options})


def filter_vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """`vernal.filter_vjp` with None for `vernal.NoGradient`.

    Args:
        fun: the function.
        *primals: as there.
        has_aux: as there.

    Returns:
        As there.
    """
    out, vjp_fn, *aux = transforms.filter_vjp(fun, *primals, has_aux=has_aux)
    return out, dataclasses.replace(vjp_fn, missing=None), *aux
