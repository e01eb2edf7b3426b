"""State of layers: what a call changes besides its result, such as running statistics.

A `StateIndex` is the slot. There are two ways to carry the value, and a layer serves both:

    y, model = nn.apply(model, x)                  the value stays in the model (see `_apply.py`)
    model, state = nn.make_with_state(Model)(...)  the value is in a `State` (see `_with_state.py`),
    y, state = model(x, state)                     which is handed through every call
"""

import abc
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu

from .._ground import strong
from ..harvest import planted, sow
from ..modules import Module, field, is_frozen
from ..show import diff_text, message, path_text, short, tree_pformat, type_error, value_error
from ..transforms import placed_like
from ..trees import is_array_like

T = TypeVar("T")


class Elsewhere(Module):
    """What stands in a `StateIndex` whose value is in a `State`."""


class StateIndex(Module):
    """A slot for the state of a layer.

    Args:
        init: its first value: an array, or a tree of them. Numbers become arrays.
        marker: the name under which a `State` holds it; `make_with_state` gives one.

    Attributes:
        init: its value; gone once `make_with_state` has put it in a `State`. Buffers: neither trained nor
            differentiated.
        marker: as given.

    Raises:
        ValueError: if `init` is a function.
        TypeError: if something in `init` is not an array.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> from vernal import nn
        >>> class Counter(nn.StatefulLayer):
        ...     calls: nn.StateIndex
        ...     def __init__(self):
        ...         self.calls = nn.StateIndex(jnp.array(0))
        ...     def __call__(self, x, state=None, *, key=None, inference=None):
        ...         calls = self.calls.value(state) + 1
        ...         y = calls * x
        ...         if state is None:
        ...             return self.calls.update(calls, y)
        ...         return y, state.set(self.calls, calls)

        The value in the model:

        >>> counter = Counter()
        >>> for _ in range(3):
        ...     y, counter = nn.apply(counter, jnp.array(10))
        >>> print(y)
        30

        The value outside of it:

        >>> counter, state = nn.make_with_state(Counter)()
        >>> for _ in range(3):
        ...     y, state = counter(jnp.array(10), state)
        >>> print(y)
        30
    """

    # PyTorch has the array in the module itself: see `vernal.saving.from_torch`.
    _vernal_passed_over = "init"

    marker: str | None = field(static=True)
    init: Any = field(trainable=False)

    def __init__(self, init: Any, *, marker: str | None = None):
        if callable(init) and not isinstance(init, Module):
            raise value_error(
                "the first value of a state is given, not made",
                where="StateIndex(init)",
                expected="an array, or a tree of arrays",
                got=short(init),
                instead="StateIndex(make())",
            )
        self.marker = marker
        self.init = jtu.tree_map_with_path(_as_array, init)

    def value(self, state: "State | None" = None) -> Any:
        """The current value.

        Args:
            state: where it is, if it is outside of the model.

        Returns:
            The value in `state`; without one, the value in the model: inside `nn.apply` the one of the last
            `update`. No derivative reaches the one in the model.

        Raises:
            RuntimeError: if the value is in a `State`, and none is given.
        """
        if state is not None:
            return state.get(self)
        return planted(self.stored())

    def update(self, value: Any, through: T) -> T:
        """Sets the value in the model, inside `nn.apply`. A value that is frozen (`vernal.freeze`) stays as it is.

        Args:
            value: the new value, with the structure, shapes and dtypes of the old one.
            through: what the layer goes on with, an array or a tree with arrays in it: it ties the new value
                to this place in the program.

        Returns:
            `through`. Use this instead of what was given.

        Raises:
            RuntimeError: outside of `nn.apply`, when it is run; if the value is in a `State`.
            ValueError: if structure, shapes or dtypes differ, or the elements of a `jax.vmap` inside of the
                model disagree: see `vernal.harvest.sow`.
        """
        return through if is_frozen(self) else sow(self.stored(), value, through)

    def stored(self) -> Any:
        """The value that is stored in the model, as it was before the call.

        Returns:
            `init`.

        Raises:
            RuntimeError: if the value is in a `State`.
        """
        if isinstance(self.init, Elsewhere):
            raise RuntimeError(
                message(
                    "the state of this model is not in it",
                    where=self.marker,
                    expected="the `state` that `make_with_state` returned along with the model",
                    got="state=None",
                    instead="y, state = model(x, state)",
                )
            )
        return self.init


def _as_array(path: Any, x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if not is_array_like(x):
        raise type_error(
            "a state consists of arrays",
            where=path_text(path, root="StateIndex(init)"),
            expected="an array or a number",
            got=short(x),
            instead="keep what does not change in a field of the layer",
        )
    return strong(x)


class StatefulLayer(Module):
    """A layer that has state: the base class for those that are handed `state` by `Sequential`.

    It is called as `layer(x, state, key=...)`, which returns `(y, state)`; without a state, where the value is in the
    model, as `layer(x, key=...)`, which returns `y`. See the example at `StateIndex`.

    Example:
        >>> from vernal import nn
        >>> issubclass(nn.Sequential, nn.StatefulLayer)
        True
    """

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer computes.

        Args:
            *args: the input, and the state unless it is in the model.
            **kwargs: `key`, and what else the layer takes.

        Returns:
            The output; with a state, a pair of it and the new state.
        """

    def is_stateful(self) -> bool:
        """Whether this instance wants `state`.

        Returns:
            True, unless a subclass knows better.
        """
        return True


def is_stateful(layer: Any) -> bool:
    """Whether a layer, which may be anything, wants `state`."""
    return isinstance(layer, StatefulLayer) and layer.is_stateful()


class State:
    """The values of all `StateIndex` of a model, as `make_with_state` returns them.

    It is a pytree of arrays, and immutable: `set` and `update` return a new one. The old one is then spent, so that
    it cannot be used again by mistake: two updates of one state would lose the first.

    Not to be made by hand.

    Args:
        values: by marker.
    """

    __slots__ = ("_values",)
    _values: dict[str, Any] | None

    def __init__(self, values: dict[str, Any]):
        self._values = values

    def _current(self) -> dict[str, Any]:
        if self._values is None:
            raise value_error(
                "this state is old: a newer one was made of it",
                where="State",
                expected="the state that the last call returned",
                got=repr(self),
                instead="y, state = layer(y, state), never state1, state2, ...; on purpose, make a copy first: "
                "jax.tree.map(lambda x: x, state)",
            )
        return self._values

    def _marker(self, index: Any) -> str:
        if not isinstance(index, StateIndex):
            raise value_error(
                "only a `StateIndex` says which value of a state is meant",
                where="State",
                expected="an attribute of a layer that is a StateIndex",
                got=short(index),
                instead="state.get(layer.index)",
            )
        if index.marker not in self._current():
            raise KeyError(
                message(
                    f"there is no value for the index {index.marker!r} in this state",
                    where="State",
                    expected="one of " + ", ".join(map(repr, self._current())),
                    instead="model, state = nn.make_with_state(Model)(...), and this model with this state",
                )
            )
        return index.marker

    def get(self, index: StateIndex) -> Any:
        """The value of one index.

        Args:
            index: of the model that the state belongs to.

        Returns:
            Its value, as given to `StateIndex` or `set`.

        Raises:
            ValueError: if this state is old, or `index` is not a `StateIndex`.
            KeyError: if it belongs to another model.
        """
        return self._current()[self._marker(index)]

    def set(self, index: StateIndex, value: Any) -> "State":
        """Replaces the value of one index.

        Args:
            index: of the model that the state belongs to.
            value: the new one, with the structure, shapes and dtypes of the old one.

        Returns:
            The new state; this one is spent.

        Raises:
            ValueError: if this state is old, `index` is not a `StateIndex`, or the new value is of another kind.
            KeyError: if the index belongs to another model.
        """
        marker = self._marker(index)
        old = self._current()[marker]
        value = jtu.tree_map(lambda x: strong(x) if is_array_like(x) else x, value)
        if jtu.tree_structure(old) != jtu.tree_structure(value) or any(
            a.shape != b.shape or a.dtype != b.dtype
            for a, b in zip(jtu.tree_leaves(old), jtu.tree_leaves(value), strict=True)
        ):
            raise value_error(
                "old and new value of a state differ in kind",
                where=f"State.set: {marker}",
                expected="the same structure, shapes and dtypes as before",
                got=diff_text(old, value, weak_type=False, root="value"),
                instead="cast with `.astype`, and keep shape and structure",
            )
        # On a mesh, state stays where it is.
        return self._with(
            {marker: jtu.tree_map(lambda a, b: placed_like(a, jax.typeof(b)), value, old)}
        )

    def substate(self, pytree: Any) -> "State":
        """The part of the state that belongs to a part of the model: to hand it to `jax.vmap`, for instance.

        Args:
            pytree: a layer, or any tree with `StateIndex` in it.

        Returns:
            A state with these values only. This one stays valid.

        Raises:
            ValueError: if this state is old.
            KeyError: if an index belongs to another model.
        """
        markers = [self._marker(index) for _, index in state_indices(pytree)]
        return State({marker: self._current()[marker] for marker in markers})

    def update(self, substate: "State") -> "State":
        """Puts the values of a `substate` back.

        Args:
            substate: with values for some of the indices, whatever they are.

        Returns:
            The new state; this one is spent, `substate` is not.

        Raises:
            ValueError: if this or the other state is old, or `substate` is not a state.
            KeyError: if it holds a value for an index that this one does not have.
        """
        if not isinstance(substate, State):
            raise value_error(
                "a state can only be updated by a state",
                where="State.update(substate)",
                expected="what `substate` returned, or a newer one",
                got=short(substate),
                instead="state.set(index, value) for one value",
            )
        new = substate._current()
        unknown = [marker for marker in new if marker not in self._current()]
        if unknown:
            raise KeyError(
                message(
                    f"there is no index {unknown[0]!r} in this state",
                    where="State.update(substate)",
                    expected="a part of this state",
                    got=short(substate),
                )
            )
        return self._with(new)

    def _with(self, changes: dict[str, Any]) -> "State":
        new = State(self._current() | changes)
        self._values = None
        return new

    def __repr__(self) -> str:
        if self._values is None:
            return "State(~old~)"
        return f"State({tree_pformat(self._values)})"


def _flatten(state: State) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    values = state._current()
    return tuple(values.values()), tuple(values)


def _flatten_with_keys(state: State) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    values = state._current()
    return tuple((jtu.DictKey(k), v) for k, v in values.items()), tuple(values)


def _unflatten(markers: tuple[str, ...], values: Any) -> State:
    return State(dict(zip(markers, values, strict=True)))


jtu.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)


def is_index(x: Any) -> bool:
    """Whether a node is a `StateIndex`."""
    return isinstance(x, StateIndex)


def state_indices(pytree: Any) -> Iterator[tuple[Any, StateIndex]]:
    """Every index in a tree, with its path."""
    for path, leaf in jtu.tree_leaves_with_path(pytree, is_leaf=is_index):
        if isinstance(leaf, StateIndex):
            yield path, leaf
