"""`apply_updates` as in Equinox: a sum, whatever its dtype."""

from typing import Any

import jax.tree_util as jtu

from ...trees import NoGradient


def _stays(update: Any) -> bool:
    return update is None or isinstance(update, NoGradient)


def apply_updates(model: Any, updates: Any) -> Any:
    """Adds updates to a model.

    Unlike `vernal.apply_updates` it checks nothing, and does not keep dtypes: it is a plain `+`.

    Args:
        model: any tree.
        updates: a prefix tree of the model, with None where nothing changes.

    Returns:
        The model after the update.
    """
    return jtu.tree_map(lambda u, p: p if _stays(u) else p + u, updates, model, is_leaf=_stays)
