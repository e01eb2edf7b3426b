"""The derivatives with Equinox's convention: None stands where nothing was differentiated."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ... import transforms
from ...modules import module_update_wrapper
from ...show import short, type_error, value_error


def _with_none(transform: Callable[..., Any], fn: Any, options: dict[str, Any]) -> Any:
    if fn is None:
        return lambda fn: _with_none(transform, fn, options)
    return module_update_wrapper(dataclasses.replace(transform(fn, **options), missing=None))


def _holomorphic(fn: Any, has_aux: bool, only_gradient: bool) -> Any:
    """The derivative of a holomorphic function."""

    @functools.wraps(fn)
    def differentiated(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        value, pull, *aux = filter_vjp(lambda x: fn(x, *args, **kwargs), x, has_aux=has_aux)
        (gradient,) = pull(jnp.ones_like(value))
        for leaf in (value, *jax.tree.leaves(gradient)):
            if not jnp.iscomplexobj(leaf):
                raise type_error(
                    "a holomorphic derivative is taken of complex arrays only",
                    where="filter_grad(fn, holomorphic=True)",
                    expected="complex arrays only, and a complex result",
                    got=short(leaf),
                    instead="leave holomorphic=True out, or x.astype(complex)",
                )
        if only_gradient:
            return (gradient, *aux) if has_aux else gradient
        return ((value, *aux) if has_aux else value), gradient

    return differentiated


def _gradient(transform: Callable[..., Any], fn: Any, only: bool, options: dict[str, Any]) -> Any:
    """A gradient with the options of `jax.grad`."""
    if fn is None:
        return lambda fn: _gradient(transform, fn, only, options)
    options = dict(options)
    if "argnums" in options:
        # Of the class that Equinox raises.
        raise value_error(
            "filter_grad has no option `argnums`",
            where="filter_grad(fn, argnums=...)",
            expected="derivatives with respect to the first argument",
            got=f"argnums={options['argnums']!r}",
            instead="collect what to differentiate in a tuple, and pass that as the first argument",
        )
    # Integers never are differentiated.
    options.pop("allow_int", None)
    if options.pop("holomorphic", False):
        return _holomorphic(fn, options["has_aux"], only)
    return _with_none(transform, fn, options)


def filter_grad(fun: Any = None, *, has_aux: bool = False, **options: Any) -> Any:
    """`vernal.filter_grad` with None for `vernal.NoGradient`, also if there is nothing else.

    Args:
        fun: the function.
        has_aux: as in `vernal.filter_grad`.
        **options: as in `vernal.filter_grad`; `holomorphic` and `allow_int` as for `jax.grad`.

    Returns:
        As in `vernal.filter_grad`.

    Raises:
        TypeError: if `holomorphic` is true and an array or the result is not complex.
        ValueError: if `argnums` is given.
    """
    return _gradient(transforms.filter_grad, fun, True, {"has_aux": has_aux, **options})


def filter_value_and_grad(fun: Any = None, *, has_aux: bool = False, **options: Any) -> Any:
    """`vernal.filter_value_and_grad` with None for `vernal.NoGradient`, also if there is nothing else.

    Args:
        fun: the function.
        has_aux: as in `vernal.filter_value_and_grad`.
        **options: as for `filter_grad`.

    Returns:
        As in `vernal.filter_value_and_grad`.

    Raises:
        TypeError: as for `filter_grad`.
        ValueError: as for `filter_grad`.
    """
    return _gradient(transforms.filter_value_and_grad, fun, False, {"has_aux": has_aux, **options})


def filter_jacfwd(fun: Any = None, has_aux: bool = False, **options: Any) -> Any:
    """`vernal.filter_jacfwd` with None for `vernal.NoGradient`.

    Args:
        fun: the function.
        has_aux: as in `vernal.filter_jacfwd`.
        **options: as in `vernal.filter_jacfwd`.

    Returns:
        As in `vernal.filter_jacfwd`.
    """
    return _with_none(transforms.filter_jacfwd, fun, {"has_aux": has_aux, **options})


def filter_jacrev(fun: Any = None, has_aux: bool = False, **options: Any) -> Any:
    """`vernal.filter_jacrev` with None for `vernal.NoGradient`.

    Args:
        fun: the function.
        has_aux: as in `vernal.filter_jacrev`.
        **options: as in `vernal.filter_jacrev`.

    Returns:
        As in `vernal.filter_jacrev`.
    """
    return _with_none(transforms.filter_jacrev, fun, {"has_aux": has_aux, **options})


def filter_hessian(fun: Any = None, has_aux: bool = False, **options: Any) -> Any:
    """`vernal.filter_hessian` with None for `vernal.NoGradient`.

    Args:
        fun: the function.
        has_aux: as in `vernal.filter_hessian`.
        **options: as in `vernal.filter_hessian`.

    Returns:
        As in `vernal.filter_hessian`.
    """
    return _with_none(transforms.filter_hessian, fun, {"has_aux": has_aux, **options})


def filter_vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """`vernal.filter_vjp` with None for `vernal.NoGradient`.

    Args:
        fun: the function.
        *primals: as in `vernal.filter_vjp`.
        has_aux: as in `vernal.filter_vjp`.

    Returns:
        As in `vernal.filter_vjp`.
    """
    out, vjp_fn, *aux = transforms.filter_vjp(fun, *primals, has_aux=has_aux)
    return out, dataclasses.replace(vjp_fn, missing=None), *aux
