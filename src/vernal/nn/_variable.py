"""`Variable`: a value of a layer that a call updates besides returning a result, such as running statistics.

There are two ways to carry the value, and a layer may support both:

    y, model = nn.apply(model, x)                  the value stays in the model (see `_apply.py`)
    model, state = nn.make_with_state(Model)(...)  the value is in a `State` (see `_with_state.py`),
    y, state = model(x, state)                     which is passed through every call
"""

from collections.abc import Hashable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.tree_util as jtu

from .._ground import strong
from ..harvest import planted, sow
from ..modules import Module, field, is_partly_frozen
from ..show import message, path_text, short, type_error, value_error
from ..trees import is_array_like

T = TypeVar("T")
V = TypeVar("V")


class Elsewhere(Module):
    """A placeholder in a `Variable` whose value is in a `State`."""


class Variable(Module, Generic[V]):
    """A value of a layer that a call reads and replaces, such as a running mean or a counter.

    Put one into a field. When the layer is called, read it as `self.count.value`, and set a new value by
    `x = self.count.update(new, x)`. `vernal.nn.apply` calls a model and returns it with the new values, also from
    inside `jax.jit`, `jax.vmap`, `jax.lax.scan`, `jax.lax.cond`, `jax.checkpoint` and `jax.grad`. A read always gives
    the latest value, also one set by an earlier call of the layer or an earlier step of a loop.

    It is a buffer: never trained, and no derivative passes through it. It adds nothing to the paths of its arrays: in
    checkpoints, patterns and messages, a `Variable(mean)` in the field `running_mean` is `norm.running_mean`, and the
    arrays of a `Variable((u, v))` in `vectors` are `norm.vectors.0` and `norm.vectors.1`.

    Args:
        value: the initial value: an array, or a tree of arrays. Numbers become arrays.
        marker: the hashable key of its value in a `State`; `vernal.nn.make_with_state` sets it to the path.

    Attributes:
        value: the current value (see below).
        stored: the value in the model, as it was before the call.
        marker: as given.

    Raises:
        ValueError: if `value` is a function.
        TypeError: if `value` holds something that is not an array.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal import nn
        >>> class Counter(vernal.Module):
        ...     calls: nn.Variable
        ...     def __init__(self):
        ...         self.calls = nn.Variable(jnp.array(0))
        ...     def __call__(self, x):
        ...         x = self.calls.update(self.calls.value + 1, x)
        ...         return self.calls.value * x
        >>> counter = Counter()
        >>> for _ in range(3):
        ...     y, counter = nn.apply(counter, jnp.array(10))
        >>> print(y, counter.calls.value)
        30 3

        Set the value from outside:

        >>> counter = vernal.tree_at(lambda m: m.calls.value, counter, jnp.array(0))
        >>> print(nn.apply(counter, jnp.array(10))[0])
        10

        The layer decides whether a call in inference updates the value: give it a field `inference: bool = False`,
        which `vernal.nn.inference_mode` and `apply(..., train=False)` set. A layer without that field always updates.

        To support `make_with_state` as well, take an optional `state`: read
        `self.calls.value if state is None else state.get(self.calls)`, and return `state.set(self.calls, new)`.
    """

    _vernal_unnamed: ClassVar[str] = "stored"
    _vernal_instead: ClassVar[str] = (
        "in a layer, x = self.variable.update(new, x), with an array x that the layer goes on with; "
        "from outside, model = vernal.tree_at(lambda m: m.variable.{name}, model, new)"
    )

    marker: Hashable = field(static=True)
    stored: Any = field(trainable=False)

    def __init__(self, value: V, *, marker: Hashable = None):
        if callable(value) and not isinstance(value, Module):
            raise value_error(
                "a variable needs an initial value, not a function",
                where="Variable(value)",
                expected="an array, or a tree of arrays",
                got=short(value),
                instead="Variable(make())",
            )
        self.marker = marker
        self.stored = jtu.tree_map_with_path(_as_array, value)

    @property
    def value(self) -> V:
        """The current value: inside `vernal.nn.apply` that of the last `update`, otherwise that in the model.

        No derivative reaches the value in the model.

        Raises:
            RuntimeError: if the value is in a `State`.
        """
        return planted(self._here())

    def update(self, value: Any, through: T) -> T:
        """Sets a new value, inside `vernal.nn.apply`.

        A variable of which any part is frozen (see `vernal.freeze`) keeps its value.

        Args:
            value: the new value, with the structure, shapes and dtypes of the old one.
            through: an array that the layer uses next, or a tree with arrays in it: it ties the new value to this
                place in the program.

        Returns:
            `through`. Continue with this instead of the argument.

        Raises:
            RuntimeError: outside of `vernal.nn.apply`, when it is run; if the value is in a `State`.
            ValueError: if structure, shapes or dtypes differ, or the elements of a `jax.vmap` inside the model
                disagree: see `vernal.harvest.sow`.
        """
        if is_partly_frozen(self):
            return through
        return sow(self._here(), value, through, where="Variable.update")

    def _here(self) -> Any:
        if isinstance(self.stored, Elsewhere):
            raise RuntimeError(
                message(
                    "the model does not hold its state",
                    where=str(self.marker),
                    expected="the `state` that `make_with_state` returned along with the model",
                    got="no state",
                    instead="y, state = model(x, state), and in a layer state.get(variable); or build the model "
                    "without make_with_state and call nn.apply(model, x), if a layer in between does not pass the "
                    "state on (a Stack never does, a Sequential only to a StatefulLayer)",
                )
            )
        for path, x in jtu.tree_leaves_with_path(self.stored):
            if type(x) in (int, float):  # The bools of a mask may be read.
                raise _no_array(
                    path, x, "jnp.asarray(value), where the new value is put into the model"
                )
        return self.stored


def _as_array(path: Any, x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    if not is_array_like(x):
        raise _no_array(path, x, "store a constant in an ordinary field of the layer")
    return strong(x)


def _no_array(path: Any, x: Any, instead: str) -> TypeError:
    return type_error(
        "a variable must hold arrays only",
        where=path_text(path, root="Variable(value)"),
        expected="an array",
        got=short(x),
        instead=instead,
    )


def is_variable(x: Any) -> bool:
    """Whether a node is a `Variable`."""
    return isinstance(x, Variable)


def variables_in(pytree: Any) -> Iterator[tuple[Any, Variable]]:
    """Every variable in a tree, with its path."""
    for path, leaf in jtu.tree_leaves_with_path(pytree, is_leaf=is_variable):
        if isinstance(leaf, Variable):
            yield path, leaf
