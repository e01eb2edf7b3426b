"""`Sequential`, which calls layers one after another, and `Lambda`, which makes a layer of a function."""

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from .._ground import signature_of
from ..modules import Module, Partial
from ..show import short, type_error
from ..trees import check_key
from ._state import State, StatefulLayer, check_state, is_stateful

# Whether callables take a key. Cached, because reading a signature takes longer than running a small layer.
_known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _takes_key(layer: Any) -> bool:
    """Whether a layer can be called with `key=...`."""
    if isinstance(layer, Partial):
        return "key" not in layer.keywords and _takes_key(layer.func)
    call = type(layer).__call__
    # The signature in the class holds for all its instances, unless they wrap something else.
    if isinstance(call, types.FunctionType) and not hasattr(layer, "__wrapped__"):
        layer = call
    with contextlib.suppress(
        KeyError, TypeError
    ):  # TypeError: cannot be hashed or weakly referred to
        return _known[layer]
    signature = signature_of(layer)
    parameters = () if signature is None else signature.parameters.values()
    found = any(
        p.kind is p.VAR_KEYWORD or (p.name == "key" and p.kind is not p.POSITIONAL_ONLY)
        for p in parameters
    )
    with contextlib.suppress(TypeError):
        _known[layer] = found
    return found


class Sequential(StatefulLayer):
    """Calls layers one after another, each with the output of the one before.

    Layers may be modules and plain functions such as `jax.nn.relu`. Each layer that has a parameter `key` (or
    `**kwargs`) is given its own random key; the others are called with the input alone. Called with a `state` (see
    `make_with_state`), it passes the state through each `StatefulLayer` among its layers; without, the state of a layer
    is in the model (see `apply`).

    Vernal's layers accept a batch as well as one example. A function is called with the batch as it is: this works for
    `jax.nn.relu`, but `jnp.ravel` makes one vector of the whole batch. Call a model with such a function by
    `jax.vmap(model)`.

    `len`, iteration, `model[i]` (a layer) and `model[i:j]` (a `Sequential`) work as on a tuple.

    Args:
        layers: an iterable of callables of one argument.
        *others: refused; the layers must be in one list.

    Raises:
        TypeError: if the layers are not in one list, or a layer cannot be called.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> model = vernal.nn.Sequential([vernal.nn.LayerNorm(2), jax.nn.relu, vernal.nn.Dropout(0.5)])
        >>> model(jnp.array([1.0, 5.0]), key=jax.random.key(0)).shape
        (2,)
        >>> len(model), len(model[:2])
        (3, 2)
    """

    # In PyTorch's names the layers are in the module itself: see `vernal.saving.from_torch`.
    _vernal_passed_over = "layers"

    layers: tuple[Any, ...]

    def __init__(self, layers: Iterable[Any], *others: Any):
        # `others` is here for its error alone: in PyTorch, the layers are the arguments.
        if others or callable(layers) or not isinstance(layers, Iterable):
            raise type_error(
                "the layers of `Sequential` must be in a list",
                where="Sequential(layers)",
                expected="a list of layers",
                got=f"{1 + len(others)} arguments" if others else short(layers),
                instead="Sequential([a, b]), and Sequential([a]) for a single layer",
            )
        # Any entry is accepted here, so that a wrong one is refused below with its index.
        self.layers = tuple(layers)
        for i, layer in enumerate(self.layers):
            if not callable(layer):
                raise type_error(
                    "a layer must be callable",
                    where=f"Sequential(layers)[{i}]",
                    expected="a module with __call__, or a function of one array",
                    got=short(layer),
                )

    @jax.named_scope("vernal.nn.Sequential")
    def __call__(
        self, x: Any, state: State | None = None, *, key: PRNGKeyArray | None = None
    ) -> Any:
        """Runs `x` through all layers.

        Args:
            x: what the first layer takes.
            state: the state of a model made by `make_with_state`.
            key: a `jax.random` key, split into one for each layer; with None, layers that take a key are given
                `key=None`.

        Returns:
            What the last layer returns, or `x` itself if there are no layers; with `state`, a pair of this and the
            new state.
        """
        check_state(self, state)
        return self._run(x, state, state is not None, key)

    def _run(self, x: Any, state: Any, given: bool, key: PRNGKeyArray | None) -> Any:
        """Runs `x` through all layers; with `given`, and the state through those that take one."""
        if not isinstance(self.layers, tuple | list):
            raise type_error(
                "`layers` of a Sequential must be a tuple",
                where="`layers` of Sequential",
                expected="a tuple of layers",
                got=short(self.layers),
                instead="(layer,) for a single layer",
            )
        n = len(self.layers)
        key = None if key is None else check_key("Sequential", key)
        keys = [None] * n if key is None or n == 0 else jax.random.split(key, n)
        for layer, layer_key in zip(self.layers, keys, strict=True):
            options = {"key": layer_key} if _takes_key(layer) else {}
            if given and is_stateful(layer):
                x, state = layer(x, state, **options)
            else:
                x = layer(x, **options)
        return (x, state) if given else x

    def is_stateful(self) -> bool:
        """Whether one of the layers takes `state`.

        Returns:
            True if the `is_stateful` of any `StatefulLayer` among the layers returns True.
        """
        return any(map(is_stateful, self.layers))

    def __getitem__(self, i: int | slice) -> Any:
        return Sequential(self.layers[i]) if isinstance(i, slice) else self.layers[i]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


class Lambda(Module):
    """A function as a layer: accepts the `key` that every layer takes, and ignores it.

    Args:
        fn: a function of one argument. It is part of the structure; a module or another pytree keeps its arrays as
            leaves.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> vernal.nn.Lambda(jax.nn.relu)(jnp.array([-1.0, 1.0]))
        Array([0., 1.], dtype=float32)
    """

    fn: Callable[[Any], Any]

    @jax.named_scope("vernal.nn.Lambda")
    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Any:
        """Calls `fn(x)`.

        Args:
            x: what `fn` takes.
            key: not used; every layer takes one.

        Returns:
            What `fn` returns.
        """
        return self.fn(x)
