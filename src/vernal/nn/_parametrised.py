"""Arrays and layers that are computed from other arrays: `Parametrised`, and `resolve`, which puts the results in."""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array

from ..modules import AbstractVar, Module
from ..show import message, short, value_error
from ..trees import is_inexact_array, replace_parts, tree_at
from ._inference import inference_mode
from ._places import Place
from ._shared import Shared

T = TypeVar("T")


class Parametrised(Module):
    """What stands in a model in the place of an array, or of a layer, that is computed from other arrays.

    A subclass has these arrays as its fields and says in `value` what they make. Trained, frozen, counted and saved is
    what is stored; the code of the model sees the value, once `vernal.nn.resolve` has put it in. `vernal.nn.apply` does
    so by itself. One may stand inside another.

    `vernal.nn.WeightNorm` and `vernal.nn.SpectralNorm` are such layers: they resolve themselves when they are called.

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
        """What it stands for.

        Returns:
            The array or layer. What is parametrised inside of this module is resolved before.
        """

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Whoever takes it for an array is told that it is none yet."""
            if name == "__jax_array__":
                # No AttributeError, so that whatever of JAX asks for this method ends here.
                raise TypeError(_unresolved(self, "an array"))
            if hasattr(jax.Array, name) and not hasattr(type(self), name):
                raise AttributeError(_unresolved(self, f"an array with `{name}`"))
            return object.__getattribute__(self, name)


def _unresolved(node: Parametrised, wanted: str) -> str:
    return message(
        "what stands for an array is used as one",
        where=type(node).__name__,
        expected=wanted,
        got=f"a {type(node).__name__}, as it is stored in the model",
        instead="nn.resolve(model)(x), inside of the function that is differentiated; or nn.apply(model, x)",
    )


def resolve(model: T) -> T:
    """The model as its layers see it: with values in the place of all that is `Parametrised`, and of shared nodes.

    Call it where the model is used, inside the function that is differentiated, and keep the model itself for the
    optimiser and for saving:

        def loss(model, x, y):
            return mse(nn.resolve(model)(x), y)

    Outside, it merges: what comes back is a plain model that computes the same. (Put a model with `SpectralNorm` into
    inference first, see `vernal.nn.inference_mode`.) In a `Stack` each layer is resolved by itself; an ensemble is
    resolved by `jax.vmap(nn.resolve)`.

    Args:
        model: any tree.

    Returns:
        The same with the value of each `Parametrised`, the innermost first. A `Shared` has its nodes in all of their
        places, and is called as before. What has none of these in it is shared with `model`.

    Example:
        >>> import jax
        >>> from vernal import nn
        >>> layer = nn.WeightNorm(nn.Linear(2, 3, key=jax.random.key(0)))
        >>> type(nn.resolve([layer])[0]).__name__
        'Linear'
    """
    return _resolved(model, Place(), layers=True) if _has_any(model) else model


def resolve_arrays(model: T) -> T:
    """The same without layers, which resolve themselves at their call, and may have state to change there."""
    return _resolved(model, Place(), layers=False) if _has_any(model) else model


def _has_any(model: Any) -> bool:
    return any(map(_is_any, jtu.tree_leaves(model, is_leaf=_is_any)))


def _is_any(x: Any) -> bool:
    return isinstance(x, (Parametrised, Shared))


def _resolved(node: Any, place: Place, layers: bool) -> Any:
    if isinstance(node, Shared):
        # Before what is inside: it may share a part of something parametrised.
        node = node.filled()
    changes: dict[Any, Any] = {}
    for key, part, below in place.parts(node):
        new = _resolved(part, below, layers)
        if new is not part:
            changes[key] = new
    if changes:
        node = replace_parts(node, changes)
    if not isinstance(node, Parametrised) or (callable(node) and not layers):
        return node
    value = type(node).value
    for _ in place.names.shape:
        value = jax.vmap(value)
    return value(node)


class NormalisedLayer(Parametrised):
    """A layer that uses a function of its weight in the place of the weight."""

    layer: AbstractVar[Any]
    weight_name: AbstractVar[str]

    @abc.abstractmethod
    def normalised(self, weight: Array) -> Array:
        """What the layer uses.

        Args:
            weight: its own.

        Returns:
            An array of the same shape and dtype.
        """

    def value(self) -> Any:
        """The layer with the normalised weight in the place of its own.

        Returns:
            A plain layer.
        """
        weight = getattr(self.layer, self.weight_name)
        return with_weight(self.layer, self.weight_name, self.normalised(weight))


def with_weight(layer: Any, name: str, weight: Array) -> Any:
    """The layer with another weight."""
    return tree_at(lambda layer: getattr(layer, name), layer, weight)


def weight_to_normalise(layer: Any, name: str, fits: Callable[[Any], bool], where: str) -> Array:
    """The weight of a layer, as it is computed if it is parametrised; refused if there is none that fits."""
    weight = getattr(resolve(inference_mode(layer)), name, None)
    if not (is_inexact_array(weight) and fits(weight)):
        raise value_error(
            "there is nothing to normalise",
            where=where,
            expected=f"a layer with a floating-point array `{name}` that has such an axis",
            got=f"{name} = {short(weight)}",
        )
    return jnp.asarray(weight)
