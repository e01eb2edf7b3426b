"""`SpectralNorm`."""

import functools
import math
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..modules import field
from ..trees import check_key
from ._inference import in_inference
from ._layer_arguments import as_flag, check_kind, check_parameter, check_size
from ._mesh import whole
from ._normalised_layer import NormalisedLayer, with_weight
from ._parametrised import resolve
from ._precision import largest_entry, widen
from ._state import State, StatefulLayer, check_state
from ._variable import Variable

# The number of power iterations at construction.
_AT_FIRST = 15
# The number for new vectors, of a weight that was replaced.
_ANEW = 100
# The vectors belong to a weight `W` if `v` is the direction of `W^* u`, as the last call left it for its weight, and
# `u` is nearly the direction of `W v`. A training step turns them a little; for another weight they are arbitrary
# directions, and seldom are both within this cosine.
_SAME = 0.9
# Even then the largest singular value may have a direction in which the vectors have no component. One iteration from a
# vector with a component in every direction gives a lower bound on the norm of the weight: the vectors are lost if it
# exceeds their estimate by the factor `_LOST`. A large training step can raise it by 1.2, and PyTorch follows that with
# a single iteration, so the factor must be larger. In inference no further call improves the vectors: there the bound
# takes `_BEFORE` iterations, and the factor `_LARGER` is enough.
_LOST = 1.5
_LARGER, _BEFORE = 1.2, 8
# In few dimensions any two directions are often within `_SAME`. But there the norm itself costs little, so the bound of
# a matrix with a side of at most `_FEW` is its norm; in inference its vectors are lost beyond the factor `_EXACT`.
_FEW, _EXACT = 8, 1.1

Layer = TypeVar("Layer")


class SpectralNorm(StatefulLayer, NormalisedLayer, Generic[Layer]):
    """A layer whose weight is divided by its largest singular value.

    A linear layer then never increases the distance between two inputs. The weight is reshaped to a matrix: its first
    axis by all others. The largest singular value is estimated by power iteration, as `sigma = u^* W v` with unit
    vectors `u` and `v`, which are buffers (see `vernal.field`): each call while training improves them, and inference
    uses them as they are. The new vectors are returned by `vernal.nn.apply`, or in `state`. Gradients flow through
    `sigma`, with `u` and `v` constant.

    If the weight has been replaced, the call detects that the vectors do not belong to it, and finds new ones first.
    A new weight that resembles the old one may pass for a training step, which PyTorch follows by the next iteration
    alone, and so does this layer: the norm is then above one until the vectors have caught up, which they do only while
    training. It is up to 1.5 in training, and less in inference, which looks closer: up to 1.2, and up to 1.1 where the
    matrix has a side of at most 8.

    T. Miyato, T. Kataoka, M. Koyama and Y. Yoshida, "Spectral Normalization for Generative Adversarial Networks", ICLR
    2018, arXiv:1802.05957.

    Args:
        layer: the layer.
        weight_name: the name of its weight.
        num_power_iterations: the number of power iterations at each call while training; construction takes 15.
        eps: the smallest length by which a vector is divided to normalise it, in units of the largest entry of the
            weight.
        inference: True leaves `u` and `v` as they are.
        key: a JAX random key for the initial `v`.

    Attributes:
        layer: as given, with its own weight.
        vectors: the `Variable` that holds `(u, v)`.

    Raises:
        ValueError: if the layer has no such weight, or the weight has no axes; if `num_power_iterations` is not a
            positive integer.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
        >>> normed = nn.SpectralNorm(layer, key=jax.random.key(1))
        >>> y, normed = nn.apply(normed, jnp.ones(3))
        >>> sigma = jnp.linalg.svd(layer.weight, compute_uv=False)[0]
        >>> print(jnp.allclose(y, layer(jnp.ones(3)) / sigma, rtol=1e-3))
        True
    """

    layer: Layer
    vectors: Variable
    inference: bool
    weight_name: str = field(static=True)
    num_power_iterations: int = field(static=True)
    eps: float = field(static=True)

    def __init__(
        self,
        layer: Layer,
        weight_name: str = "weight",
        num_power_iterations: int = 1,
        eps: float = 1e-12,
        inference: bool = False,
        *,
        key: PRNGKeyArray,
    ):
        self.layer = layer
        self.weight_name = weight_name
        self.num_power_iterations = check_size(
            "SpectralNorm", "num_power_iterations", num_power_iterations
        )
        self.eps = eps
        self.inference = as_flag(type(self).__name__, "inference", inference)
        weight = self.own_weight(0)
        _, matrix = _in_parts(widen(weight))
        key = check_key("SpectralNorm", key)
        dtype = self._dtype_of_vectors(weight, matrix)
        v = jax.random.normal(key, matrix.shape[1:], dtype).astype(matrix.dtype)
        u, v = _power_iteration(matrix, _unit(v, eps), _AT_FIRST, eps)
        self.vectors = Variable((u.astype(dtype), v.astype(dtype)))

    @jax.named_scope("vernal.nn.SpectralNorm")
    def __call__(
        self,
        x: Any,
        *args: Any,
        state: State | None = None,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> Any:
        """Calls the layer with the normalised weight.

        Args:
            x: the input of the layer.
            *args: further arguments of the layer, such as the hidden state of a cell. The last may be the `state`.
            state: the state that `vernal.nn.make_with_state` returned, for callers that pass the state explicitly.
            key: passed on to the layer, if given.
            inference: overrides this layer's own setting for this call.

        Returns:
            What the layer returns; with `state`, a pair of this and the new state.

        Raises:
            RuntimeError: while training, outside of `vernal.nn.apply` and without `state`: the new vectors would be
                lost.
        """
        if args and isinstance(args[-1], State):
            args, state = args[:-1], args[-1]
        check_state(self, state)
        layer = resolve(self.layer)
        weight = getattr(layer, self.weight_name)
        weight, state = self._divided(weight, state, inference)
        layer = with_weight(layer, self.weight_name, weight)
        y = layer(x, *args) if key is None else layer(x, *args, key=key)
        return y if state is None else (y, state)

    def normalised(self, weight: Array) -> Array:
        """The weight that the layer uses. While training, inside `vernal.nn.apply`, this updates the vectors.

        Args:
            weight: the layer's own.

        Returns:
            The weight divided by its largest singular value.
        """
        return self._divided(weight, None, None)[0]

    def _divided(
        self, weight: Array, state: State | None, inference: Any
    ) -> tuple[Array, State | None]:
        # Widened once: otherwise two gradients would be summed in half precision, where they may overflow.
        check_kind("SpectralNorm", self.weight_name, weight, jnp.inexact)
        wide = widen(weight)
        largest, matrix = _in_parts(wide)
        old = self.vectors.value if state is None else state.get(self.vectors)
        kind = jnp.complexfloating if jnp.iscomplexobj(matrix) else jnp.floating
        for i, vector in enumerate(old):
            check_parameter("SpectralNorm", f"vectors.{i}", vector, (matrix.shape[i],))
            check_kind("SpectralNorm", f"vectors.{i}", vector, kind)
        u, v = (whole(vector).astype(matrix.dtype) for vector in old)
        trains, fixed = not in_inference(self, [self.vectors], inference), lax.stop_gradient(matrix)
        is_other = _is_other(fixed, u, v)
        if trains:
            u, v = _power_iteration(fixed, v, self.num_power_iterations, self.eps)
        u, v = self._fitting(fixed, u, v, is_other, trains)
        if trains:
            new = u.astype(old[0].dtype), v.astype(old[1].dtype)
            if state is None:
                wide = self.vectors.update(new, wide)
            else:
                state = state.set(self.vectors, new)
        sigma = jnp.vdot(u, matrix @ v).real
        # A weight of zeros stays zero. The barrier is needed because XLA would multiply `sigma` by the scale of the
        # weight, which may overflow.
        scale = lax.optimization_barrier(1 / jnp.where(sigma == 0, 1, sigma)).astype(wide.dtype)
        return (wide / largest * scale).astype(weight.dtype), state

    def _dtype_of_vectors(self, weight: Array, matrix: Array) -> Any:
        """In which dtype they are drawn and kept. (In `vernal.compat`: that of the weight.)"""
        return matrix.dtype

    def _fitting(
        self, matrix: Array, u: Array, v: Array, is_other: Array, trains: bool
    ) -> tuple[Array, Array]:
        """The vectors, or new ones if the weight was replaced. (In `vernal.compat`: always the vectors.)"""
        few = min(matrix.shape) <= _FEW
        lost = _LOST if trains else _EXACT if few else _LARGER
        before = None if few else 1 if trains else _BEFORE
        return _belonging(matrix, u, v, is_other, self.eps, lost, before)


def _in_parts(weight: Array) -> tuple[Array, Array]:
    """The largest entry of a weight, and the weight divided by it as a matrix."""
    matrix = whole(weight).reshape(weight.shape[0], math.prod(weight.shape[1:]))
    largest = largest_entry(matrix)[0, 0]
    largest = jnp.where(largest == 0, 1, largest).astype(matrix.dtype)
    return largest, matrix / largest


def _length(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.abs(x) ** 2))


def _unit(x: Array, eps: float) -> Array:
    return x / jnp.maximum(_length(x), eps).astype(x.dtype)


def _is_unit(v: Array) -> Array:
    """Whether `v` is a unit vector, up to rounding, rather than zero, very short or not finite."""
    return jnp.sum(jnp.abs(v) ** 2) > 0.5


@functools.partial(jax.jit, static_argnames=("times", "eps"))
def _power_iteration(matrix: Array, v: Array, times: int, eps: float) -> tuple[Array, Array]:
    """The vectors `u` and `v` after some iterations from `v`. Compiled, because layers are mostly built outside of
    compiled functions."""

    def step(_: Any, vectors: tuple[Array, Array]) -> tuple[Array, Array]:
        v = vectors[1]
        u = _unit(matrix @ v, eps)
        new = _unit(matrix.conj().T @ u, eps)
        # Vectors that followed a weight of zeros, or one with a NaN, could not recover.
        return jnp.where(jnp.isfinite(u), u, 0), jnp.where(_is_unit(new), new, v)

    # The first iteration by itself, because it has no `u` yet.
    some = jnp.cos(jnp.arange(v.size)).astype(v.dtype)
    vectors = step(0, (v, jnp.where(_is_unit(v), v, _unit(some, eps))))
    return vectors if times == 1 else lax.fori_loop(1, times, step, vectors)


def _is_other(matrix: Array, u: Array, v: Array) -> Array:
    """Whether the vectors belong to another matrix, or have no direction."""

    def apart(a: Array, unit: Array) -> Array:
        return jnp.vdot(a, unit).real < _SAME * _length(a)

    return ~_is_unit(u) | apart(matrix.conj().T @ u, v) | apart(matrix @ v, u)


@functools.partial(jax.jit, static_argnames=("eps", "lost", "before"))
def _belonging(
    matrix: Array, u: Array, v: Array, is_other: Array, eps: float, lost: float, before: int | None
) -> tuple[Array, Array]:
    """The vectors as they are, or new ones if the matrix is another one, or is larger in another direction.

    `before` is the number of iterations for the bound, or None to compute the norm itself.
    """
    if matrix.size == 0:
        return u, v
    if before is None:
        start, least = _exact(matrix, eps)
    else:
        start, least = _in_every_direction(matrix, before, eps)
    size = jnp.abs(jnp.vdot(u, matrix @ v))
    # For a weight of zeros, or one with a NaN, there are no better vectors.
    is_lost = (is_other | (least > lost * size)) & (least > 0) & jnp.isfinite(least)
    if before is None:
        new = _power_iteration(matrix, start, 1, eps)
        return jnp.where(is_lost, new[0], u), jnp.where(is_lost, new[1], v)
    return lax.fori_loop(
        0,
        jnp.where(is_lost, _ANEW, 0),
        lambda _, vectors: _power_iteration(matrix, vectors[1], 1, eps),
        (u, jnp.where(is_lost, start, v)),
    )


def _in_every_direction(matrix: Array, before: int, eps: float) -> tuple[Array, Array]:
    """A vector with a component in every direction, mostly the longest row; and a lower bound on the norm."""
    rows = jnp.sum(jnp.abs(matrix) ** 2, axis=1)
    longest = _unit(matrix[jnp.argmax(rows)].conj(), eps)
    some = _unit(jnp.cos(jnp.arange(matrix.shape[1])).astype(matrix.dtype), eps)
    begun = _power_iteration(matrix, some, before, eps)[1]
    sizes = [_length(matrix @ x) for x in (longest, begun)]
    return _unit(longest + some, eps), jnp.maximum(*sizes)


def _exact(matrix: Array, eps: float) -> tuple[Array, Array]:
    """The direction `v` in which a matrix with a short side is largest, and its norm, to half a percent.

    A high power of `W W^*`, by squaring, is nearly a projection on the largest directions: its longest column is one.
    """
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.conj().T
    power = wide @ wide.conj().T
    for _ in range(10):
        power = power / jnp.maximum(largest_entry(power), eps).astype(power.dtype)
        power = power @ power
    u = _unit(power[:, jnp.argmax(jnp.diagonal(power).real)], eps)
    v = u if wide is not matrix else _unit(wide.conj().T @ u, eps)
    return v, _length(matrix @ v)
