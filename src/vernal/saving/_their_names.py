"""PyTorch's names for the leaves of a model, without rules: ours, except for fields that PyTorch does not have.

In PyTorch, the layers of a `Sequential` are in the module itself. So a class may name one of its fields in
`_vernal_passed_over`, which is then left out of the names of the leaves in it.
"""

from collections.abc import Iterator
from typing import Any

import jax.tree_util as jtu

from ..trees import named_leaves, path_name

_Path = tuple[Any, ...]


def their_names(model: Any) -> dict[str, str]:
    """PyTorch's name for each of our names, without the fields passed over; our own names if two would become equal."""
    names = dict(zip(named_leaves(model), map(path_name, _paths(model)), strict=True))
    return names if len({*names.values()}) == len(names) else {name: name for name in names}


def _paths(tree: Any) -> Iterator[_Path]:
    """The key path of each leaf, without the fields passed over."""
    passed = getattr(type(tree), "_vernal_passed_over", None)
    for key, child in jtu.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree):
        if child is tree:
            yield ()
        else:
            first = () if path_name(key) == passed else key
            yield from ((*first, *rest) for rest in _paths(child))


def other_forms(model: Any) -> dict[str, str]:
    """The leaves that PyTorch keeps in another form, by name, with the ready-made rule for each.

    A class declares them in `_vernal_other_in_torch`, by the names of its fields.
    """
    return {
        name: rule
        for name, rule in zip(named_leaves(model), _rules(model, None), strict=True)
        if rule is not None
    }


def _rules(tree: Any, rule: str | None) -> Iterator[str | None]:
    """For each leaf the ready-made rule, or None."""
    others = getattr(type(tree), "_vernal_other_in_torch", {})
    for key, child in jtu.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree):
        if child is tree:
            yield rule
        else:
            yield from _rules(child, others.get(path_name(key), rule))
