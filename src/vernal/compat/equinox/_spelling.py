"""Functions whose first parameter can be passed by name in Equinox."""

from collections.abc import Callable
from typing import Any

from ... import transforms


def filter_eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`vernal.filter_eval_shape`.

    Args:
        fun: the function.
        *args: as in `vernal.filter_eval_shape`.
        **kwargs: as in `vernal.filter_eval_shape`.

    Returns:
        As in `vernal.filter_eval_shape`.
    """
    return transforms.filter_eval_shape(fun, *args, **kwargs)


def filter_pure_callback(
    callback: Callable[..., Any],
    *args: Any,
    result_shape_dtypes: Any,
    sharding: Any = None,
    vmap_method: str | None = None,
    **kwargs: Any,
) -> Any:
    """`vernal.filter_pure_callback`.

    Args:
        callback: the function.
        *args: as in `vernal.filter_pure_callback`.
        result_shape_dtypes: as in `vernal.filter_pure_callback`.
        sharding: as in `vernal.filter_pure_callback`.
        vmap_method: as in `vernal.filter_pure_callback`.
        **kwargs: as in `vernal.filter_pure_callback`.

    Returns:
        As in `vernal.filter_pure_callback`.
    """
    return transforms.filter_pure_callback(
        callback,
        *args,
        result_shape_dtypes=result_shape_dtypes,
        sharding=sharding,
        vmap_method=vmap_method,
        **kwargs,
    )
