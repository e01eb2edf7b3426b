"""`Variable`: a value of a layer that a call changes besides its result, such as running statistics.

There are two ways to carry the value, and a layer may serve both:

    y, model = nn.apply(model, x)                  the value stays in the model (see `_apply.py`)
    model, state = nn.make_with_state(Model)(...)  the value is in a `State` (see `_with_state.py`),
    y, state = model(x, state)                     which is handed through every call
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
    """What stands in a `Variable` whose value is in a `State`."""


class Variable(Module, Generic[V]):
    """A value of a layer that a call reads and replaces, such as a running mean or a counter.

    Put one into a field. In the call of the layer, read it as `self.count.value` and leave a new value by
    `x = self.count.update(new, x)`. `vernal.nn.apply` calls a model and returns it with the new values, from
    inside `jax.jit`, `jax.vmap`, `jax.lax.scan`, `jax.lax.cond`, `jax.checkpoint` and `jax.grad` as well. What is read
    is always what was left last, by an earlier call of the layer or an earlier step of a loop too.

    It is a buffer: never trained, and no derivative passes through it. It adds nothing to the paths of its arrays: in
    checkpoints, patterns and messages that of `Variable(mean)` in the field `running_mean` is
    `norm.running_mean`, and those of `Variable((u, v))` in `vectors` are `norm.vectors.0` and `norm.vectors.1`.

    Args:
        value: its first value: an array, or a tree of them. Numbers become arrays.
        marker: under what a `State` holds it, anything that can be hashed; `vernal.nn.make_with_state` gives the path.

    Attributes:
        value: the current value (see below).
        stored: the value in the model, as it was before the call.
        marker: as given.

    Raises:
        ValueError: if `value` is a function.
        TypeError: if something in `value` is not an array.

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

        Another value, from outside:

        >>> counter = vernal.tree_at(lambda m: m.calls.value, counter, jnp.array(0))
        >>> print(nn.apply(counter, jnp.array(10))[0])
        10

        Whether a call in inference changes it is for the layer to decide, by a field `inference: bool = False`, which
        `vernal.nn.inference_mode` and `apply(..., train=False)` set. One without that field changes it always.

        A layer that takes an optional `state` as well, for `make_with_state`, reads
        `self.calls.value if state is None else state.get(self.calls)`, and leaves `state.set(self.calls, new)`.
    """

    _vernal_unnamed: ClassVar[str] = "stored"

    marker: Hashable = field(static=True)
    stored: Any = field(trainable=False)

    def __init__(self, value: V, *, marker: Hashable = None):
        if callable(value) and not isinstance(value, Module):
            raise value_error(
                "a variable needs its first value, not a function",
                where="Variable(value)",
                expected="an array, or a tree of arrays",
                got=short(value),
                instead="Variable(make())",
            )
        self.marker = marker
        self.stored = jtu.tree_map_with_path(_as_array, value)

    @property
    def value(self) -> V:
        """The current value: inside `vernal.nn.apply` what the last `update` has left, otherwise what is in the model.

        No derivative reaches the value in the model.

        Raises:
            RuntimeError: if the value is in a `State`.
        """
        return planted(self._here())

    def update(self, value: Any, through: T) -> T:
        """Leaves a new value, inside `vernal.nn.apply`. A variable stays as it is if anything of it is frozen (see
        `vernal.freeze`).

        Args:
            value: the new value, with the structure, shapes and dtypes of the old one.
            through: what the layer goes on with, an array or a tree with arrays in it: it ties the new value
                to this place in the program.

        Returns:
            `through`. Use this instead of what was given.

        Raises:
            RuntimeError: outside of `vernal.nn.apply`, when it is run; if the value is in a `State`.
            ValueError: if structure, shapes or dtypes differ, or the elements of a `jax.vmap` inside of the
                model disagree: see `vernal.harvest.sow`.
        """
        if is_partly_frozen(self):
            return through
        return sow(self._here(), value, through, where="Variable.update")

    def _here(self) -> Any:
        if isinstance(self.stored, Elsewhere):
            raise RuntimeError(
                message(
                    "the state of this model is not in it",
                    where=str(self.marker),
                    expected="the `state` that `make_with_state` returned along with the model",
                    got="no state",
                    instead="y, state = model(x, state), and in a layer state.get(variable); without make_with_state, "
                    "nn.apply(model, x), if a layer on the way hands on no state (a Stack does not, a Sequential does "
                    "so to a StatefulLayer)",
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
        raise _no_array(path, x, "keep what does not change in a field of the layer")
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
