"""The random key of a layer: the one of the call, or else the one that the layer holds.

A layer that needs randomness has a field made by `key_field`. It is None until `vernal.nn.keys` puts a key there.
"""

import dataclasses
from typing import Any

from jaxtyping import PRNGKeyArray

from ..modules import field
from ..show import message

_MARK = "vernal.nn.key"


def key_field() -> Any:
    """Declares the field in which `vernal.nn.keys` puts the random key of a layer.

    It is None otherwise, and no argument of the constructor. Write

        key: PRNGKeyArray | None = vernal.nn.key_field()

    in a layer of your own, and let a key that is given to the call go before it. (A layer that has a `Dropout` inside
    and no other randomness needs no such field: the `Dropout` has one.)

    Returns:
        The field, to be assigned in the class body.

    Example:
        >>> import jax
        >>> import vernal
        >>> from jaxtyping import PRNGKeyArray
        >>> class Noise(vernal.Module):
        ...     scale: float
        ...     key: PRNGKeyArray | None = vernal.nn.key_field()
        ...     def __call__(self, x, *, key=None):
        ...         key = self.key if key is None else key
        ...         return x + self.scale * jax.random.normal(key, x.shape)
        >>> model = vernal.nn.Sequential([vernal.nn.Identity(), Noise(0.1)])
        >>> vernal.nn.keys(model, jax.random.key(0))(jax.numpy.ones(3)).shape
        (3,)
    """
    return field(default=None, init=False, repr=False, metadata={_MARK: True})


def key_fields(cls: type) -> frozenset[str]:
    """The names of the fields of a class that `key_field` declared."""
    if not dataclasses.is_dataclass(cls):
        return frozenset()
    return frozenset(f.name for f in dataclasses.fields(cls) if _MARK in f.metadata)


def needed_key(key: PRNGKeyArray | None, stored: PRNGKeyArray | None, layer: str) -> PRNGKeyArray:
    """The key of the call or, if there is none, the stored one; an error if there is neither."""
    key = stored if key is None else key
    if key is None:
        raise RuntimeError(
            message(
                f"{layer} needs a random key while training",
                where=f"{layer}.__call__(x, key=...)",
                expected="a key given to the call, or one stored in the layer",
                got="key=None, and no stored key",
                instead="model(x, key=key); or vernal.nn.keys(model, key)(x), or "
                "vernal.nn.apply(model, x, key=key), for all layers of a model; or, when not training, "
                "vernal.nn.inference_mode(model)",
            )
        )
    return key
