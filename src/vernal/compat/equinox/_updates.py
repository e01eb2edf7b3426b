"""`apply_updates` as Equinox has it: a sum, whatever its dtype."""

from typing import Any

import jax.tree_util as jtu

from ...trees import NoGradient


def _stays(update: Any) -> bool:
    return update is None or isinstance(update, NoGradient)


def apply_updates(model: Any, updates: Any) -> Any:
    """The sum of a model and its updates.

    Unlike `vernal.apply_updates` it checks nothing, and keeps no dtype: the sum is what `+` makes of the two.

    Args:
        model: any tree.
        updates: a prefix tree of it; None where nothing is to change.

    Returns:
        The model after the update.
    """
    return jtu.tree_map(lambda u, p: p if _stays(u) else p + u, updates, model, is_leaf=_stays)
