"""`Dropout`, of single elements or of whole channels, and `DropPath`, of a whole branch.

All are one mechanism: a random mask that has axes of size 1 where elements live and die together. How many axes those
are is a setting, because an array does not say what of it is a batch, a channel or a position.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import short, type_error, value_error
from ._inference import known_flag
from ._layer_arguments import as_array, check_size, known_value
from ._mesh import drawn_like, key_for
from ._precision import narrow, widen
from ._random import key_field, use_key


class Dropout(Module):
    r"""Sets each element to zero with probability `p`, and divides the others by `1 - p`, so that the mean stays.

    Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 15, 2014.

    Both settings are structure, not leaves: no transformation traces them, no optimiser sees them. Change them with
    `vernal.tree_at(lambda m: m.dropout.p, model, 0.1)` and `vernal.nn.inference_mode(model)`. A `p` given as a
    JAX array is a leaf, and can be traced; it is a buffer, which no optimiser changes.

    With `together=2` whole channels of images are dropped, whose shape is `(..., channels, height, width)`: PyTorch's
    `Dropout2d`. Its `Dropout1d` and `Dropout3d` are 1 and 3.

    Args:
        p: the probability of zero, from 0 to 1.
        inference: True lets everything through, as is wanted when the model is used rather than trained.
        together: how many axes, the last ones, are dropped or kept as one; None for all axes, whatever their number.

    Attributes:
        key: a random key for calls without one, from `vernal.nn.keys`; None at first.

    Raises:
        TypeError: if `p` is not a number.
        ValueError: if `p` is several numbers, or outside 0 to 1, or `together` is negative; when called, for an input
            of fewer axes than `together`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> dropout = vernal.nn.Dropout(0.5)
        >>> sorted(set(dropout(jnp.ones(100), key=jax.random.key(0)).tolist()))
        [0.0, 2.0]
        >>> dropout(jnp.ones(3), inference=True)
        Array([1., 1., 1.], dtype=float32)
        >>> channels = vernal.nn.Dropout(0.5, together=1)
        >>> channels(jnp.ones((3, 2)), key=jax.random.key(0))
        Array([[0., 0.],
               [0., 0.],
               [2., 2.]], dtype=float32)
    """

    p: int | float | Array = field(trainable=False)
    inference: bool
    together: int | None = field(static=True)
    key: PRNGKeyArray | None = key_field()

    def __init__(
        self,
        p: int | float | Array = 0.5,
        inference: bool = False,
        *,
        together: int | None = 0,
    ):
        name = type(self).__name__
        _check_probability(name, p)
        self.p = p
        self.inference = inference
        self.together = together if together is None else check_size(name, "together", together, 0)

    @jax.named_scope("vernal.nn.Dropout")
    def __call__(
        self, x: ArrayLike, *, key: PRNGKeyArray | None = None, inference: bool | None = None
    ) -> Array:
        """Drops out some elements.

        Args:
            x: an array of any shape, with or without batch axes: every element has its own chance, or every group of
                them that `together` makes. (Under `jax.vmap` give one key to each example, or all of them lose the
                same elements.)
            key: a `jax.random` key; the layer's own by default. Not needed for inference, nor if `p` is 0. (Inside
                `shard_map` devices that share a key and hold different parts of `x` draw different numbers; without
                its check of varying axes nobody knows which do, and they draw the same.)
            inference: overrides the layer's own setting, for this call.

        Returns:
            An array of the shape and type of `x`. (An integer input gives floats, unless it passes
            through.)

        Raises:
            RuntimeError: if a key is needed, and neither given nor stored.
            ValueError: if `p` is known to be outside 0 to 1.
            TypeError: if `inference` is traced, or `key` is not a random key.
        """
        x = as_array(self, x)
        together = x.ndim if self.together is None else self.together
        if together > x.ndim:
            raise value_error(
                f"`{type(self).__name__}` drops more axes together than its input has",
                where="argument `x`",
                expected=f"at least {together} axes, as together={together}",
                got=f"shape {x.shape}",
            )
        if not drops(self, inference):
            return x
        key = use_key(key, self.key, type(self).__name__)
        known = not isinstance(self.p, Array)
        if known and self.p == 1:
            return jnp.zeros_like(x)
        wide = widen(x)
        keep: Any = 1 - (jnp.asarray(self.p, wide.real.dtype) if not known else float(self.p))
        shape = (*x.shape[: x.ndim - together], *[1] * together)
        key = key_for(x, key)
        kept = jax.random.bernoulli(key, keep, shape, out_sharding=drawn_like(x, together))
        if known:
            return narrow(jnp.where(kept, wide / keep, 0), x)
        # A traced `p` may turn out to be 1: then nothing is kept, but 0/0 would still poison the gradient. Or NaN,
        # which must not look like zeros.
        scale = jnp.where(keep == 0, 1, keep).astype(wide.dtype)
        return narrow(jnp.where(kept, wide / scale, (0 * keep).astype(wide.dtype)), x)


class DropPath(Dropout):
    r"""Drops all of its input with probability `p`, and divides it by `1 - p` otherwise: stochastic depth.

    Put it at the end of a residual branch, `x + drop_path(branch(x), key=key)`, and the network is trained at a random
    depth. There is one draw for each call. A batch in one call would be kept or dropped as a whole: use
    `jax.vmap` with a key for each example, or say by `together` how many axes an example has.
    Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016, arXiv:1603.09382.

    It is a `Dropout` of everything together: `p`, `inference` and keys are as there.

    Args:
        p: the probability of zero, from 0 to 1. An array makes it a leaf: so a `Stack` has a `p` for each layer.
        inference: True lets everything through.
        together: how many axes an example has, behind those of a batch; None if the input is one example.

    Raises:
        TypeError: if `p` is not a number.
        ValueError: if `p` is several numbers, or outside 0 to 1, or `together` is negative; when called, for an input
            of fewer axes than `together`.
        RuntimeError: when called, if a key is needed, and neither given nor stored.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> drop_path = vernal.nn.DropPath(0.5)
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> jax.vmap(lambda x, key: drop_path(x, key=key))(jnp.ones((3, 2)), keys)
        Array([[0., 0.],
               [2., 2.],
               [0., 0.]], dtype=float32)
        >>> in_a_batch = vernal.nn.DropPath(0.5, together=1)
        >>> in_a_batch(jnp.ones((3, 2)), key=jax.random.key(0))
        Array([[0., 0.],
               [0., 0.],
               [2., 2.]], dtype=float32)
    """

    def __init__(
        self,
        p: int | float | Array,
        inference: bool = False,
        *,
        together: int | None = None,
    ):
        super().__init__(p, inference, together=together)


def drops(dropout: Any, inference: Any = None) -> bool:
    """Whether a call may drop something, and so needs a key.

    Args:
        dropout: the layer.
        inference: overrides the layer's own setting.
    """
    if not isinstance(dropout, Dropout):
        raise type_error(
            "the dropout inside of a layer is a `Dropout`",
            where="`dropout` of the layer",
            expected="a Dropout",
            got=short(dropout),
            instead="vernal.nn.Dropout(0.0) for none",
        )
    if known_flag(dropout, inference):
        return False
    _check_probability(type(dropout).__name__, dropout.p)
    return isinstance(dropout.p, Array) or dropout.p != 0


def _check_probability(layer: str, p: Any) -> None:
    """Refuses what is known to be no probability. `tree_at` may have put it in the layer."""
    is_number = isinstance(p, int | float | np.generic | np.ndarray | Array)
    if not is_number or np.ndim(p) != 0:
        raise (value_error if is_number else type_error)(
            "a probability is one number",
            where=f"{layer}(p=...)",
            expected="a number from 0 to 1, or an array of shape ()",
            got=f"p={short(p)}",
        )
    # Under `vmap` that of a whole batch.
    known = known_value(p)
    if known is not None and not np.all((known >= 0) & (known <= 1)):
        raise value_error(
            "a probability is between 0 and 1",
            where=f"{layer}(p=...)",
            expected="0 <= p <= 1, the share of elements that become zero",
            got=f"p={p}",
        )
