"""The random key of a layer: the one given to the call, or else one derived from the key that the layer holds.

A layer that needs randomness has a field made by `key_field`. It is None until `vernal.nn.keys` or `apply` puts a key
there. Each use of the layer splits that key into one to use and one for the next use. Only `apply` carries the second
one on; without it every use starts from the same key.
"""

import dataclasses
import weakref
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ..harvest import planted, sow
from ..modules import field
from ..show import message
from ..trees import check_key

_MARK = "vernal.nn.key"


def key_field() -> Any:
    """Declares the field in which `vernal.nn.keys` puts the random key of a layer.

    In a layer of your own, write

        key: PRNGKeyArray | None = vernal.nn.key_field()

    and get the key of each call by `vernal.nn.use_key(key, self.key)`. The field is None by default, and not an
    argument of the constructor. (A layer whose only randomness is a `Dropout` inside needs no such field: the `Dropout`
    has one.)

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
        ...         key = vernal.nn.use_key(key, self.key)
        ...         return x + self.scale * jax.random.normal(key, x.shape)
        >>> model = vernal.nn.Sequential([vernal.nn.Identity(), Noise(0.1)])
        >>> vernal.nn.keys(model, jax.random.key(0))(jax.numpy.ones(3)).shape
        (3,)
    """
    return field(default=None, init=False, repr=False, metadata={_MARK: True})


_known: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def key_fields(cls: type) -> frozenset[str]:
    """The names of the fields of a class that `key_field` declared."""
    found = _known.get(cls)
    if found is None:
        fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
        found = _known[cls] = frozenset(f.name for f in fields if _MARK in f.metadata)
    return found


def use_key(
    key: PRNGKeyArray | None, stored: PRNGKeyArray | None, layer: str = "this layer"
) -> PRNGKeyArray:
    """The random key for one use of a layer.

    Args:
        key: the key that was given to the call, or None.
        stored: the value of the field that `key_field` declared.
        layer: the name of the layer, for error messages.

    Returns:
        `key`; or, if that is None, a key derived from `stored`. Inside `vernal.nn.apply` it differs for each use of the
        layer, also in a loop.

    Raises:
        RuntimeError: if both are None.
        TypeError: if `key` is not a random key.

    Example:
        >>> import jax
        >>> from vernal import nn
        >>> given = jax.random.key(0)
        >>> nn.use_key(given, None) is given
        True
    """
    if key is not None:
        return check_key(layer, key)
    if stored is None:
        raise RuntimeError(
            message(
                f"{layer} needs a random key while training",
                where=f"{layer}.__call__(x, key=...)",
                expected="a key given to the call, or one stored in the layer",
                got="key=None, and no stored key",
                instead="model(x, key=key); vernal.nn.keys(model, key)(x) or "
                "vernal.nn.apply(model, x, key=key) for all layers of a model; or, when not training, "
                "vernal.nn.inference_mode(model)",
            )
        )
    now, later = _two(planted(stored))
    return sow(stored, later, now, needed=False)


@jax.jit
def _two(key: PRNGKeyArray) -> tuple[Any, ...]:
    """Two keys from one. (Compiled, so that JAX caches the trace: every use of a layer needs it.)"""
    return tuple(jnp.unstack(jax.random.split(key)))


def split_keys(key: PRNGKeyArray, n: int) -> tuple[PRNGKeyArray, ...]:
    """`n` keys from one, for the parts of a layer that is constructed.

    (By index: unpacking compiles a program with `n` results, 0.4 s for 41.)
    """
    keys = jax.random.split(key, n)
    return tuple(keys[i] for i in range(n))
