"""`RNNCell`, `GRUCell` and `LSTMCell`: one step of a recurrent network.

Each is split in two, for the layers that run it over a sequence (`_recurrent.py`): `project` is the contribution of the
input to all gates, which needs no state and can be computed for all steps at once; `step` is the rest.
"""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import short, type_error
from ..trees import check_key
from ._activation import check_activation, check_result
from ._batch import batched
from ._init import limit, uniforms, weight_dtype
from ._layer_arguments import (
    as_flag,
    check_kind,
    check_parameter,
    check_shape,
    check_size,
)
from ._mesh import beside, product, whole

_State = TypeVar("_State")


class RecurrentCell(Module, Generic[_State]):
    """The base of `RNNCell`, `GRUCell` and `LSTMCell`.

    Attributes:
        weight_ih: the weights of the input, with the rows of one gate after those of another.
        weight_hh: the weights of the hidden state, in the same order.
        bias: one number for each row of the weights, or None.
    """

    weight_ih: Array
    weight_hh: Array
    bias: Array | None
    input_size: int = field(static=True)
    hidden_size: int = field(static=True)
    use_bias: bool = field(static=True)

    _gates: ClassVar[int]

    def _draw(
        self, input_size: int, hidden_size: int, use_bias: bool, dtype: Any, key: Any
    ) -> Array | None:
        """Sets the fields that all cells have; returns a second bias, of shape `(hidden_size,)`."""
        name = type(self).__name__
        dtype = weight_dtype(name, dtype)
        self.input_size = check_size(name, "input_size", input_size)
        self.hidden_size = check_size(name, "hidden_size", hidden_size)
        self.use_bias = as_flag(type(self).__name__, "use_bias", use_bias)
        rows = self._rows
        weights = (rows, self.input_size), (rows, self.hidden_size)
        biases = ((rows,), (self.hidden_size,)) if self.use_bias else (None, None)
        self.weight_ih, self.weight_hh, self.bias, second = uniforms(
            check_key(name, key), (*weights, *biases), limit(self.hidden_size), dtype
        )
        return second

    @abc.abstractmethod
    def zero_state(self, dtype: DTypeLike) -> _State:
        """The state before the first step, if none is given."""

    @abc.abstractmethod
    def step(self, projected: Array, state: _State) -> _State:
        """The next state, from the projected input of this step."""

    def project(self, x: Array) -> Array:
        """The contribution of the input to all gates; `x` may have axes in front, such as time.

        `step` adds the bias last: between the two products it would keep XLA from adding up all three at once.
        """
        weight = whole(self.weight_ih)
        check_parameter(type(self).__name__, "weight_ih", weight, (self._rows, self.input_size))
        return product(x, weight)

    def _recur(self, hidden: Array) -> Array:
        """The contribution of the hidden state to all gates."""
        weight = whole(self.weight_hh)
        check_parameter(type(self).__name__, "weight_hh", weight, (self._rows, self.hidden_size))
        # Gates are not integers.
        check_kind(type(self).__name__, "weight_hh", weight, jnp.inexact)
        if self.bias is not None:
            check_parameter(type(self).__name__, "bias", self.bias, (self._rows,))
        return weight @ hidden

    @property
    def _rows(self) -> int:
        """The total length of all gates."""
        return self._gates * self.hidden_size

    def _next(self, x: Array, state: _State) -> _State:
        return self.step(self.project(x), state)

    def _check(self, input: ArrayLike, *states: tuple[str, ArrayLike]) -> None:
        name = type(self).__name__
        batch = check_shape(name, input, (..., ("input_size", self.input_size)), "input")
        for argument, state in states:
            check_shape(name, state, (*batch, ("hidden_size", self.hidden_size)), argument)


class RNNCell(RecurrentCell[Array]):
    r"""One step of a plain recurrent network, also called an Elman network.

        h' = activation(W x + U h + b)

    which is PyTorch's convention (`bias` is the sum of PyTorch's two). Weights and bias are drawn uniformly between
    `-1/sqrt(hidden_size)` and `1/sqrt(hidden_size)`.

    J. L. Elman, "Finding Structure in Time", Cognitive Science 14 (1990), doi:10.1207/s15516709cog1402_1.

    Args:
        input_size: the length of the input.
        hidden_size: the length of the hidden state.
        use_bias: whether there is a bias.
        activation: a function of one array, applied to all of the new hidden state.
        dtype: the dtype of the weights; `float32` by default (`float64` if JAX has 64-bit numbers switched on).
        key: a JAX random key for the initial weights.

    Attributes:
        weight_ih: W, of shape `(hidden_size, input_size)`.
        weight_hh: U, of shape `(hidden_size, hidden_size)`.
        bias: b, of shape `(hidden_size,)`, or None.

    Raises:
        ValueError: for a size below 1, a `dtype` of integers, or an activation that is not a function or needs a random
            key, such as `Dropout`; when called, for arguments of the wrong shape, and for an activation that changes
            the shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> cell = nn.RNNCell(2, 3, activation=jax.nn.relu, key=jax.random.key(0))
        >>> cell(jnp.ones(2), jnp.zeros(3)).shape
        (3,)
    """

    activation: Callable[[Array], Array]

    _gates = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        use_bias: bool = True,
        activation: Callable[[Array], Array] = jnp.tanh,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
    ):
        check_activation("RNNCell", activation, "activation")
        self._draw(input_size, hidden_size, use_bias, dtype, key)
        self.activation = activation

    def zero_state(self, dtype: DTypeLike) -> Array:
        """Zeros of shape `(hidden_size,)`."""
        return jnp.zeros(self.hidden_size, dtype)

    def step(self, projected: Array, state: Array) -> Array:
        """The next hidden state, from `project(input)`."""
        check_activation("RNNCell", self.activation, "activation")
        total = projected + self._recur(state)
        if self.bias is not None:
            total = total + beside(self.bias, total)
        out = self.activation(total)
        check_result("RNNCell", self.activation, "activation", out, total.shape)
        return out

    @jax.named_scope("vernal.nn.RNNCell")
    def __call__(
        self, input: ArrayLike, hidden: ArrayLike, *, key: PRNGKeyArray | None = None
    ) -> Array:
        """One step.

        Args:
            input: x, of shape `(..., input_size)`, where `...` are batch axes, if any.
            hidden: h, of shape `(..., hidden_size)`, with the same batch axes.
            key: ignored; here so that all layers are called alike.

        Returns:
            h', of shape `(..., hidden_size)`.
        """
        self._check(input, ("hidden", hidden))
        return batched(self._next, jnp.asarray(input), 1, jnp.asarray(hidden))


class GRUCell(RecurrentCell[Array]):
    r"""One step of a gated recurrent unit.

    With the reset, update and new gates r, z and n, each of length `hidden_size`,

        r = sigmoid(W_r x + U_r h + b_r)
        z = sigmoid(W_z x + U_z h + b_z)
        n = tanh(W_n x + b_n + r * (U_n h + c))
        h' = (1 - z) * n + z * h

    which is PyTorch's convention (`weight_ih` and `weight_hh` are the same; `bias` is the sum of PyTorch's two biases
    for r and z, and the first of them for n, where `bias_n` is the second). Weights and biases are drawn uniformly
    between `-1/sqrt(hidden_size)` and `1/sqrt(hidden_size)`.

    K. Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine Translation",
    EMNLP 2014, doi:10.3115/v1/D14-1179.

    Args:
        input_size: the length of the input.
        hidden_size: the length of the hidden state.
        use_bias: whether there are biases.
        dtype: the dtype of the weights; `float32` by default (`float64` if JAX has 64-bit numbers switched on).
        key: a JAX random key for the initial weights.

    Attributes:
        weight_ih: W, of shape `(3 * hidden_size, input_size)`: r, z, n.
        weight_hh: U, of shape `(3 * hidden_size, hidden_size)`.
        bias: b, of shape `(3 * hidden_size,)`, or None.
        bias_n: c, of shape `(hidden_size,)`, or None.

    Raises:
        ValueError: for a size below 1, or a `dtype` of integers; when called, for arguments of the wrong shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> cell = nn.GRUCell(2, 3, key=jax.random.key(0))
        >>> cell(jnp.ones(2), jnp.zeros(3)).shape
        (3,)
    """

    bias_n: Array | None

    _gates = 3

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
    ):
        self.bias_n = self._draw(input_size, hidden_size, use_bias, dtype, key)

    def zero_state(self, dtype: DTypeLike) -> Array:
        """Zeros of shape `(hidden_size,)`."""
        return jnp.zeros(self.hidden_size, dtype)

    def step(self, projected: Array, state: Array) -> Array:
        """The next hidden state, from `project(input)`."""
        r_x, z_x, n_x = jnp.split(projected, 3)
        r_h, z_h, n_h = jnp.split(self._recur(state), 3)
        r, z = r_x + r_h, z_x + z_h
        if self.bias is not None:
            r_b, z_b, n_b = jnp.split(beside(self.bias, projected), 3)
            r, z, n_x = r + r_b, z + z_b, n_x + n_b
        if self.bias_n is not None:
            check_parameter("GRUCell", "bias_n", self.bias_n, n_h.shape)
            n_h = n_h + beside(self.bias_n, n_h)
        r, z = jax.nn.sigmoid(r), jax.nn.sigmoid(z)
        n = jnp.tanh(n_x + r * n_h)
        return n + z * (state - n)

    @jax.named_scope("vernal.nn.GRUCell")
    def __call__(
        self, input: ArrayLike, hidden: ArrayLike, *, key: PRNGKeyArray | None = None
    ) -> Array:
        """One step.

        Args:
            input: x, of shape `(..., input_size)`, where `...` are batch axes, if any.
            hidden: h, of shape `(..., hidden_size)`, with the same batch axes.
            key: ignored; here so that all layers are called alike.

        Returns:
            h', of shape `(..., hidden_size)`, in the dtype to which JAX promotes x, h and the weights.
        """
        self._check(input, ("hidden", hidden))
        return batched(self._next, jnp.asarray(input), 1, jnp.asarray(hidden))


class LSTMCell(RecurrentCell[tuple[Array, Array]]):
    r"""One step of a long short-term memory.

    With the input, forget, cell and output gates i, f, g and o, each of length `hidden_size`,

        i = sigmoid(W_i x + U_i h + b_i)        f = sigmoid(W_f x + U_f h + b_f)
        g = tanh(W_g x + U_g h + b_g)           o = sigmoid(W_o x + U_o h + b_o)
        c' = f * c + i * g                      h' = o * tanh(c')

    which is PyTorch's convention (`bias` is the sum of PyTorch's two). Weights and bias are drawn uniformly between
    `-1/sqrt(hidden_size)` and `1/sqrt(hidden_size)`.

    S. Hochreiter and J. Schmidhuber, "Long Short-Term Memory", Neural Computation 9 (1997),
    doi:10.1162/neco.1997.9.8.1735.

    Args:
        input_size: the length of the input.
        hidden_size: the length of the hidden state.
        use_bias: whether there is a bias.
        dtype: the dtype of the weights; `float32` by default (`float64` if JAX has 64-bit numbers switched on).
        key: a JAX random key for the initial weights.

    Attributes:
        weight_ih: W, of shape `(4 * hidden_size, input_size)`: i, f, g, o.
        weight_hh: U, of shape `(4 * hidden_size, hidden_size)`.
        bias: b, of shape `(4 * hidden_size,)`, or None.

    Raises:
        ValueError: for a size below 1, or a `dtype` of integers; when called, for arguments of the wrong shape.
        TypeError: when called, for a state that is not a pair.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> cell = nn.LSTMCell(2, 3, key=jax.random.key(0))
        >>> hidden, memory = cell(jnp.ones(2), (jnp.zeros(3), jnp.zeros(3)))
        >>> hidden.shape, memory.shape
        ((3,), (3,))
    """

    _gates = 4

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
    ):
        self._draw(input_size, hidden_size, use_bias, dtype, key)

    def zero_state(self, dtype: DTypeLike) -> tuple[Array, Array]:
        """Hidden state and memory: zeros of shape `(hidden_size,)` each."""
        return jnp.zeros(self.hidden_size, dtype), jnp.zeros(self.hidden_size, dtype)

    def step(self, projected: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        """The next hidden state and memory, from `project(input)`."""
        hidden, memory = state
        gates = projected + self._recur(hidden)
        if self.bias is not None:
            gates = gates + beside(self.bias, gates)
        i, f, g, o = jnp.split(gates, 4)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(memory), memory

    @jax.named_scope("vernal.nn.LSTMCell")
    def __call__(
        self,
        input: ArrayLike,
        hidden: tuple[ArrayLike, ArrayLike],
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Array, Array]:
        """One step.

        Args:
            input: x, of shape `(..., input_size)`, where `...` are batch axes, if any.
            hidden: `(h, c)`, each of shape `(..., hidden_size)`, with the same batch axes.
            key: ignored; here so that all layers are called alike.

        Returns:
            `(h', c')`, each of shape `(..., hidden_size)`, in the dtype to which JAX promotes x, h, c and the weights.
        """
        if not (isinstance(hidden, tuple | list) and len(hidden) == 2):
            raise type_error(
                "the state of `LSTMCell` must be a pair",
                where="argument `hidden`",
                expected=f"(h, c), each of shape (..., hidden_size={self.hidden_size})",
                got=short(hidden),
            )
        h, c = hidden
        self._check(input, ("hidden[0]", h), ("hidden[1]", c))
        return batched(self._next, jnp.asarray(input), 1, (jnp.asarray(h), jnp.asarray(c)))
