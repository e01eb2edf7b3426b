"""Taps: the old entries, and their weights, that make up each entry of a resized axis; and how to apply them.

Resizing is linear, and each new entry is a sum of few old ones: its *taps*. Their places and weights depend only on
sizes, so NumPy computes them in double precision while the program is traced. The transpose of such a map is a map of
the same kind, from the new axis to the old. JAX is given it explicitly: its own transpose, a scatter-add, takes twenty
times as long on a CPU. A product with the matrix of all weights would take four times as long, and turn a whole row
into NaN if one of its entries is infinite.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..primitives import linear_call

Method = Literal["nearest", "nearest-exact", "linear", "cubic"]

# With more taps than this, one operation for all of them: one operation per tap would make a long program.
_MANY = 8


class Taps(NamedTuple):
    """For each entry of a new axis, places on the old one and their weights: two arrays of shape `(new, taps)`."""

    places: np.ndarray
    weights: np.ndarray


def taps(
    old: int, new: int, scale: float | None, method: Method, align_corners: bool, antialias: bool
) -> Taps:
    """The taps of an axis that is resized from `old` entries to `new`.

    The positions are PyTorch's: entries are the centres of intervals of equal length; with `align_corners`, the first
    and last entries stay in place. `scale` is the factor that `new` was computed from, if any; positions then use it,
    although `new / old` may differ from it.
    """
    at = np.arange(new)
    # The number of old entries per new one, as a fraction, so that integer quotients are exact.
    above, below = (old, new) if scale is None else (1.0, scale)
    if method == "nearest":
        return _within(np.floor(at * above / below)[:, None], np.ones((new, 1)), old)
    if method == "nearest-exact":
        return _within(np.floor((at + 0.5) * above / below)[:, None], np.ones((new, 1)), old)
    if antialias:
        return _averages(old, (at + 0.5) * above / below, above / below, method)
    position = (
        at * (old - 1) / max(new - 1, 1) if align_corners else (at + 0.5) * above / below - 0.5
    )
    if method == "linear":
        position = np.clip(position, 0, old - 1)
    steps = np.arange(2) if method == "linear" else np.arange(-1, 3)
    places = np.floor(position)[:, None] + steps
    return _within(places, _kernel(places - position[:, None], method, -0.75), old)


def _kernel(distance: np.ndarray, method: Method, a: float) -> np.ndarray:
    """The weight of an entry at this distance: a triangle, or Keys' cubic with the parameter `a`."""
    d = np.abs(distance)
    if method == "linear":
        return np.maximum(1 - d, 0)
    near = ((a + 2) * d - (a + 3)) * d**2 + 1
    far = (((d - 5) * d + 8) * d - 4) * a
    return np.where(d < 1, near, np.where(d < 2, far, 0))


def _averages(old: int, middle: np.ndarray, ratio: float, method: Method) -> Taps:
    """Taps with a kernel that is as wide as the new entries, if they are wider than the old ones."""
    width = max(ratio, 1.0)
    # With a = -0.5, where the cubic without antialiasing has -0.75: both are PyTorch's.
    reach = width * (1 if method == "linear" else 2)
    first = np.maximum(np.floor(middle - reach + 0.5), 0)
    last = np.minimum(np.floor(middle + reach + 0.5), old)
    places = first[:, None] + np.arange(int((last - first).max()))
    weights = _kernel((places + 0.5 - middle[:, None]) / width, method, -0.5)
    weights = np.where(places < last[:, None], weights, 0)
    return _within(places, weights / weights.sum(axis=1, keepdims=True), old)


def _within(places: np.ndarray, weights: np.ndarray, old: int) -> Taps:
    """The taps with places clipped to the axis: beyond its ends, the end entries are repeated."""
    return Taps(np.clip(places, 0, old - 1).astype(np.int32), weights)


def _transposed(forward: Taps, old: int) -> Taps:
    """The taps of the transpose: for each entry of the old axis, the new entries that it is a tap of."""
    new, count = forward.places.shape
    heavy = forward.weights.ravel() != 0
    old_places = forward.places.ravel()[heavy]
    order = np.argsort(old_places, kind="stable")
    old_places = old_places[order]
    counts = np.bincount(old_places, minlength=old)
    column = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    places = np.zeros((old, max(1, counts.max())), np.int32)
    weights = np.zeros(places.shape)
    places[old_places, column] = np.repeat(np.arange(new), count)[heavy][order]
    weights[old_places, column] = forward.weights.ravel()[heavy][order]
    return Taps(places, weights)


def resized(x: Array, axis: int, by: Taps) -> Array:
    """A floating-point array with one axis resized."""
    forward = functools.partial(_applied, axis=axis, by=by)
    backward = functools.partial(_applied, axis=axis, by=_transposed(by, x.shape[axis]))
    return linear_call(forward, backward, (), x)


def _applied(_: Any, x: Array, axis: int, by: Taps) -> Array:
    places, weights = by
    if places.shape[1] > _MANY:
        return jnp.sum(_weighted(x, axis, places, weights), axis=axis + 1)
    parts = [_weighted(x, axis, places[:, k], weights[:, k]) for k in range(places.shape[1])]
    return functools.reduce(jnp.add, parts)


def _weighted(x: Array, axis: int, places: np.ndarray, weights: np.ndarray) -> Array:
    """The entries at these places of an axis, times their weights."""
    y = picked(x, axis, places)
    shape = (1,) * axis + weights.shape + (1,) * (x.ndim - axis - 1)
    product = y * jnp.asarray(weights.reshape(shape), x.dtype)
    if weights.all():
        return product
    # Not the product, which would be NaN for an infinite entry of weight zero.
    return jnp.where((weights != 0).reshape(shape), product, 0)


def picked(x: Array, axis: int, places: np.ndarray) -> Array:
    """The entries at these places of an axis; the places must be on the axis."""
    return jnp.take(x, jnp.asarray(places), axis=axis, mode="clip")
