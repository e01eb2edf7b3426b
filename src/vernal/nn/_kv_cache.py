"""`KVCache`: the keys and values of earlier tokens, for models that generate one token after another."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from ..modules import Module, field
from ..runtime import error_if
from ..show import message, value_error
from ..trees import tree_at
from ._batch import batched
from ._init import weight_dtype
from ._layer_arguments import (
    as_flag,
    check_count,
    check_kind,
    check_parameter,
    check_shape,
    check_size,
)
from ._mesh import like


class KVCache(Module):
    """Keys and values of the tokens so far, in arrays of a fixed size: one compiled step serves all tokens.

    A cache is immutable: `append` returns a new cache, and the old one is unchanged. In a loop (`jax.lax.scan`) or with
    donated arguments, XLA updates it in place.

        cache = attention.make_cache(1024)
        y, cache = attention(prompt, prompt, prompt, cache=cache)  # all tokens of a prompt at once
        y, cache = attention(token, token, token, cache=cache)  # or any number of them after it

    With `ring=True` it keeps only the last `max_length` tokens, for attention with a window of that many. Positions
    keep counting in any case.

    Args:
        max_length: the number of tokens that the cache can hold.
        num_heads: the number of key/value heads.
        size: the size of one head of the keys.
        value_size: the size of one head of the values; `size` by default.
        ring: whether new tokens replace the oldest ones. Otherwise appending to a full cache is an error.
        dtype: the dtype of keys and values; `float32` by default (`float64` if JAX has 64-bit numbers switched on).
            Appended arrays are converted to it.
        batch: the sizes of batch axes in front of all others.

    Attributes:
        keys: shape `(*batch, max_length, num_heads, size)`.
        values: shape `(*batch, max_length, num_heads, value_size)`.
        length: the number of tokens appended so far, int32 of shape `(*batch,)`; for a ring, including those it
            dropped.

    Raises:
        ValueError: for sizes that are not integers of at least 1, or a `dtype` of integers.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> cache = nn.KVCache(4, num_heads=1, size=2, ring=True)
        >>> cache = cache.append(jnp.ones((3, 1, 2)), jnp.ones((3, 1, 2)))
        >>> cache = cache.append(jnp.zeros((2, 1, 2)), jnp.zeros((2, 1, 2)))
        >>> cache.length.item(), cache.positions.tolist()
        (5, [4, 1, 2, 3])
    """

    keys: Array
    values: Array
    length: Array
    ring: bool = field(static=True)

    def __init__(
        self,
        max_length: int,
        num_heads: int,
        size: int,
        value_size: int | None = None,
        *,
        ring: bool = False,
        dtype: DTypeLike | None = None,
        batch: tuple[int, ...] = (),
    ):
        value_size = size if value_size is None else value_size
        sizes = {"max_length": max_length, "num_heads": num_heads}
        sizes |= {"size": size, "value_size": value_size}
        for name, n in sizes.items():
            check_size("KVCache", name, n)
        dtype = weight_dtype("KVCache", dtype)
        self.keys = jnp.zeros((*batch, max_length, num_heads, size), dtype)
        self.values = jnp.zeros((*batch, max_length, num_heads, value_size), dtype)
        self.length = jnp.zeros(batch, jnp.int32)
        self.ring = as_flag(type(self).__name__, "ring", ring)

    @property
    def max_length(self) -> int:
        """The number of tokens that the cache can hold."""
        return self.keys.shape[-3]

    @property
    def positions(self) -> Array:
        """The position of the token in each place, of shape `(*batch, max_length)`; negative where there is none yet.

        The place of position `p` is `p % max_length`, whether the cache is a ring or not.
        """
        last = self.length[..., None] - 1
        places = jnp.arange(self.max_length, dtype=jnp.int32)
        return last - (last - _beside(places, last)) % self.max_length

    def next_positions(self, n: int) -> Array:
        """The positions that the next `n` tokens will have, of shape `(*batch, n)`."""
        length = self.length[..., None]
        return length + _beside(jnp.arange(n, dtype=jnp.int32), length)

    def append(self, keys: ArrayLike, values: ArrayLike) -> "KVCache":
        """Appends the keys and values of some tokens.

        Args:
            keys: shape `(*batch, n, num_heads, size)`.
            values: shape `(*batch, n, num_heads, value_size)`.

        Returns:
            The cache with these tokens.

        Raises:
            ValueError: if the shapes do not fit, or there are more tokens than places and it is not a ring.
            RuntimeCheckError: if it is not a ring, and too few places are left. It is raised when the program runs, as
                by `vernal.runtime.error_if`.
        """
        keys, values = self._converted(keys, values)
        n = keys.shape[-3]
        length = self.length
        if not self.ring:
            text = message(
                "the cache is full",
                where="KVCache.append",
                expected=f"at most {self.max_length} tokens in all, its `max_length`",
                got=f"up to {n} tokens more" if n > 1 else "one token more",
                instead="a larger `max_length`, or `ring=True` and attention with a window",
            )
            length = error_if(length, length + n > self.max_length, text)
        # Of more tokens than it has places, a ring takes only the last.
        kept = min(n, self.max_length)
        tokens = length[..., None]
        places = tokens + _beside(jnp.arange(n - kept, n, dtype=jnp.int32), tokens)
        places = places % self.max_length

        def put(places: Array, old: Array, new: Array) -> Array:
            return old.at[places].set(new, unique_indices=True)

        after = (
            batched(put, places, 1, like(self.keys, keys), keys[..., n - kept :, :, :]),
            batched(put, places, 1, like(self.values, values), values[..., n - kept :, :, :]),
            length + n,
        )
        return tree_at(lambda cache: (cache.keys, cache.values, cache.length), self, after)

    def extend(
        self, keys: ArrayLike, values: ArrayLike, window: int | None = None
    ) -> tuple[Array, Array, Array, int | None, "KVCache"]:
        """Appends the keys and values of some tokens, and returns what these tokens may attend to.

        That is the content of the new cache, unless it is a ring in which the new tokens overwrite tokens that the
        first of them still see. Then it is the content of the old cache, followed by the new tokens.

        Args:
            keys: as for `append`.
            values: as for `append`.
            window: the number of positions that a token sees, its own included; None for no limit.

        Returns:
            Keys, values and their positions of shape `(*batch, S)`, negative for empty places; the index of the first
            new token if these positions have no gaps (else None); and the cache with the new tokens.
        """
        after = self.append(keys, values)
        keys, values = self._converted(keys, values)
        n, total = keys.shape[-3], self.max_length
        if not self.ring or (window is not None and window + n - 1 <= total):
            return after.keys, after.values, after.positions, None, after
        order = self.next_positions(total) % total
        old = (batched(_rows, order, 1, a) for a in (self.keys, self.values))
        keys, values = (
            jnp.concatenate(both, axis=-3) for both in zip(old, (keys, values), strict=True)
        )
        positions = self.next_positions(total + n) - total
        return keys, values, positions, total, after

    def _converted(self, keys: ArrayLike, values: ArrayLike) -> tuple[Array, Array]:
        """The arrays to append, checked and in the dtype of the cache."""
        check_kind("KVCache", "keys", self.keys, jnp.inexact)
        check_kind("KVCache", "values", self.values, jnp.inexact)
        *batch, max_length, heads, size = self.keys.shape
        value_shape = (*self.keys.shape[:-1], self.values.shape[-1])
        check_parameter("KVCache", "values", self.values, value_shape)
        check_parameter("KVCache", "length", self.length, batch)
        check_count("KVCache", "length", self.length)
        n = jnp.shape(keys)[-3] if jnp.ndim(keys) >= 3 else max_length
        check_shape("KVCache", keys, (*batch, n, ("num_heads", heads), ("size", size)), "keys")
        value_size = ("value_size", self.values.shape[-1])
        check_shape("KVCache", values, (*batch, n, ("num_heads", heads), value_size), "values")
        if n > max_length and not self.ring:
            raise value_error(
                "more tokens were appended at once than the cache can hold",
                where="arguments `keys` and `values` of KVCache.append",
                expected=f"at most {max_length} tokens, its `max_length`",
                got=f"{n} tokens",
                instead="a larger `max_length`, or `ring=True` and attention with a window",
            )
        return jnp.asarray(keys, self.keys.dtype), jnp.asarray(values, self.values.dtype)


def _beside(line: Array, a: Array) -> Array:
    """`line` with axes of size 1 in front, for as many axes as `a` has."""
    return jax.lax.expand_dims(line, range(a.ndim - 1))


def _rows(places: Array, a: Array) -> Array:
    return a[places]
