"""Functions whose first parameter has a name in Equinox, by which programs may give it."""

from collections.abc import Callable
from typing import Any

from ... import transforms


def filter_eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`vernal.filter_eval_shape`.

    Args:
        fun: the function.
        *args: as there.
        **kwargs: as there.

    Returns:
        As there.
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
        *args: as there.
        result_shape_dtypes: as there.
        sharding: as there.
        vmap_method: as there.
        **kwargs: as there.

    Returns:
        As there.
    """
    return transforms.filter_pure_callback(
        callback,
        *args,
        result_shape_dtypes=result_shape_dtypes,
        sharding=sharding,
        vmap_method=vmap_method,
        **kwargs,
    )
