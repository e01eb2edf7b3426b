"""`State`, the values of all variables of a model, kept outside of it; and the base class of layers that take one."""

import abc
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.tree_util as jtu

from .._ground import strong, weak_like
from ..modules import Module
from ..show import diff_text, message, path_text, short, tree_pformat, type_error, value_error
from ..transforms import placed_like
from ..trees import is_array_like
from ._variable import Elsewhere, Variable, variables_in


class StatefulLayer(Module):
    """A layer with state: the base class for layers to which `Sequential` passes `state`.

    Call it as `layer(x, state, key=...)`, which returns `(y, state)`; or, if the values are in the model, as
    `layer(x, key=...)`, which returns `y`. See `Variable`.

    Example:
        >>> from vernal import nn
        >>> issubclass(nn.Sequential, nn.StatefulLayer)
        True
    """

    @abc.abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer.

        Args:
            *args: the input, and the state unless it is in the model.
            **kwargs: `key`, and whatever else the layer takes.

        Returns:
            The output; with a state, a pair of this and the new state.
        """

    def is_stateful(self) -> bool:
        """Whether this instance takes `state`.

        Returns:
            True, unless a subclass overrides it.
        """
        return True


def is_stateful(layer: Any) -> bool:
    """Whether a layer, which may be any object, takes `state`."""
    return isinstance(layer, StatefulLayer) and layer.is_stateful()


def check_state(layer: Any, state: Any) -> None:
    """Refuses a `state` argument that is not a `State`.

    Args:
        layer: the layer that was called.
        state: the argument that it was given.

    Raises:
        TypeError: unless it is None or a `State`.
    """
    if not (state is None or isinstance(state, State)):
        raise type_error(
            f"`{type(layer).__name__}` was given something that is not a State",
            where="the second argument, `state`",
            expected="the State that `make_with_state` or the last call returned; nothing if the model holds its state",
            got=short(state),
            instead="layer(x, key=key) to pass a random key",
        )


class State:
    """The values of all variables of a model (see `Variable`), as `make_with_state` returns them.

    It is a pytree of arrays. `set` and `update` return a new state and invalidate the old one, so that it cannot be
    used again by mistake: of two updates of one state, the first would be lost.

    `make_with_state` creates it, and gives the variables the markers by which their values are found here. Use
    `State(model)` for a model whose variables have markers already.

    Args:
        model: the model whose values are copied into the state.

    Raises:
        ValueError: if a variable of the model has no marker, or no value.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import nn
        >>> norm, state = nn.make_with_state(nn.BatchNorm)(2)
        >>> ys, state = norm(jnp.array([[0.0, 1.0], [2.0, 5.0]]), state)
        >>> print(state.get(norm.running_mean))
        [1. 3.]
    """

    __slots__ = ("_values",)
    _values: dict[Hashable, Any] | None

    def __init__(self, model: Any):
        values: dict[Hashable, Any] = {}
        for path, variable in variables_in(model):
            if variable.marker is None:
                raise _no_state_of(model, path, "its variables have no markers", "no marker")
            if isinstance(variable.stored, Elsewhere):
                raise _no_state_of(model, path, "its values are in a state already", "no value")
            values[variable.marker] = variable.stored
        self._values = values

    @classmethod
    def of_values(cls, values: Mapping[Any, Any]) -> "State":
        """A state with these values.

        Args:
            values: the values by marker.
        """
        state = object.__new__(cls)
        state._values = dict(values)
        return state

    def _current(self) -> dict[Hashable, Any]:
        if self._values is None:
            raise value_error(
                "this state is outdated: a newer one was made from it",
                where="State",
                expected="the state that the last call returned",
                got=repr(self),
                instead="y, state = layer(y, state), never state1, state2, ...; to keep an old state on purpose, copy "
                "it first: jax.tree.map(lambda x: x, state)",
            )
        return self._values

    def _marker(self, index: Any) -> Hashable:
        if not isinstance(index, Variable):
            raise value_error(
                "the values of a state are looked up by `Variable`",
                where="State",
                expected="an attribute of a layer that is a Variable",
                got=short(index),
                instead="state.get(layer.variable)",
            )
        if index.marker not in self._current():
            raise KeyError(
                message(
                    f"there is no value for the variable {index.marker!r} in this state",
                    where="State",
                    expected="one of " + ", ".join(map(repr, self._current())),
                    instead="model, state = nn.make_with_state(Model)(...), and use that model with that state",
                )
            )
        return index.marker

    def get(self, item: Variable) -> Any:
        """The value of one variable.

        Args:
            item: a `Variable` of the model that the state belongs to.

        Returns:
            Its value, as given to `Variable` or `set`.

        Raises:
            ValueError: if this state is old, or `item` is not a `Variable`.
            KeyError: if `item` belongs to another model.
        """
        return self._current()[self._marker(item)]

    def set(self, item: Variable, value: Any) -> "State":
        """Replaces the value of one variable.

        Args:
            item: a `Variable` of the model that the state belongs to.
            value: the new value, with the structure, shapes and dtypes of the old one.

        Returns:
            The new state; this one can no longer be used.

        Raises:
            ValueError: if this state is old, `item` is not a `Variable`, or the new value differs in structure, shapes
                or dtypes.
            KeyError: if `item` belongs to another model.
        """
        marker = self._marker(item)
        old = self._current()[marker]
        value = jtu.tree_map(lambda x: strong(x) if is_array_like(x) else x, value)
        if jtu.tree_structure(old) != jtu.tree_structure(value) or any(
            a.shape != b.shape or a.dtype != b.dtype
            for a, b in zip(jtu.tree_leaves(old), jtu.tree_leaves(value), strict=True)
        ):
            raise value_error(
                "the new value of a state has another structure, shape or dtype than the old one",
                where=f"State.set: {marker}",
                expected="the same structure, shapes and dtypes as before",
                got=diff_text(old, value, weak_type=False, root="value"),
                instead="cast it with `.astype`, and keep the structure and shapes",
            )
        return self._with({marker: jtu.tree_map(_placed_as, value, old)})

    def substate(self, pytree: Any) -> "State":
        """The part of the state that belongs to a part of the model, to pass it to `jax.vmap`, for instance.

        Args:
            pytree: a layer, or any tree with variables in it.

        Returns:
            A state with the values of these variables only. This one stays valid.

        Raises:
            ValueError: if this state is old.
            KeyError: if a variable belongs to another model.
        """
        markers = [self._marker(index) for _, index in variables_in(pytree)]
        return State.of_values({marker: self._current()[marker] for marker in markers})

    def update(self, substate: "State") -> "State":
        """Puts the values of a `substate` back.

        Args:
            substate: a state with values for some of the variables. The values are not checked.

        Returns:
            The new state; this one can no longer be used, `substate` can.

        Raises:
            ValueError: if this state or `substate` is old, or `substate` is not a `State`.
            KeyError: if `substate` holds a value for a variable that this state does not have.
        """
        if not isinstance(substate, State):
            raise value_error(
                "a state can only be updated with another state",
                where="State.update(substate)",
                expected="the state that `substate` returned, or a newer one",
                got=short(substate),
                instead="state.set(variable, value) for one value",
            )
        new = substate._current()
        unknown = [marker for marker in new if marker not in self._current()]
        if unknown:
            raise KeyError(
                message(
                    f"there is no variable {unknown[0]!r} in this state",
                    where="State.update(substate)",
                    expected="a part of this state",
                    got=short(substate),
                )
            )
        return self._with(new)

    def _with(self, changes: Mapping[Any, Any]) -> "State":
        new = State.of_values({**self._current(), **changes})
        self._values = None
        return new

    def __repr__(self) -> str:
        if self._values is None:
            return "State(~old~)"
        return f"State({tree_pformat({str(k): v for k, v in self._values.items()})})"


def _placed_as(value: Any, old: Any) -> Any:
    """The value with the sharding (on a mesh) and the weak type of the old one."""
    return weak_like(placed_like(value, jax.typeof(old)), jax.typeof(old))


def _no_state_of(model: Any, path: Any, why: str, got: str) -> ValueError:
    return value_error(
        f"a State cannot be made from an existing model: {why}",
        where=f"State(model): {path_text(path, 'model')}",
        expected="the class of the model, or the function that makes it",
        got=f"{got} in {short(model)}",
        instead="model, state = vernal.nn.make_with_state(Model)(...)",
    )


def _flatten(state: State) -> tuple[tuple[Any, ...], tuple[Hashable, ...]]:
    values = state._current()
    return tuple(values.values()), tuple(values)


def _flatten_with_keys(state: State) -> tuple[tuple[Any, ...], tuple[Hashable, ...]]:
    values = state._current()
    return tuple((jtu.DictKey(k), v) for k, v in values.items()), tuple(values)


def _unflatten(markers: tuple[Hashable, ...], values: Any) -> State:
    return State.of_values(dict(zip(markers, values, strict=True)))


jtu.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)
