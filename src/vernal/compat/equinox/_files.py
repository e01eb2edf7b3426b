"""Files of leaves, whose records become what JAX makes of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import saving


def default_deserialise_filter_spec(f: Any, x: Any) -> Any:
    """`vernal.saving.default_deserialise_filter_spec`, where an array of JAX is what `jax.numpy.asarray` makes of it.

    So numbers of 64 bits are read into arrays of 32, unless JAX holds 64.

    Args:
        f: a binary file, open for reading.
        x: the leaf that decides the kind of the loaded one.

    Returns:
        The leaf.
    """
    found = saving.default_deserialise_filter_spec(f, x)
    becomes_jax = isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
    is_number = (
        isinstance(found, np.ndarray) and found.dtype.kind in "biufc" and found.dtype.isnative
    )
    return jnp.asarray(found) if becomes_jax and is_number else found


def tree_deserialise_leaves(
    path_or_file: Any,
    like: Any,
    filter_spec: Any = default_deserialise_filter_spec,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """`vernal.saving.tree_deserialise_leaves`, with another default.

    Args:
        path_or_file: as in `vernal.saving.tree_deserialise_leaves`.
        like: as in `vernal.saving.tree_deserialise_leaves`.
        filter_spec: as in `vernal.saving.tree_deserialise_leaves`.
        is_leaf: as in `vernal.saving.tree_deserialise_leaves`.

    Returns:
        As in `vernal.saving.tree_deserialise_leaves`.
    """
    return saving.tree_deserialise_leaves(path_or_file, like, filter_spec, is_leaf)
