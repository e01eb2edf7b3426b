"""`interpolate` and `Upsample`: resize the spatial axes of arrays."""

import math
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import short, value_error
from ._layer_arguments import as_flag, check_shape, image_shape
from ._precision import narrow, widen
from ._taps import Method, picked, resized, taps

Sizes = tuple[int, ...]
Scales = tuple[float, ...]


def _checked(
    name: str, size: Any, scale: Any, method: Any, align_corners: bool, antialias: bool
) -> tuple[Sizes | None, Scales | None]:
    """Refuses settings that do not go together; returns the size and the scale as tuples."""
    as_flag(name, "align_corners", align_corners)
    as_flag(name, "antialias", antialias)
    if (size is None) == (scale is None):
        raise value_error(
            f"`{name}` takes one of `size` and `scale`",
            where=f"{name}(size=..., scale=...)",
            expected="either `size` or `scale`",
            got="neither" if size is None else "both",
        )
    if method not in get_args(Method):
        raise value_error(
            f"`{name}` was given an unknown method",
            where="argument `method`",
            expected=", ".join(map(repr, get_args(Method))),
            got=repr(method),
            instead='"linear" for the modes that PyTorch calls linear, bilinear and trilinear, "cubic" for bicubic',
        )
    smooth = method in ("linear", "cubic")
    if (align_corners or antialias) and not smooth or (align_corners and antialias):
        raise value_error(
            f"these settings of `{name}` cannot be combined",
            where="arguments `method`, `align_corners` and `antialias`",
            expected="one of `align_corners` and `antialias`, with the method 'linear' or 'cubic'",
            got=f"method={method!r}, align_corners={align_corners}, antialias={antialias}",
        )
    if size is not None:
        kinds = int | np.integer
        return tuple(map(int, _listed(name, "size", size, kinds, "integers of at least 1"))), None
    kinds = int | float | np.integer | np.floating
    return None, tuple(map(float, _listed(name, "scale", scale, kinds, "positive numbers")))


def _listed(name: str, argument: str, values: Any, kinds: Any, words: str) -> Sequence[Any]:
    given = values if isinstance(values, Sequence) else ()
    if not given or not all(isinstance(v, kinds) and 0 < v < math.inf for v in given):
        raise value_error(
            f"`{name}` was given an invalid `{argument}`",
            where=f"argument `{argument}`",
            expected=f"a sequence of {words}, one for each of the last axes",
            got=short(values),
            instead=f"{argument}=(2, 2) for images of shape (channels, height, width)",
        )
    return given


def interpolate(
    x: ArrayLike,
    size: Sequence[int] | None = None,
    scale: Sequence[int | float] | None = None,
    *,
    method: Method = "nearest",
    align_corners: bool = False,
    antialias: bool = False,
) -> Array:
    """Resizes the last axes of an array, up or down, as `torch.nn.functional.interpolate` does.

    Entries are values at the centres of cells of equal size. Axes are resized one after the other. Each new entry is a
    weighted sum of old ones; beyond the ends of an axis, the entry at the end is repeated. The length of `size` or
    `scale` is the number of axes that are resized; those in front, such as channels and batches, are unchanged.

    | `method` | PyTorch's mode | each new entry is made of |
    | --- | --- | --- |
    | `"nearest"` | `nearest` | the entry at `floor(i * old / new)`, found exactly |
    | `"nearest-exact"` | `nearest-exact` | the entry in whose cell its middle lies |
    | `"linear"` | `linear`, `bilinear`, `trilinear` | the two nearest |
    | `"cubic"` | `bicubic`, here for any number of axes | the four nearest, by Keys' cubic with a = -0.75 |

    R. Keys, "Cubic convolution interpolation for digital image processing", IEEE TASSP 29 (1981),
    doi:10.1109/TASSP.1981.1163711.

    Args:
        x: an array whose last axes are spatial, as `(..., channels, *spatial)`.
        size: the new sizes, one for each spatial axis.
        scale: instead of `size`, the scale factor of each spatial axis. A new size is the old one times the factor,
            rounded down. The factor, not the quotient of the sizes, determines where the new entries lie, as in PyTorch
            without `recompute_scale_factor`. To recompute it, give `size` instead. (As in PyTorch, the sizes determine
            it where an axis keeps its size with linear or `antialias`, and where an axis of an image keeps or doubles
            its size with `nearest`.)
        method: see above.
        align_corners: for linear and cubic, whether the first and last entries of each axis stay where they are.
        antialias: for linear and cubic, whether each new entry is an average over its whole cell where that is larger
            than an old one (cubic with a = -0.5). Without it, a much smaller image uses only few of the old entries.

    Returns:
        The resized array, of the dtype of `x`, computed in at least float32. (Integers stay integers with the nearest
        methods, and become floats otherwise.)

    Raises:
        ValueError: for settings that do not go together, sizes that are not positive, an `x` with too few axes, or
            an axis without entries, before or after.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> x = jnp.array([[0.0, 1.0, 2.0]])
        >>> nn.interpolate(x, size=(6,))
        Array([[0., 0., 1., 1., 2., 2.]], dtype=float32)
        >>> nn.interpolate(x, size=(5,), method="linear", align_corners=True)
        Array([[0. , 0.5, 1. , 1.5, 2. ]], dtype=float32)
        >>> nn.interpolate(jnp.ones((3, 8, 8)), scale=(2, 0.5), method="cubic").shape
        (3, 16, 4)
    """
    sizes, scales = _checked("interpolate", size, scale, method, align_corners, antialias)
    return _interpolated(jnp.asarray(x), sizes, scales, method, align_corners, antialias)


@jax.named_scope("vernal.nn.interpolate")
def _interpolated(
    x: Array,
    sizes: Sizes | None,
    scales: Scales | None,
    method: Method,
    align_corners: bool,
    antialias: bool,
) -> Array:
    """`interpolate`, with checked settings."""
    dims = len(sizes or scales or ())
    if x.ndim < dims:
        raise value_error(
            "`interpolate` cannot resize more axes than its input has",
            where="argument `x`",
            expected=f"at least {dims} axes",
            got=f"shape {x.shape}",
        )
    old = x.shape[x.ndim - dims :]
    new = sizes or tuple(math.floor(n * s) for n, s in zip(old, scales or (), strict=True))
    if not all(n > 0 for n in (*old, *new)):
        raise value_error(
            "`interpolate` cannot resize an axis from or to length 0",
            where="argument `x`",
            expected="sizes of at least 1",
            got=f"from {old} to {new}",
        )
    discrete = method.startswith("nearest") and not jnp.issubdtype(x.dtype, jnp.inexact)
    y = x if discrete else widen(x)
    for axis, (n, m) in enumerate(zip(old, new, strict=True)):
        # The cases in which PyTorch ignores the scale.
        by_size = n == m and (antialias or method == "linear")
        by_size |= method == "nearest" and dims == 2 and m in (n, 2 * n)
        axis_scale = None if scales is None or by_size else scales[axis]
        if n == m and axis_scale is None:
            continue
        by = taps(n, m, axis_scale, method, align_corners, antialias)
        at = x.ndim - dims + axis
        y = picked(y, at, by.places[:, 0]) if discrete else resized(y, at, by)
    return narrow(y, x)


class Upsample(Module):
    """`interpolate` as a layer: resizes images, signals or volumes, up or down.

    Args:
        size: the new sizes, one for each spatial axis.
        scale: instead of `size`, the scale factor of each spatial axis.
        method: this and all other arguments are as for `interpolate`.

    Raises:
        ValueError: for settings that do not go together; when called, for an input of the wrong shape.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.Upsample(scale=(2, 2), method="linear")
        >>> layer(jnp.ones((3, 8, 8))).shape
        (3, 16, 16)
    """

    size: tuple[int, ...] | None = field(static=True)
    scale: tuple[float, ...] | None = field(static=True)
    method: Method = field(static=True)
    align_corners: bool = field(static=True)
    antialias: bool = field(static=True)

    def __init__(
        self,
        size: Sequence[int] | None = None,
        scale: Sequence[int | float] | None = None,
        *,
        method: Method = "nearest",
        align_corners: bool = False,
        antialias: bool = False,
    ):
        self.size, self.scale = _checked("Upsample", size, scale, method, align_corners, antialias)
        self.method = method
        self.align_corners = bool(align_corners)
        self.antialias = bool(antialias)

    @jax.named_scope("vernal.nn.Upsample")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """Resizes the spatial axes.

        Args:
            x: shape `(..., channels, *spatial)`, where `...` are batch axes: any number of them, or none.
            key: ignored; here so that all layers are called alike.

        Returns:
            Shape `(..., channels, *new)`, as `interpolate` returns it.
        """
        dims = len(self.size or self.scale or ())
        check_shape("Upsample", x, image_shape("channels", dims))
        return _interpolated(
            jnp.asarray(x), self.size, self.scale, self.method, self.align_corners, self.antialias
        )
