"""`BatchNorm` as in Equinox: with the same defaults, the same results, and the same order of leaves in a file."""

import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .... import nn
from ....modules import field
from ....show import value_error
from ._layers import StatefulLayer
from ._state import StateIndex


class BatchNorm(StatefulLayer, layout="fields"):
    """Normalises by the statistics of the batch, over axes mapped by `jax.vmap`, as in Equinox 0.13.8.

    The running statistics are in a `State`. In mode `"batch"` they start as 0 and 1, and inference divides both by
    `1 - momentum**n`, so the variance is much too large at first. (`vernal.nn.BatchNorm` does not do this.)

    Args:
        input_size: the number of channels, the first axis of one example.
        axis_name: the name, or names, of the axes of the batch.
        eps: added to the variance.
        channelwise_affine: whether to scale and shift each channel by a `weight` and a `bias`.
        momentum: the fraction of the running statistics that is kept at each step.
        inference: True normalises by the running statistics, and does not update them.
        dtype: of all arrays.
        mode: `"ema"` normalises by the running statistics while training too, `"batch"` by those of the batch;
            `"legacy"` is `"ema"` with a warning.

    Raises:
        ValueError: if the mode is unknown.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.compat import equinox as eqx
        >>> norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(1, "batch", mode="ema")
        >>> xs = jnp.array([[0.0], [2.0]])
        >>> over = jax.vmap(norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        >>> ys, state = over(xs, state)
        >>> print(ys.round(3).ravel(), norm.momentum)
        [-1.  1.] 0.99
    """

    weight: Array | None
    bias: Array | None
    ema_first_time_index: StateIndex | None
    ema_state_index: StateIndex | None
    batch_counter: StateIndex | None
    batch_state_index: StateIndex | None
    axis_name: Hashable | Sequence[Hashable]
    inference: bool
    input_size: int = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    momentum: float = field(static=True)
    mode: str = field(static=True)

    def __init__(
        self,
        input_size: int,
        axis_name: Hashable | Sequence[Hashable],
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        momentum: float = 0.99,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        mode: str = "legacy",
    ):
        if mode == "legacy":
            warnings.warn('BatchNorm: give the `mode`; none is mode="ema"', stacklevel=2)
            mode = "ema"
        if mode not in ("ema", "batch"):
            raise value_error(
                "`BatchNorm` was given an unknown mode",
                where="argument `mode`",
                expected="'ema', 'batch' or 'legacy'",
                got=repr(mode),
            )
        real = jnp.result_type(float) if dtype is None else dtype
        self.weight = jnp.ones(input_size, real) if channelwise_affine else None
        self.bias = jnp.zeros(input_size, real) if channelwise_affine else None
        mean, one = jnp.zeros(input_size, real), jnp.ones(input_size, real)
        ema = mode == "ema"
        self.ema_first_time_index = StateIndex(jnp.array(True)) if ema else None
        self.ema_state_index = StateIndex((mean, mean)) if ema else None
        self.batch_counter = None if ema else StateIndex(jnp.array(0))
        self.batch_state_index = None if ema else StateIndex((mean, one))
        self.axis_name = axis_name
        self.inference = inference
        self.input_size = input_size
        self.eps = eps
        self.channelwise_affine = channelwise_affine
        self.momentum = momentum
        self.mode = mode

    @jax.named_scope("eqx.nn.BatchNorm")
    def __call__(
        self,
        x: Array,
        state: nn.State,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> tuple[Array, nn.State]:
        """Normalises one example of a batch.

        Args:
            x: shape `(input_size, ...)`.
            state: the state.
            key: not used; every layer takes one.
            inference: overrides the layer's own setting, for this call.

        Returns:
            An array of the shape of `x`, and the new state.

        Raises:
            NameError: while training, if no surrounding axis has the name.
        """
        inference = self.inference if inference is None else inference
        normalise = self._by_running if self.mode == "ema" else self._by_batch
        (mean, var), state = normalise(x, state, inference)

        def per_channel(values: Array) -> Array:
            return values.reshape(-1, *[1] * (x.ndim - 1))

        y = (x - per_channel(mean)) / per_channel(jnp.sqrt(var + self.eps))
        if self.weight is not None and self.bias is not None:
            y = y * per_channel(self.weight) + per_channel(self.bias)
        return y, state

    def _of_the_batch(self, x: Array) -> tuple[Array, Array]:
        """Mean and biased variance of each channel."""
        axes = tuple(range(1, x.ndim))

        def average(values: Array) -> Array:
            return lax.pmean(jnp.mean(values, axes), self.axis_name)  # pyright: ignore[reportArgumentType] (any name)

        mean = average(x)
        centred = x - mean.reshape(-1, *[1] * (x.ndim - 1))
        return mean, average(centred**2)

    def _moved(self, old: tuple[Array, Array], new: tuple[Array, Array]) -> Any:
        """The running statistics after a batch."""
        kept = self.momentum
        return tuple(_as(kept * a + (1 - kept) * b, a) for a, b in zip(old, new, strict=True))

    def _by_running(self, x: Array, state: nn.State, inference: bool) -> Any:
        first, index = self.ema_first_time_index, self.ema_state_index
        assert first is not None and index is not None
        running = state.get(index)
        if inference:
            return running, state
        new, is_first = self._of_the_batch(x), state.get(first)
        moved = self._moved(running, new)
        moved = tuple(jnp.where(is_first, _as(b, a), a) for a, b in zip(moved, new, strict=True))
        state = state.set(first, jnp.array(False)).set(index, moved)
        return moved, state

    def _by_batch(self, x: Array, state: nn.State, inference: bool) -> Any:
        counter, index = self.batch_counter, self.batch_state_index
        assert counter is not None and index is not None
        running, count = state.get(index), state.get(counter)
        if inference:
            # Not in half precision, where the powers are far off.
            wide = count.astype(float)
            whole = jnp.where(count == 0, 1, 1 - jnp.asarray(self.momentum, wide.dtype) ** wide)
            return tuple(x / whole.astype(x.dtype) for x in running), state
        new = self._of_the_batch(x)
        moved = self._moved(running, new)
        return new, state.set(counter, count + 1).set(index, moved)


def _as(new: Array, old: Array) -> Array:
    """In the dtype of the state. Complex numbers stay, for the state to refuse them."""
    return new if jnp.iscomplexobj(new) else new.astype(old.dtype)
