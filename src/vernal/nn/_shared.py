"""`Shared`: one set of weights in two places of a model."""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu

from ..modules import Module, field
from ..show import diff_text, value_error
from ..trees import tree_at


class SharedNode(Module):
    """What stands in the place of a node that is stored elsewhere in the model."""


class Shared(Module):
    r"""Ties weights: what is in several places of a model is stored, trained, saved and counted once.

    A tree has every node once, so a weight that is simply put in two places becomes two weights at the next step. Here
    the nodes at `where` are taken out; calling the object puts what `get` picks back there.

    Args:
        pytree: a tree of layers.
        where: picks the nodes to be replaced from it: one, or a tuple of them.
        get: picks the node that they shall be, or a tuple, one for each.

    Attributes:
        pytree: the tree with a `SharedNode` at each of these places.

    Raises:
        ValueError: if what is to be shared differs in structure, shapes or dtypes, or in number.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal import nn
        >>> class LanguageModel(vernal.Module):
        ...     shared: nn.Shared
        ...     def __init__(self, key):
        ...         layers = nn.Embedding(5, 3, key=key), nn.Linear(3, 5, use_bias=False, key=key)
        ...         self.shared = nn.Shared(layers, lambda l: l[1].weight, lambda l: l[0].weight)
        ...     def __call__(self, token):
        ...         embedding, unembedding = self.shared()
        ...         return unembedding(embedding(token))
        >>> model = LanguageModel(jax.random.key(0))
        >>> [leaf.shape for leaf in jax.tree.leaves(model)]
        [(5, 3)]
        >>> model(jnp.array(2)).shape
        (5,)
    """

    pytree: Any
    where: Callable[[Any], Any] = field(static=True)
    get: Callable[[Any], Any] = field(static=True)

    def __init__(self, pytree: Any, where: Callable[[Any], Any], get: Callable[[Any], Any]):
        taken, kept = where(pytree), get(pytree)
        if _described(taken) != _described(kept):
            raise value_error(
                "what is to be shared is not alike",
                where="Shared(pytree, where, get)",
                expected="the same structure, shapes and dtypes in both places",
                got=diff_text(taken, kept, root="node"),
                instead="`where` and `get` that pick nodes which differ in nothing but their values",
            )
        self.pytree = tree_at(where, pytree, replace_fn=lambda _: SharedNode())
        self.where = where
        self.get = get

    def __call__(self) -> Any:
        """Puts the shared nodes back.

        Returns:
            A tree like the one given, in which the nodes at `where` are what `get` picks.
        """
        return tree_at(self.where, self.pytree, self.get(self.pytree), is_leaf=_is_shared)

    def filled(self) -> "Shared":
        """The same with its nodes in all of their places already, as `vernal.nn.resolve` leaves it.

        Returns:
            One that is called as before, and has nothing left to put back.
        """
        return Shared(self(), _nothing, _nothing)


def _nothing(pytree: Any) -> list[Any]:
    return []


def _is_shared(x: Any) -> bool:
    return isinstance(x, SharedNode)


def _described(node: Any) -> tuple[Any, Any]:
    leaves, treedef = jtu.tree_flatten(jax.eval_shape(lambda: node))
    return treedef, leaves
