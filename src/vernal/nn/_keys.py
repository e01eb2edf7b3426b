"""`keys`: a random key of its own for every layer that needs one."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
from jaxtyping import PRNGKeyArray

from ..trees import check_key, replace_parts
from ._places import Names, Place, keys_of
from ._random import key_fields

T = TypeVar("T")


def keys(model: T, key: PRNGKeyArray | None) -> T:
    """Gives every layer that needs randomness a key of its own, so that the model need not pass keys on.

    The key of a layer is folded from `key` and the name of the layer (`blocks.3.dropout`), and from nothing else:
    adding, removing or reordering layers elsewhere in the model does not change its randomness. In a `Stack` every
    layer has a key of its own, that of the same layer in a list: a `Stack` and a list give the same numbers.

    The keys are leaves of the returned model, so its structure differs. Call `keys` where the model is used, inside the
    function that is differentiated or compiled, and keep the model without keys for the optimiser and for saving:

        def loss(model, x, y, key):
            return mse(nn.keys(model, key)(x), y)

    A key given to the call of a layer takes precedence over the stored one. With `keys`, a layer that is used twice, or
    at every step of a scan over time, draws the same numbers each time; `vernal.nn.apply(model, x, key=key)` gives each
    use its own. With both, `jax.vmap(model)` over examples gives all of them the same mask. Either call the model with
    batch axes, or map over keys too: `jax.vmap(lambda x, key: nn.keys(model, key)(x))(xs, keys)`.

    A layer of your own gets keys if it has a `Dropout` inside, or a field made by `vernal.nn.key_field`.

    Args:
        model: any pytree with layers in it.
        key: one random key, typed or of uint32; None removes the keys.

    Returns:
        The model with these keys; parts that need no key are shared with `model`. To give the members of an ensemble
        different keys, call `jax.vmap(nn.keys, in_axes=(0, 0))(models, keys)`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import nn
        >>> model = nn.Sequential([nn.Dropout(0.5), jnp.tanh, nn.Dropout(0.5)])
        >>> y = nn.keys(model, jax.random.key(0))(jnp.ones(100))
        >>> print(y.shape, (y == 0).any())
        (100,) True
        >>> nn.keys(nn.keys(model, jax.random.key(0)), None) == model
        True
    """
    if key is None:
        return _with_keys(model, Place(), lambda names: None)
    return with_keys(model, keys_for(model, check_key("keys", key)))


def keys_for(model: Any, key: PRNGKeyArray) -> list[Any]:
    """The keys of all layers that need one, in the order in which they are visited."""
    places: list[Names] = []
    _with_keys(model, Place(), places.append)
    return keys_of(key, places)


def needs_keys(model: Any) -> bool:
    """Whether a layer in the model needs a random key."""
    places: list[Names] = []
    _with_keys(model, Place(), places.append)
    return bool(places)


def with_keys(model: T, found: Sequence[Any]) -> T:
    """The model with these keys, in that order."""
    rest = iter(found)
    return _with_keys(model, Place(), lambda names: next(rest))


def _with_keys(node: Any, place: Place, key_of: Callable[[Names], Any]) -> Any:
    """The node with the results of `key_of` in the key fields of all layers, which are visited in a fixed order."""
    if isinstance(node, jax.Array):
        return node
    own = key_fields(type(node))
    changes: dict[Any, Any] = {}
    for key, part, below in place.parts(node):
        if isinstance(key, jtu.GetAttrKey) and key.name in own:
            new = key_of(below.names)
        else:
            new = _with_keys(part, below, key_of)
        if new is not part:
            changes[key] = new
    return replace_parts(node, changes) if changes else node
