"""What PyTorch calls the leaves of a model where rules do not say otherwise: as we do, but for fields that it has not.

There, the layers of a `Sequential` stand in the module itself. So a class may name one of its fields in
`_vernal_passed_over`, which is then left out of the names of what is in it.
"""

from collections.abc import Iterator
from typing import Any

import jax.tree_util as jtu

from ..trees import named_leaves, path_name

_Path = tuple[Any, ...]


def their_names(model: Any) -> dict[str, str]:
    """For the name of each leaf, the name without what is passed over; the same name where two would become one."""
    names = dict(zip(named_leaves(model), map(path_name, _paths(model)), strict=True))
    return names if len({*names.values()}) == len(names) else {name: name for name in names}


def _paths(tree: Any) -> Iterator[_Path]:
    """The key path of each leaf, without what is passed over."""
    passed = getattr(type(tree), "_vernal_passed_over", None)
    for key, child in jtu.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree):
        if child is tree:
            yield ()
        else:
            first = () if path_name(key) == passed else key
            yield from ((*first, *rest) for rest in _paths(child))


def other_forms(model: Any) -> dict[str, str]:
    """The leaves that PyTorch keeps in another form, by name, and the ready rule for each.

    A class says so in `_vernal_other_in_torch`, by the names of its fields.
    """
    return {
        name: rule
        for name, rule in zip(named_leaves(model), _rules(model, None), strict=True)
        if rule is not None
    }


def _rules(tree: Any, rule: str | None) -> Iterator[str | None]:
    """For each leaf the ready rule, or None."""
    others = getattr(type(tree), "_vernal_other_in_torch", {})
    for key, child in jtu.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree):
        if child is tree:
            yield rule
        else:
            yield from _rules(child, others.get(path_name(key), rule))
