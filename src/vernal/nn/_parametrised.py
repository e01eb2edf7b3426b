"""Arrays and layers that are computed from other arrays (`Parametrised`), or stored elsewhere in the model (`Shared`).

`resolve` replaces them by the arrays and layers that the model uses.
"""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
import jax.tree_util as jtu

from ..modules import Module, field
from ..show import diff_text, listed, message, path_text, short, type_error, value_error
from ..trees import picked_nodes, replace_parts, tree_at
from ._layer_arguments import as_flag
from ._places import Place

T = TypeVar("T")
_Picks: TypeAlias = str | tuple[str, ...] | Callable[[Any], Any]


class Parametrised(Module):
    """A placeholder in a model for an array or a layer that is computed from other arrays.

    Subclass it with these arrays as fields, and compute the array or layer in `value`. The fields are what is trained,
    frozen, counted and saved; the model's code sees the value once `vernal.nn.resolve` has put it in, which
    `vernal.nn.apply` does by itself. One may be nested inside another.

    `vernal.nn.WeightNorm` and `vernal.nn.SpectralNorm` are such layers; they resolve themselves when they are called.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal import nn
        >>> class LowRank(nn.Parametrised):
        ...     a: jax.Array
        ...     b: jax.Array
        ...     def value(self):
        ...         return self.a @ self.b
        >>> model = nn.Linear(3, 3, key=jax.random.key(0))
        >>> model = vernal.tree_at("weight", model, LowRank(jnp.ones((3, 1)), jnp.ones((1, 3))))
        >>> [leaf.shape for leaf in jax.tree.leaves(model)], nn.resolve(model)(jnp.ones(3)).shape
        ([(3, 1), (1, 3), (3,)], (3,))
    """

    @abc.abstractmethod
    def value(self) -> Any:
        """The array or layer that it stands for.

        Returns:
            The array or layer. `Parametrised` nodes inside this module are already resolved.
        """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises an error that says so where an unresolved node is used as an array."""
            if name == "__jax_array__":
                # Not an AttributeError: JAX's operators and functions look this method up, and would swallow it.
                raise ValueError(_unresolved(self, "an array"))
            if hasattr(jax.Array, name) and not hasattr(type(self), name):
                raise AttributeError(_unresolved(self, f"an array with `{name}`"))
            return object.__getattribute__(self, name)


def _unresolved(node: Parametrised, wanted: str) -> str:
    return message(
        "a parametrised array is not resolved",
        where=type(node).__name__,
        expected=wanted,
        got=f"a {type(node).__name__}, as it is stored in the model",
        instead="nn.resolve(model)(x), inside of the function that is differentiated; or nn.apply(model, x)",
    )


class SharedNode(Module):
    """A placeholder for a node that is stored elsewhere in the model."""


class Shared(Module):
    r"""Ties weights: nodes used in several places of a model are stored, trained, saved and counted once.

    A pytree does not record that two leaves are the same array, so a weight that is simply put in two places becomes
    two weights at the next step. `Shared` takes out the nodes at `where`; calling it returns the tree with the nodes
    that `get` picks in their place.

    Args:
        pytree: a tree of layers.
        where: the path of the node to be replaced, or a tuple of paths. A function of the tree that picks the nodes
            works too, but it is part of the structure: two models with separately created functions differ in
            structure.
        get: the path of the node to use instead, or a tuple with one for each; or a function that picks them.

    Attributes:
        pytree: the tree with a `SharedNode` at each of the places `where`.

    Raises:
        TypeError: if `where` or `get` is neither a path, nor a tuple of paths, nor a function.
        ValueError: if there is no such path, or a path matches several nodes; if the nodes to be shared differ in
            structure, shapes or dtypes, or in number; if `get` picks some of what `where` picks.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal import nn
        >>> class LanguageModel(vernal.Module):
        ...     shared: nn.Shared
        ...     def __init__(self, key):
        ...         layers = nn.Embedding(5, 3, key=key), nn.Linear(3, 5, use_bias=False, key=key)
        ...         self.shared = nn.Shared(layers, "1.weight", "0.weight")
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
    where: _Picks = field(static=True)
    get: _Picks = field(static=True)

    def __init__(self, pytree: Any, where: _Picks, get: _Picks):
        for name, picks in (("where", where), ("get", get)):
            texts = picks if isinstance(picks, tuple) else (picks,)
            if not callable(picks) and not all(isinstance(text, str) for text in texts):
                raise type_error(
                    f"`{name}` must pick a node",
                    where="Shared(pytree, where, get)",
                    expected="the path of a node of `pytree`, a tuple of paths, or a function that picks it",
                    got=short(picks),
                    instead='"1.weight", or lambda layers: layers[1].weight',
                )
        taken, kept = _pick(where, pytree, "where"), _pick(get, pytree, "get")
        if _described(taken) != _described(kept):
            raise value_error(
                "shared arrays must have one shape and dtype",
                where="Shared(pytree, where, get)",
                expected="the same structure, shapes and dtypes in both places",
                got=diff_text(taken, kept, root="node"),
                instead="`where` and `get` that pick nodes of the same structure, shapes and dtypes",
            )
        self.pytree = tree_at(where, pytree, replace_fn=lambda _: SharedNode())
        self.where = where
        self.get = get
        if _shared_nodes(_pick(get, self.pytree, "get")) != _shared_nodes(kept):
            raise value_error(
                "`where` takes out a node that `get` picks, so its value would be lost",
                where="Shared(pytree, where, get)",
                expected="a `get` that picks no node that `where` picks",
                got="a node that both pick: shared with itself, a swap, or a chain",
                instead="for a chain, the stored node for each: where=(a, b), get=(c, c)",
            )

    def __call__(self) -> Any:
        """Puts the shared nodes back.

        Returns:
            A tree like the one given, with what `get` picks at `where`. `Parametrised` arrays in it are resolved.

        Raises:
            ValueError: if something was put at `where`, for example by `vernal.tree_at`: it would be ignored.
        """
        return resolve(_put_back(self), layers=False)


def _pick(picks: _Picks, pytree: Any, name: str) -> Any:
    if callable(picks):
        return picks(pytree)
    if isinstance(picks, tuple):
        return tuple(_pick(each, pytree, name) for each in picks)
    found = picked_nodes(picks, pytree, name)
    if len(found) > 1:
        raise value_error(
            "the path matches several nodes",
            where=f"Shared({name}={picks!r})",
            expected="one node for each path",
            got=listed(path_text(path, "pytree") for path, _ in found),
            instead=f"{name}=(path, path), a tuple of paths",
        )
    return found[0][1]


def _put_back(shared: Shared) -> Any:
    for path, node in picked_nodes(shared.where, shared.pytree):
        if not isinstance(node, SharedNode):
            raise _second(shared, path, node)
    kept = _pick(shared.get, shared.pytree, "get")
    return tree_at(shared.where, shared.pytree, kept, is_leaf=_is_shared_node)


def _shared_nodes(tree: Any) -> int:
    return sum(map(_is_shared_node, jtu.tree_leaves(tree, is_leaf=_is_shared_node)))


def _is_shared_node(x: Any) -> bool:
    return isinstance(x, SharedNode)


def _second(shared: Shared, path: Any, node: Any) -> ValueError:
    """The error for a node that was put where a shared node is used, but not stored."""
    try:
        stored = listed(
            path_text(p, "shared.pytree") for p, _ in picked_nodes(shared.get, shared.pytree)
        )
    except ValueError:
        # `get` computes something, such as a transpose.
        stored = "the nodes that shared.get(shared.pytree) is computed from"
    return value_error(
        "a value was put in the place of a shared node, where nothing is stored",
        where=path_text(path, "shared.pytree"),
        expected=f"a SharedNode: its value is stored once, at {stored}",
        got=short(node),
        instead=f"vernal.tree_at for {stored}; or, to stop sharing, build a model from the layers of `shared()`",
    )


def _nothing(pytree: Any) -> list[Any]:
    return []


def _described(node: Any) -> tuple[Any, Any]:
    leaves, treedef = jtu.tree_flatten(jax.eval_shape(lambda: node))
    return treedef, leaves


def resolve(model: T, *, layers: bool = True) -> T:
    """The model as its layers see it: with values in place of `Parametrised` nodes and of shared nodes.

    Call it where the model is used, inside the function that is differentiated, and keep the original model for the
    optimiser and for saving:

        def loss(model, x, y):
            return mse(nn.resolve(model)(x), y)

    Called elsewhere, it merges: it returns a plain model that computes the same. (Put a model with `SpectralNorm` into
    inference first, see `vernal.nn.inference_mode`.) In a `Stack` each layer is resolved by itself; resolve an ensemble
    by `jax.vmap(nn.resolve)`.

    Args:
        model: any tree.
        layers: False leaves layers that can be called (`WeightNorm`, `SpectralNorm`, `Shared`) as they are, because
            they resolve themselves when called, and may change state then. `vernal.nn.apply` does this.

    Returns:
        The model with the value of each `Parametrised` in its place, resolved innermost first. A `Shared` has its nodes
        in all of their places, and is called as before. Parts without any of these are shared with `model`.

    Example:
        >>> import jax
        >>> from vernal import nn
        >>> layer = nn.WeightNorm(nn.Linear(2, 3, key=jax.random.key(0)))
        >>> type(nn.resolve([layer])[0]).__name__
        'Linear'
    """
    layers = as_flag("resolve", "layers", layers)
    if not any(map(_resolves, jtu.tree_leaves(model, is_leaf=_resolves))):
        return model
    return _resolved(model, Place(), layers)


def _resolves(x: Any) -> bool:
    return isinstance(x, (Parametrised, Shared))


def _resolved(node: Any, place: Place, layers: bool) -> Any:
    if isinstance(node, Shared):
        if not layers:
            return node
        # Before the nodes inside: it may share a part of something parametrised. The new one has nothing to put back.
        node = Shared(_put_back(node), _nothing, _nothing)
    changes: dict[Any, Any] = {}
    for key, part, below in place.parts(node):
        new = _resolved(part, below, layers)
        if new is not part:
            changes[key] = new
    node = replace_parts(node, changes) if changes else node
    if not isinstance(node, Parametrised) or (callable(node) and not layers):
        return node
    value = _value
    for _ in place.names.shape:
        value = jax.vmap(value)
    return value(node)


def _value(node: Parametrised) -> Any:
    return node.value()
