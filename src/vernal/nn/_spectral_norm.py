"""`SpectralNorm`."""

import functools
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..modules import field
from ._inference import in_inference
from ._layer_arguments import check_key, check_kind, check_parameter, check_size
from ._mesh import whole
from ._normalised_layer import NormalisedLayer, with_weight
from ._parametrised import resolve
from ._precision import largest_entry, widen
from ._state import State, StatefulLayer, check_state
from ._variable import Variable

# How many power iterations there are at construction.
_AT_FIRST = 15
# Vectors are far off if one more iteration makes the estimate larger by more than the first factor. Then there are as
# many as at construction, and more, up to the last number, while each makes it larger by more than the second.
_FAR, _NEAR, _MOST = 1.1, 1.0001, 200
# Vectors are lost, and begun anew, if the weight is larger than their estimate by this factor. A large training step
# makes it 1.2 times larger, and PyTorch follows that with a single iteration, so it must be more.
_LOST = 1.5
# How large the weight is at least is said by one iteration that begins with a part of every direction. In inference no
# further call brings the vectors nearer: there it is said by so many iterations, and this factor is enough.
_LARGER, _BEFORE = 1.2, 8


Layer = TypeVar("Layer")


class SpectralNorm(StatefulLayer, NormalisedLayer, Generic[Layer]):
    """A layer whose weight is divided by its largest singular value.

    So a linear layer makes no difference between two inputs larger. The weight is taken as a matrix: its first axis
    against all others. The largest singular value is estimated by power iteration, as `sigma = u^* W v`
    with unit vectors `u` and `v` that are buffers (see `vernal.field`): each call while training brings them nearer,
    and inference takes them as they are. If they are far off, because the weight has been replaced (one iteration makes
    `sigma` more than 10% larger, or some that begin with a part of every direction find a larger one), each call
    finds better ones first. (Another direction that was made the largest by hand may be missed while it is less than a
    sixth larger, and in training for some calls. So after `vernal.nn.initialise`, or with other new weights, the norm
    may be up to 1.5 for some calls while training; a `SpectralNorm` of the new layer begins with vectors that fit.)
    Gradients go through `sigma`, with `u` and `v` constant. The
    new vectors come back from `vernal.nn.apply`, or through `state`.

    T. Miyato, T. Kataoka, M. Koyama and Y. Yoshida, "Spectral Normalization for Generative Adversarial Networks", ICLR
    2018, arXiv:1802.05957.

    Args:
        layer: the layer.
        weight_name: the name of its weight.
        num_power_iterations: how many at each call while training; there are 15 at construction.
        eps: the least length that a vector is divided by to make it a unit vector, in units of the largest entry of the
            weight.
        inference: True leaves `u` and `v` as they are.
        key: for the random `v` to begin with.

    Attributes:
        layer: as given, with its own weight.
        vectors: the variable that holds `(u, v)`.

    Raises:
        ValueError: if the layer has no such weight, or the weight no axis; if `num_power_iterations` is not a positive
            integer.

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
        self.inference = inference
        _, matrix = _in_parts(widen(self.own_weight(0)))
        key = check_key("SpectralNorm", key)
        v = _unit(jax.random.normal(key, matrix.shape[1:], matrix.dtype), eps)
        self.vectors = Variable(_power_iteration(matrix, v, _AT_FIRST, eps))

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
            x: what the layer takes.
            *args: likewise, such as the hidden state of a cell. The last may be the `state`.
            state: the state that `vernal.nn.make_with_state` gave, for who threads it explicitly.
            key: handed on to the layer, if given.
            inference: overrides this layer's own setting, for this call.

        Returns:
            What the layer returns. With `state`: that and the new state.

        Raises:
            RuntimeError: while training, if nobody takes the new vectors: outside of `vernal.nn.apply` and without
                `state`.
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
        """What the layer uses. While training, this moves the vectors, inside `vernal.nn.apply`.

        Args:
            weight: the layer's own.

        Returns:
            The weight, divided by its largest singular value.
        """
        return self._divided(weight, None, None)[0]

    def _divided(
        self, weight: Array, state: State | None, inference: Any
    ) -> tuple[Array, State | None]:
        # Once: two gradients that are too large for half precision would have no sum there.
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
        if trains:
            u, v = _power_iteration(fixed, v, self.num_power_iterations, self.eps)
        u, v = self._fitting(fixed, u, v, trains)
        if trains:
            new = u.astype(old[0].dtype), v.astype(old[1].dtype)
            if state is None:
                wide = self.vectors.update(new, wide)
            else:
                state = state.set(self.vectors, new)
        sigma = jnp.vdot(u, matrix @ v).real
        # A weight of zeros stays one.
        # XLA would multiply `sigma` by what the weight is scaled by, which may be beyond the dtype.
        scale = lax.optimization_barrier(1 / jnp.where(sigma == 0, 1, sigma)).astype(wide.dtype)
        return (wide / largest * scale).astype(weight.dtype), state

    def _fitting(self, matrix: Array, u: Array, v: Array, trains: bool) -> tuple[Array, Array]:
        """The vectors, or better ones if the weight was replaced. (In `vernal.compat`: as they are.)"""
        lost, before = (_LOST, 1) if trains else (_LARGER, _BEFORE)
        return _not_far_off(matrix, u, v, self.eps, lost, before)


def _in_parts(weight: Array) -> tuple[Array, Array]:
    """The largest entry of a weight, and the weight over it as a matrix."""
    matrix = whole(weight).reshape(weight.shape[0], -1)
    largest = largest_entry(matrix)[0, 0]
    largest = jnp.where(largest == 0, 1, largest).astype(matrix.dtype)
    return largest, matrix / largest


def _unit(x: Array, eps: float) -> Array:
    return x / jnp.maximum(jnp.sqrt(jnp.sum(jnp.abs(x) ** 2)), eps).astype(x.dtype)


def _is_unit(v: Array) -> Array:
    """Whether it is a unit vector, up to rounding. What is not is of zeros, very short, or not finite."""
    return jnp.sum(jnp.abs(v) ** 2) > 0.5


@functools.partial(jax.jit, static_argnames=("times", "eps"))
def _power_iteration(matrix: Array, v: Array, times: int, eps: float) -> tuple[Array, Array]:
    """The vectors `u` and `v` after some iterations, which begin with `v`. Compiled, because layers are mostly built
    outside of compiled functions."""

    def step(_: Any, vectors: tuple[Array, Array]) -> tuple[Array, Array]:
        v = vectors[1]
        u = _unit(matrix @ v, eps)
        new = _unit(matrix.conj().T @ u, eps)
        # From a weight of zeros, or with a NaN, there is no way back for vectors that follow it.
        return jnp.where(jnp.isfinite(u), u, 0), jnp.where(_is_unit(new), new, v)

    # The first by itself: there is no `u` before it.
    some = jnp.cos(jnp.arange(v.size)).astype(v.dtype)
    vectors = step(0, (v, jnp.where(_is_unit(v), v, _unit(some, eps))))
    return vectors if times == 1 else lax.fori_loop(1, times, step, vectors)


@functools.partial(jax.jit, static_argnames=("eps", "lost", "before"))
def _not_far_off(
    matrix: Array, u: Array, v: Array, eps: float, lost: float, before: int
) -> tuple[Array, Array]:
    """The vectors as they are if they belong to this matrix, and otherwise better ones."""

    def with_size(u: Array, v: Array) -> tuple[Array, Array, Array]:
        return u, v, jnp.abs(jnp.vdot(u, matrix @ v))

    def anew() -> tuple[Array, Array]:
        """A vector with a part of every direction, mostly the longest row; and a size that the weight has at least."""
        rows = jnp.sum(jnp.abs(matrix) ** 2, axis=1)
        longest = _unit(matrix[jnp.argmax(rows)].conj(), eps)
        some = _unit(jnp.cos(jnp.arange(v.size)).astype(v.dtype), eps)
        begun = _power_iteration(matrix, some, before, eps)[1]
        sizes = [jnp.sqrt(jnp.sum(jnp.abs(matrix @ x) ** 2)) for x in (longest, begun)]
        return _unit(longest + 0.1 * some, eps), jnp.maximum(*sizes)

    def going(state: Any) -> Array:
        count, (*_, before), (*_, after) = state
        grows = after > jnp.where(count == 0, _FAR, _NEAR).astype(before.dtype) * before
        return (grows & (count < _MOST)) | ((count > 0) & (count < _AT_FIRST))

    def more(state: Any) -> Any:
        count, _, (u, v, size) = state
        return count + 1, (u, v, size), with_size(*_power_iteration(matrix, v, 1, eps))

    # Vectors without a part of the largest direction never find it.
    new, size = anew()
    is_lost = size > lost * jnp.abs(jnp.vdot(u, matrix @ v))
    v = jnp.where(is_lost, new, v)
    count = is_lost.astype(jnp.int32)
    start = count, with_size(u, v), with_size(*_power_iteration(matrix, v, 1, eps))
    _, (u, v, _), _ = lax.while_loop(going, more, start)
    return u, v
