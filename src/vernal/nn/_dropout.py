"""`Dropout`, of single elements or of whole channels, and `DropPath`, of a whole branch.

All use one mechanism: a random mask with axes of size 1 along which elements are dropped or kept together. The number
of these axes is a setting, because an array does not say which of its axes are batches, channels or positions.
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
from ._layer_arguments import as_array, as_flag, check_size, known_value
from ._mesh import drawn_like, key_for
from ._precision import narrow, widen
from ._random import key_field, use_key


class Dropout(Module):
    r"""Sets each element to zero with probability `p`, and divides the others by `1 - p`, which keeps the mean.

    Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 15, 2014.

    `p` and `inference` are structure, not leaves: transformations do not trace them, and optimisers do not see them.
    Change them with `vernal.tree_at(lambda m: m.dropout.p, model, 0.1)` and `vernal.nn.inference_mode(model)`. A `p`
    given as a JAX array is a leaf, and can be traced; it is a buffer, which optimisers do not change.

    With `together=2` whole channels of images of shape `(..., channels, height, width)` are dropped, as by PyTorch's
    `Dropout2d`. For its `Dropout1d` and `Dropout3d` use 1 and 3.

    Args:
        p: the probability of zero, from 0 to 1.
        inference: True to drop nothing, for a model that is used rather than trained.
        together: the number of last axes that are dropped or kept as one; None for all axes.

    Attributes:
        key: a random key for calls without one, set by `vernal.nn.keys`; None at first.

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
        self.inference = as_flag(type(self).__name__, "inference", inference)
        self.together = together if together is None else check_size(name, "together", together, 0)

    @jax.named_scope("vernal.nn.Dropout")
    def __call__(
        self, x: ArrayLike, *, key: PRNGKeyArray | None = None, inference: bool | None = None
    ) -> Array:
        """Drops out some elements.

        Args:
            x: an array of any shape, with or without batch axes. Every element, or every group of elements that
                `together` makes, is dropped independently. (Under `jax.vmap` give each example its own key, or all of
                them lose the same elements.)
            key: a `jax.random` key; the layer's own by default. Not needed in inference, nor if `p` is 0. (Inside
                `shard_map`, devices that share a key and hold different parts of `x` draw different numbers. Without
                its check of varying axes it is unknown which devices do, and they draw the same.)
            inference: overrides the layer's own setting, for this call.

        Returns:
            An array of the shape and dtype of `x`. (An integer input gives floats, unless it passes through.)

        Raises:
            RuntimeError: if a key is needed, but neither given nor stored.
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
        # A traced `p` may be 1: then nothing is kept, but 0/0 would still make the gradient NaN. It may be NaN, which
        # must not look like zeros.
        scale = jnp.where(keep == 0, 1, keep).astype(wide.dtype)
        return narrow(jnp.where(kept, wide / scale, (0 * keep).astype(wide.dtype)), x)


class DropPath(Dropout):
    r"""Drops its whole input with probability `p`, and divides it by `1 - p` otherwise: stochastic depth.

    Put it at the end of a residual branch, `x + drop_path(branch(x), key=key)`, to train the network at a random depth.
    Each call draws once, so it keeps or drops a batch as a whole. To draw for each example, use `jax.vmap` with a key
    for each, or set `together` to the number of axes of an example.

    Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016, arXiv:1603.09382.

    It is a `Dropout` of all axes together: `p`, `inference` and keys work as there.

    Args:
        p: the probability of zero, from 0 to 1. An array is a leaf, so that a `Stack` can have a `p` for each layer.
        inference: True to drop nothing.
        together: the number of axes of an example, after those of the batch; None if the input is one example.

    Raises:
        TypeError: if `p` is not a number.
        ValueError: if `p` is several numbers, or outside 0 to 1, or `together` is negative; when called, for an input
            of fewer axes than `together`.
        RuntimeError: when called, if a key is needed, but neither given nor stored.

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
            "the dropout of a layer must be a `Dropout`",
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
    """Refuses a value known not to be a probability, which `tree_at` may have put in the layer."""
    is_number = isinstance(p, int | float | np.generic | np.ndarray | Array)
    if not is_number or np.ndim(p) != 0:
        raise (value_error if is_number else type_error)(
            "a probability must be one number",
            where=f"{layer}(p=...)",
            expected="a number from 0 to 1, or an array of shape ()",
            got=f"p={short(p)}",
        )
    # Under `vmap`, the value of the whole batch.
    known = known_value(p)
    if known is not None and not np.all((known >= 0) & (known <= 1)):
        raise value_error(
            "a probability must be between 0 and 1",
            where=f"{layer}(p=...)",
            expected="0 <= p <= 1, the share of elements that become zero",
            got=f"p={p}",
        )
