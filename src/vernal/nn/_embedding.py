"""`Embedding`: a table of vectors, looked up by index."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import short, type_error, value_error
from ..trees import check_key
from ._init import weight_dtype
from ._layer_arguments import check_size, check_weight, refuse_no_array
from ._mesh import following, product


class Embedding(Module):
    """A table of vectors, looked up by integer indices.

    Args:
        num_embeddings: the number of vectors.
        embedding_size: the length of each vector.
        weight: the table, of shape `(num_embeddings, embedding_size)`, if you have one. Otherwise
            it is drawn from a standard normal distribution.
        dtype: the dtype of the table; if None, that of `weight`, or else JAX's default float.
        key: a `jax.random` key for the table. Not used if `weight` is given.

    Raises:
        ValueError: if neither `weight` nor all of `num_embeddings`, `embedding_size` and `key` are given; if `weight`
            does not have the shape that they give; or if a size is not an integer of at least 0.
        TypeError: if `key` is not a random key.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> table = vernal.nn.Embedding(weight=jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
        >>> table(1)
        Array([3., 4.], dtype=float32)
        >>> table(jnp.array([2, 0]))
        Array([[5., 6.],
               [1., 2.]], dtype=float32)
    """

    num_embeddings: int = field(static=True)
    embedding_size: int = field(static=True)
    weight: Array

    def __init__(
        self,
        num_embeddings: int | None = None,
        embedding_size: int | None = None,
        weight: ArrayLike | None = None,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ):
        if weight is None:
            weight = _draw(num_embeddings, embedding_size, weight_dtype("Embedding", dtype), key)
        else:
            # A copy: `asarray` may share the memory of a NumPy array.
            weight = jnp.array(weight, dtype)
            _check_table(weight, num_embeddings, embedding_size)
        self.num_embeddings, self.embedding_size = weight.shape
        self.weight = weight

    @jax.named_scope("vernal.nn.Embedding")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """Looks up rows.

        Args:
            x: the index of a row, or an array of indices of any shape. Negative indices count from
                the end. An index outside the table gives its first or last row, because compiled
                code cannot raise an error.
            key: not used; every layer takes one.

        Returns:
            An array of shape `(*x.shape, embedding_size)` and the dtype of the table. On a mesh
            with explicit axes it is sharded as `x` and the columns of the table are.

        Raises:
            TypeError: if `x` does not hold integers.
            ValueError: if the table has no rows, or is not a matrix.
        """
        refuse_no_array("Embedding", x, "x")
        table = jnp.asarray(self.weight)
        check_weight("Embedding", table, ("num_embeddings", "embedding_size"))
        index = jnp.asarray(_within(x, table.shape[0]))
        if not jnp.issubdtype(index.dtype, jnp.integer):
            raise type_error(
                "Embedding takes integer indices",
                where="argument `x` of Embedding",
                expected="integers",
                got=short(x),
                instead="embedding(x.astype(int))",
            )
        if table.shape[0] == 0:
            raise value_error(
                "an Embedding without rows cannot look up an index",
                where="Embedding(num_embeddings=0, ...)(x)",
                expected="a table with at least one row",
                got=short(table),
            )
        index = _wide(index, table.shape[0])
        # An array of one index, because for a scalar JAX drops `out_sharding` under `vmap`.
        indices = index if index.ndim else index[None]
        # JAX must be told how the result is sharded: the rows may be on other devices than the indices.
        out = following(indices, indices.ndim, table, 1)
        rows = table.at[indices].get(mode="clip", out_sharding=out)
        return rows if index.ndim else rows[0]

    def attend(self, x: ArrayLike) -> Array:
        """Multiplies features with every row of the table: an output head that shares the weights of the embedding.

        O. Press and L. Wolf, "Using the Output Embedding to Improve Language Models", arXiv:1608.05859.

        Args:
            x: shape `(..., embedding_size)`, with any batch axes in front.

        Returns:
            Shape `(..., num_embeddings)`. On a mesh with explicit axes it is sharded as the batch of `x` and the rows
            of the table are.

        Raises:
            ValueError: for another shape, or if the table is not a matrix.

        Example:
            >>> import jax.numpy as jnp
            >>> import vernal
            >>> table = vernal.nn.Embedding(weight=jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
            >>> table.attend(jnp.array([1.0, 0.0]))
            Array([1., 3., 5.], dtype=float32)
        """
        x = jnp.asarray(x)
        check_weight("Embedding", self.weight, ("num_embeddings", "embedding_size"))
        size = self.weight.shape[1]
        if x.shape[-1:] != (size,):
            raise value_error(
                "the features must be as long as the rows of the table",
                where="argument `x` of Embedding.attend",
                expected=f"shape (..., {size})",
                got=short(x),
            )
        return product(x, self.weight)


def _within(x: ArrayLike, rows: int) -> ArrayLike:
    """Clips Python integers and 64-bit NumPy indices to the table: without 64-bit numbers, JAX would cut off their
    upper half."""
    if type(x) is int:
        return max(min(x, rows - 1), -rows)
    if not isinstance(x, np.ndarray | np.generic) or x.dtype not in (np.int64, np.uint64):
        return x
    below = np.minimum(x, max(rows - 1, 0))
    return np.maximum(below, -rows) if x.dtype == np.int64 else below


def _wide(index: Array, rows: int) -> Array:
    """Indices in a dtype that holds the number of rows, and negative indices."""
    if jnp.issubdtype(index.dtype, jnp.unsignedinteger):
        # JAX reads the largest of these as negative numbers.
        last = min(max(rows - 1, 0), int(jnp.iinfo(index.dtype).max))
        index = jnp.minimum(index, jnp.asarray(last, index.dtype))
    elif jnp.iinfo(index.dtype).bits >= 32:
        return index
    return index.astype(jnp.int32)


def _draw(
    num_embeddings: int | None, embedding_size: int | None, dtype: Any, key: PRNGKeyArray | None
) -> Array:
    if num_embeddings is None or embedding_size is None or key is None:
        given = {"num_embeddings": num_embeddings, "embedding_size": embedding_size, "key": key}
        raise value_error(
            "Embedding needs either a table or the arguments to draw one",
            where="Embedding(...)",
            expected="num_embeddings, embedding_size and key, or weight",
            got="no " + ", no ".join(name for name, value in given.items() if value is None),
            instead="Embedding(num_embeddings, embedding_size, key=key), or Embedding(weight=table)",
        )
    rows = check_size("Embedding", "num_embeddings", num_embeddings, 0)
    columns = check_size("Embedding", "embedding_size", embedding_size, 0)
    return jax.random.normal(check_key("Embedding", key), (rows, columns), dtype)


def _check_table(weight: Array, num_embeddings: int | None, embedding_size: int | None) -> None:
    rows = "num_embeddings" if num_embeddings is None else num_embeddings
    columns = "embedding_size" if embedding_size is None else embedding_size
    shape = weight.shape
    if (
        len(shape) != 2
        or num_embeddings not in (None, shape[0])
        or embedding_size not in (None, shape[1])
    ):
        raise value_error(
            "the table of an Embedding must have one row for each index and one column for each feature",
            where="Embedding(weight=...)",
            expected=f"shape ({rows}, {columns})",
            got=short(weight),
        )
