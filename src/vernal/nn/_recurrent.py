"""`RNN`, `GRU` and `LSTM`: recurrent cells run over a sequence, in several layers and both directions.

The contribution of the input to the gates (`cell.project`) does not depend on the state. On an accelerator, which idles
during a loop of small operations, it is computed for all steps at once, before the loop. On a CPU that would cost more
than it saves: four times the input would go to memory and back, while inside the loop it stays in the cache.
"""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..loops import scan
from ..modules import Module, field
from ..show import short, type_error, value_error
from ..trees import check_key
from ._batch import batched, in_front
from ._cells import GRUCell, LSTMCell, RecurrentCell, RNNCell
from ._check_cells import check_cells
from ._dropout import Dropout, drops
from ._layer_arguments import as_flag, check_shape, check_size, known_value
from ._mesh import whole
from ._random import split_keys, use_key

_State = TypeVar("_State")


class Recurrent(Module, Generic[_State]):
    """The base class of `RNN`, `GRU` and `LSTM`.

    Attributes:
        cells: the cells of each layer: the forward one and, if `bidirectional`, the backward one.
        dropout: the `Dropout` between the layers.
    """

    cells: tuple[tuple[RecurrentCell[_State], ...], ...]
    dropout: Dropout
    input_size: int = field(static=True)
    hidden_size: int = field(static=True)
    num_layers: int = field(static=True)
    bidirectional: bool = field(static=True)

    cell_class: ClassVar[Callable[..., RecurrentCell[Any]]]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        use_bias: bool = True,
        bidirectional: bool = False,
        dropout_p: float = 0.0,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
    ):
        make = functools.partial(self.cell_class, use_bias=use_bias, dtype=dtype)
        self._build(make, input_size, hidden_size, num_layers, bidirectional, dropout_p, key)

    def _build(
        self,
        make_cell: Callable[..., RecurrentCell[_State]],
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bidirectional: bool,
        dropout_p: float,
        key: PRNGKeyArray,
    ) -> None:
        """Sets all fields; the cells are `make_cell(input_size, hidden_size, key=key)`."""
        name = type(self).__name__
        self.input_size = check_size(name, "input_size", input_size)
        self.hidden_size = check_size(name, "hidden_size", hidden_size)
        self.num_layers = check_size(name, "num_layers", num_layers)
        self.bidirectional = as_flag(type(self).__name__, "bidirectional", bidirectional)
        self.dropout = Dropout(dropout_p)
        keys = split_keys(check_key(name, key), self.num_layers)
        self.cells = tuple(
            tuple(
                make_cell(size, hidden_size, key=k) for k in split_keys(layer_key, self._directions)
            )
            for size, layer_key in zip(self._sizes(), keys, strict=True)
        )

    def _run(
        self, xs: ArrayLike, state: _State | None, length: Any, key: Any
    ) -> tuple[Array, _State]:
        name = type(self).__name__
        batch = check_shape(name, xs, (..., "time", ("input_size", self.input_size)), "xs")
        kind, sizes = self.cell_class, self._sizes()
        check_cells(name, self.cells, kind, sizes, self.hidden_size, self._directions)
        self._check_state(state, batch)
        xs = jnp.asarray(xs)
        # The common dtype of everything in a step: the carry of a loop must keep its dtype.
        dtype = jnp.result_type(xs, *jax.tree.leaves((self.cells, state)))
        valid = None
        if length is not None:
            if not jnp.issubdtype(_dtype(length), jnp.integer):
                raise type_error(
                    f"`{name}` was given a length that is not an integer",
                    where="argument `length`",
                    expected="integers",
                    got=short(length),
                    instead="length.astype(int)",
                )
            check_shape(name, length, batch, "length")
            _check_length(name, length, xs.shape[-2])
            steps = in_front(jnp.arange(xs.shape[-2]), xs.ndim - 1)
            valid = steps < jnp.expand_dims(length, -1)
            # Padding, which may be NaN, must not reach the gradient through the `where` in `_over_time`.
            xs = jnp.where(valid[..., None], xs, 0)
        finals: list[_State] = []
        drawn = self.num_layers > 1 and drops(self.dropout)
        key = use_key(key, self.dropout.key, name) if drawn else None
        for i, layer in enumerate(self.cells):
            if i > 0 and key is not None:
                xs = self.dropout(xs, key=jax.random.fold_in(key, i))
            outputs: list[Array] = []
            for cell in layer:
                first = None if state is None else _row(state, len(finals), dtype)
                run = functools.partial(_over_time, cell, dtype, reverse=len(outputs) == 1)
                ys, final = batched(run, xs, 2, first, valid)
                outputs.append(ys)
                finals.append(final)
            xs = jnp.concatenate(outputs, axis=-1)
        return xs, jax.tree.map(lambda *parts: jnp.stack(parts, axis=-2), *finals)

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _sizes(self) -> list[int]:
        """The input size of each layer."""
        return [self.input_size, *[self._directions * self.hidden_size] * (self.num_layers - 1)]

    def _check_state(self, state: Any, batch: tuple[Any, ...]) -> None:
        if state is None:
            return
        name, rows = type(self).__name__, self.num_layers * len(self.cells[0])
        expected = self.cells[0][0].zero_state(jnp.float32)
        if jax.tree.structure(state) != jax.tree.structure(expected):
            raise value_error(
                f"`{name}` was given a state of the wrong structure",
                where="argument `state`",
                expected="a tuple (hidden, memory)" if isinstance(expected, tuple) else "one array",
                got=short(state),
                instead="the final state that it returns, of shape (..., num_layers * directions, hidden_size) each",
            )
        for leaf in jax.tree.leaves(state):
            shape = (*batch, ("num_layers * directions", rows), ("hidden_size", self.hidden_size))
            check_shape(name, leaf, shape, "state")


def _dtype(x: Any) -> Any:
    return x.dtype if isinstance(x, Array) else np.asarray(x).dtype


def _check_length(layer: str, length: Any, time: Any) -> None:
    """Refuses lengths that do not fit the sequence, where they are known."""
    known = known_value(length)
    if known is None or not isinstance(time, int):
        return
    if ((known < 0) | (known > time)).any():
        raise value_error(
            f"`{layer}` was given a length outside of its sequence",
            where="argument `length`",
            expected=f"from 0 to {time}, the number of steps in `xs`",
            got=f"from {known.min()} to {known.max()}" if known.ndim else str(known),
        )


def _row(state: Any, index: int, dtype: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x)[..., index, :].astype(dtype), state)


def _over_time(
    cell: RecurrentCell[Any],
    dtype: Any,
    xs: Array,
    first: Any,
    valid: Array | None,
    *,
    reverse: bool,
) -> tuple[Array, Any]:
    """The hidden states of all steps of one sequence, and the final state. A step that is not valid keeps the state,
    and its output is zero."""

    ahead = jax.default_backend() != "cpu"
    cell = whole(cell)  # Once, not at every step.

    def step(state: Any, given: tuple[Array, Array | None]) -> tuple[Any, Array]:
        x, here = given
        after = cell.step(x if ahead else cell.project(x), state)
        hidden = jax.tree.leaves(after)[0]
        if here is None:
            return after, hidden
        kept = jax.tree.map(lambda new, old: jnp.where(here, new, old), after, state)
        return kept, jnp.where(here, hidden, 0)

    first = cell.zero_state(dtype) if first is None else first
    given = cell.project(xs) if ahead else xs, valid
    final, ys = scan(step, first, given, reverse=reverse)
    return ys, final


class RNN(Recurrent[Array]):
    """A plain recurrent network over a sequence: an `RNNCell` at each step.

    Args:
        input_size: the length of the input of each step.
        hidden_size: the length of the hidden state.
        num_layers: the number of layers; each runs over the outputs of the one before.
        use_bias: whether the cells have biases.
        bidirectional: whether each layer also runs backward over the sequence, with separate weights.
        dropout_p: the probability of dropout between the layers.
        dtype: the dtype of the weights; `float32` by default (`float64` if JAX has 64-bit numbers switched on).
        activation: as for `RNNCell`, the same in all layers.
        key: a JAX random key for the initial weights.

    Raises:
        ValueError: for a size below 1; when called, for arguments of the wrong shape, and for a
            `length` that is known to be negative or longer than the sequence.
        TypeError: when called, if `length` is not an integer.
        RuntimeError: when called without a key, if dropout needs one.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.RNN(2, 3, num_layers=2, activation=jax.nn.relu, key=jax.random.key(0))
        >>> ys, state = layer(jnp.ones((7, 2)))
        >>> ys.shape, state.shape
        ((7, 3), (2, 3))
    """

    cell_class = RNNCell

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        use_bias: bool = True,
        bidirectional: bool = False,
        dropout_p: float = 0.0,
        dtype: DTypeLike | None = None,
        *,
        activation: Callable[[Array], Array] = jnp.tanh,
        key: PRNGKeyArray,
    ):
        make = functools.partial(RNNCell, use_bias=use_bias, dtype=dtype, activation=activation)
        self._build(make, input_size, hidden_size, num_layers, bidirectional, dropout_p, key)

    @jax.named_scope("vernal.nn.RNN")
    def __call__(
        self,
        xs: ArrayLike,
        state: Array | None = None,
        *,
        length: ArrayLike | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Array, Array]:
        """Runs over a sequence.

        Args:
            xs: of shape `(..., time, input_size)`, where `...` are batch axes, if any.
            state: of shape `(..., num_layers * directions, hidden_size)`: for each layer, forward and then backward.
                None is zeros.
            length: the number of valid steps of `xs`, counted from the first, of shape `(...)`; None for all. The other
                steps do not change the state, and their outputs are zero. (A compiled program cannot refuse a length
                outside of the sequence: it is clipped to between 0 and the number of steps.)
            key: for dropout, which is independent for each sequence of a batch.

        Returns:
            The outputs of the last layer, of shape `(..., time, directions * hidden_size)`, and the final state, of the
            shape of `state`: that after the last valid step or, for the backward direction, after the first.
        """
        return self._run(xs, state, length, key)


class GRU(Recurrent[Array]):
    """Gated recurrent units over a sequence: a `GRUCell` at each step.

    Args:
        input_size: the length of the input of each step.
        hidden_size: the length of the hidden state.
        num_layers: the number of layers; each runs over the outputs of the one before.
        use_bias: whether the cells have biases.
        bidirectional: whether each layer also runs backward over the sequence, with separate weights.
        dropout_p: the probability of dropout between the layers.
        dtype: the dtype of the weights; `float32` by default (`float64` if JAX has 64-bit numbers switched on).
        key: a JAX random key for the initial weights.

    Raises:
        ValueError: for a size below 1; when called, for arguments of the wrong shape, and for a
            `length` that is known to be negative or longer than the sequence.
        TypeError: when called, if `length` is not an integer.
        RuntimeError: when called without a key, if dropout needs one.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.GRU(2, 3, num_layers=2, bidirectional=True, key=jax.random.key(0))
        >>> ys, state = layer(jnp.ones((7, 2)))
        >>> ys.shape, state.shape
        ((7, 6), (4, 3))
    """

    cell_class = GRUCell

    @jax.named_scope("vernal.nn.GRU")
    def __call__(
        self,
        xs: ArrayLike,
        state: Array | None = None,
        *,
        length: ArrayLike | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Array, Array]:
        """Runs over a sequence.

        Args:
            xs: of shape `(..., time, input_size)`, where `...` are batch axes, if any.
            state: of shape `(..., num_layers * directions, hidden_size)`: for each layer, forward and then backward.
                None is zeros.
            length: the number of valid steps of `xs`, counted from the first, of shape `(...)`; None for all. The other
                steps do not change the state, and their outputs are zero. (A compiled program cannot refuse a length
                outside of the sequence: it is clipped to between 0 and the number of steps.)
            key: for dropout, which is independent for each sequence of a batch.

        Returns:
            The outputs of the last layer, of shape `(..., time, directions * hidden_size)`, and the final state, of the
            shape of `state`: that after the last valid step or, for the backward direction, after the first. Both have
            the dtype that JAX promotes `xs`, the weights and `state` to: integer or bfloat16 inputs and float32
            weights give float32.
        """
        return self._run(xs, state, length, key)


class LSTM(Recurrent[tuple[Array, Array]]):
    """Long short-term memory over a sequence: an `LSTMCell` at each step.

    Args:
        input_size: the length of the input of each step.
        hidden_size: the length of the hidden state and of the memory.
        num_layers: the number of layers; each runs over the outputs of the one before.
        use_bias: whether the cells have biases.
        bidirectional: whether each layer also runs backward over the sequence, with separate weights.
        dropout_p: the probability of dropout between the layers.
        dtype: the dtype of the weights; `float32` by default (`float64` if JAX has 64-bit numbers switched on).
        key: a JAX random key for the initial weights.

    Raises:
        ValueError: for a size below 1; when called, for arguments of the wrong shape or structure, and for a
            `length` that is known to be negative or longer than the sequence.
        TypeError: when called, if `length` is not an integer.
        RuntimeError: when called without a key, if dropout needs one.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.LSTM(2, 3, key=jax.random.key(0))
        >>> ys, (hidden, memory) = layer(jnp.ones((7, 2)), length=5)
        >>> print(ys.shape, hidden.shape, jnp.array_equal(ys[4], hidden[0]))
        (7, 3) (1, 3) True
    """

    cell_class = LSTMCell

    @jax.named_scope("vernal.nn.LSTM")
    def __call__(
        self,
        xs: ArrayLike,
        state: tuple[Array, Array] | None = None,
        *,
        length: ArrayLike | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Array, tuple[Array, Array]]:
        """Runs over a sequence.

        Args:
            xs: of shape `(..., time, input_size)`, where `...` are batch axes, if any.
            state: hidden state and memory, each of shape `(..., num_layers * directions, hidden_size)`: for each
                layer, forward and then backward. None is zeros.
            length: the number of valid steps of `xs`, counted from the first, of shape `(...)`; None for all. The other
                steps do not change the state, and their outputs are zero. (A compiled program cannot refuse a length
                outside of the sequence: it is clipped to between 0 and the number of steps.)
            key: for dropout, which is independent for each sequence of a batch.

        Returns:
            The outputs of the last layer, of shape `(..., time, directions * hidden_size)`, and the final state, of the
            structure and shape of `state`: that after the last valid step or, for the backward direction, the first.
            Both have the dtype that JAX promotes `xs`, the weights and `state` to.
        """
        return self._run(xs, state, length, key)
