"""`Dropout`."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..modules import Module
from ..show import value_error
from ._mesh import drawn_like
from ._precision import narrow, widen
from ._random import key_field, needed_key


class Dropout(Module):
    r"""Sets each element to zero with probability `p`, and divides the others by `1 - p`, so that the mean stays.

    Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", JMLR 15, 2014.

    Both settings are structure, not leaves: no transformation traces them, no optimiser sees them. Change them with
    `vernal.tree_at(lambda m: m.dropout.p, model, 0.1)` and `vernal.nn.inference_mode(model)`. A `p` given as a
    JAX array is a leaf, and can be traced.

    Args:
        p: the probability of zero, from 0 to 1.
        inference: True lets everything through, as is wanted when the model is used rather than trained.

    Attributes:
        key: a random key for calls without one, from `vernal.nn.keys`; None at first.

    Raises:
        ValueError: if `p` is a number outside 0 to 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> dropout = vernal.nn.Dropout(0.5)
        >>> sorted(set(dropout(jnp.ones(100), key=jax.random.key(0)).tolist()))
        [0.0, 2.0]
        >>> dropout(jnp.ones(3), inference=True)
        Array([1., 1., 1.], dtype=float32)
    """

    p: int | float | Array
    inference: bool
    key: PRNGKeyArray | None = key_field()

    def __init__(self, p: int | float | Array = 0.5, inference: bool = False):
        if not isinstance(p, Array) and not 0 <= p <= 1:
            raise value_error(
                "a probability is between 0 and 1",
                where="Dropout(p=...)",
                expected="0 <= p <= 1, the share of elements that become zero",
                got=f"p={p}",
            )
        self.p = p
        self.inference = inference

    @jax.named_scope("vernal.nn.Dropout")
    def __call__(
        self, x: ArrayLike, *, key: PRNGKeyArray | None = None, inference: bool | None = None
    ) -> Array:
        """Drops out some elements.

        Args:
            x: an array of any shape, with or without batch axes: every element has its own chance. (Under `jax.vmap`
                give one key to each example, or all of them lose the same elements.)
            key: a `jax.random` key; the layer's own by default. Not needed for inference, nor if `p` is 0.
            inference: overrides the layer's own setting, for this call.

        Returns:
            An array of the shape and type of `x`. (An integer input gives floats, unless it passes
            through.)

        Raises:
            RuntimeError: if a key is needed, and neither given nor stored.
        """
        x = jnp.asarray(x)
        inference = self.inference if inference is None else inference
        known = not isinstance(self.p, Array)
        if inference or (known and self.p == 0):
            return x
        key = needed_key(key, self.key, "Dropout")
        if known and self.p == 1:
            return jnp.zeros_like(x)
        wide = widen(x)
        keep = 1 - (jnp.asarray(self.p, wide.real.dtype) if not known else float(self.p))
        kept = jax.random.bernoulli(key, keep, x.shape, out_sharding=drawn_like(x))
        # A traced `p` may turn out to be 1: then nothing is kept, but 0/0 would still poison the
        # gradient.
        scale = keep if known else jnp.where(keep == 0, 1, keep).astype(wide.dtype)
        return narrow(jnp.where(kept, wide / scale, 0), x)
