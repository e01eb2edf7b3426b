"""The multi-layer perceptron."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..loops import scan
from ..modules import Module, field
from ..show import short, value_error
from ..trees import check_key, combine, is_array, partition
from ._activation import check_activation
from ._batch import batched
from ._layer_arguments import as_flag, check_shape, check_size
from ._linear import Linear, features, vector_shape
from ._mesh import along, like, stacked
from ._places import Unrolled
from ._random import split_keys

Activation = Callable[[Any], Any]


def _identity(x: Any) -> Any:
    return x


def _copies(activation: Activation, shape: tuple[int, ...]) -> Activation:
    """The activation with `shape` copies of each of its arrays, along new axes in front."""
    arrays, rest = partition(activation, is_array)
    stacked = jtu.tree_map(lambda a: jnp.broadcast_to(a, shape + a.shape), arrays)
    return combine(stacked, rest)


def _copy(activation: Activation, index: Any) -> Activation:
    arrays, rest = partition(activation, is_array)
    return combine(jtu.tree_map(lambda a: a[index], stacked(arrays)), rest)


def _activate(activation: Activation, x: jax.Array) -> jax.Array:
    """Applies an activation to a layer: as a whole, or to each neuron with its own copy of the arrays."""
    arrays, rest = partition(activation, is_array)
    if not jtu.tree_leaves(arrays) or x.ndim == 0:
        return activation(x)
    arrays = jtu.tree_map(lambda a: along(a, x), arrays)
    return jax.vmap(lambda arrays, x: combine(arrays, rest)(x))(arrays, x)


def _check_copies(activation: Activation, shape: tuple[int, ...], argument: str) -> None:
    """Refuses an activation, put there by `vernal.tree_at`, whose arrays lack the axes of one copy per neuron."""
    for array in jtu.tree_leaves(partition(activation, is_array)[0]):
        if array.shape[: len(shape)] != shape:
            raise value_error(
                "an activation of `MLP` must have its own arrays for every neuron",
                where=f"`{argument}` of MLP",
                expected=f"arrays with the leading axes {shape}",
                got=short(activation),
                instead=f"MLP({argument}=...), which makes them; or broadcast its arrays to these axes first",
            )


class MLP(Module):
    """A multi-layer perceptron: linear layers with an activation after each.

    Args:
        in_size: the length of the input, or `"scalar"` for an input of shape `()`.
        out_size: the length of the output, or `"scalar"` for an output of shape `()`.
        width_size: the length of each hidden layer.
        depth: the number of hidden layers. `depth=0` is one linear layer, `depth=2` is three.
        activation: applied after each hidden layer. A function is called with the whole layer at once. A
            callable that holds arrays (such as `PReLU`) is copied: every neuron of every hidden layer has
            its own copy, trained separately and called with that neuron's value.
        final_activation: likewise after the last layer; the identity by default.
        use_bias: whether the hidden layers have a bias.
        use_final_bias: whether the last layer has a bias.
        dtype: the dtype of the weights; `float32` by default (`float64` if JAX has 64-bit numbers
            switched on).
        scan: whether to stack the layers from one hidden layer to the next and run them with
            `vernal.loops.scan`. The program is then as small for a deep network as for a shallow one,
            and compiles as fast; the results are the same.
        key: a JAX random key for the initial weights.

    Attributes:
        layers: the linear layers in order. With `scan=True` and `depth > 0` there are three: the first,
            the middle ones stacked into one whose weights have a leading axis of length `depth - 1`, and
            the last.
        activation: its arrays, if it has any, have leading axes `(depth, width_size)`.
        final_activation: its arrays, if it has any, have a leading axis `(out_size,)`.

    Raises:
        ValueError: for a size that is not an integer of at least 0, an integer `dtype`, or an activation that is not a
            function or needs a random key, such as `Dropout`; when called, for an input of the wrong shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> model = nn.MLP(2, "scalar", width_size=8, depth=2, activation=jax.nn.tanh, key=jax.random.key(0))
        >>> jax.jit(model)(jnp.ones((5, 2))).shape
        (5,)
        >>> jax.grad(lambda m: m(jnp.ones(2)))(model).layers[0].weight.shape
        (8, 2)
    """

    layers: tuple[Linear, ...]
    activation: Activation
    final_activation: Activation
    use_bias: bool = field(static=True)
    use_final_bias: bool = field(static=True)
    in_size: int | Literal["scalar"] = field(static=True)
    out_size: int | Literal["scalar"] = field(static=True)
    width_size: int = field(static=True)
    depth: int = field(static=True)
    scan: bool = field(static=True)

    _linear: ClassVar[type[Linear]] = Linear

    def __init__(
        self,
        in_size: int | Literal["scalar"],
        out_size: int | Literal["scalar"],
        width_size: int,
        depth: int,
        activation: Activation = jax.nn.relu,
        final_activation: Activation = _identity,
        use_bias: bool = True,
        use_final_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        scan: bool = False,
        key: PRNGKeyArray,
    ):
        check_activation("MLP", activation, "activation")
        check_activation("MLP", final_activation, "final_activation")
        self.in_size = features("MLP", "in_size", in_size)
        self.out_size = features("MLP", "out_size", out_size)
        self.width_size = width = check_size("MLP", "width_size", width_size, minimum=0)
        self.depth = check_size("MLP", "depth", depth, minimum=0)
        self.use_bias = as_flag(type(self).__name__, "use_bias", use_bias)
        self.use_final_bias = as_flag(type(self).__name__, "use_final_bias", use_final_bias)
        self.scan = as_flag(type(self).__name__, "scan", scan)
        *inner, last = split_keys(check_key("MLP", key), self.depth + 1)

        def hidden(key: PRNGKeyArray) -> Linear:
            return self._linear(width, width, use_bias, dtype, key=key)

        before_last = self.in_size
        layers: list[Linear] = []
        if self.depth > 0:
            first, *inner = inner
            layers.append(self._linear(self.in_size, width, use_bias, dtype, key=first))
            layers.extend(
                [jax.vmap(hidden)(jax.random.split(key, self.depth + 1)[1:-1])]
                if scan
                else map(hidden, inner)
            )
            before_last = width
        layers.append(self._linear(before_last, self.out_size, use_final_bias, dtype, key=last))
        self.layers = tuple(layers)
        self.activation = _copies(activation, (self.depth, width))
        self.final_activation = _copies(
            final_activation, () if self.out_size == "scalar" else (self.out_size,)
        )

    @jax.named_scope("vernal.nn.MLP")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> jax.Array:
        """Applies the layers.

        Args:
            x: shape `(..., in_size)`, or `(...)` for a scalar, where `...` are batch axes: any number
                of them, or none. Activations see one example at a time.
            key: ignored; here so that all layers are called alike.

        Returns:
            Shape `(..., out_size)`, or `(...)`.
        """
        check_activation("MLP", self.activation, "activation")
        check_activation("MLP", self.final_activation, "final_activation")
        check_shape("MLP", x, vector_shape("in_size", self.in_size))
        return batched(self._one, jnp.asarray(x), 0 if self.in_size == "scalar" else 1)

    def _one(self, x: jax.Array) -> jax.Array:
        if self.scan and self.depth > 0:
            x = self._hidden_by_scan(x)
        else:
            for i, layer in enumerate(self.layers[:-1]):
                x = layer(x)
                _check_copies(self.activation, (len(self.layers) - 1, *x.shape), "activation")
                x = _activate(_copy(self.activation, i), x)
        x = self.layers[-1](x)
        _check_copies(self.final_activation, x.shape, "final_activation")
        return _activate(self.final_activation, x)

    def _hidden_by_scan(self, x: jax.Array) -> jax.Array:
        if len(self.layers) != 3:
            raise value_error(
                "an `MLP` with scan=True must store the layers between the first and the last as one",
                where="`layers` of MLP",
                expected="three layers, the second with a leading axis in all of its arrays",
                got=short(self.layers),
                instead="MLP(..., scan=False), which stores each layer separately",
            )
        first, between, _ = self.layers
        x = first(x)
        depth = 1 + jtu.tree_leaves(partition(between, is_array)[0])[0].shape[0]
        _check_copies(self.activation, (depth, *x.shape), "activation")
        arrays, rest = partition(_copy(self.activation, slice(1, None)), is_array)

        def step(x: jax.Array, layer_and_arrays: Any) -> tuple[jax.Array, None]:
            layer, arrays = layer_and_arrays
            return like(_activate(combine(arrays, rest), layer(x)), x), None

        x = _activate(_copy(self.activation, 0), x)
        return scan(step, x, stacked((between, arrays)))[0]

    def __unrolled__(self) -> Unrolled:
        if not (self.scan and self.depth > 0):
            return []
        hidden = tuple(f"layers.{i}" for i in range(1, self.depth))
        return [(("layers", "1"), hidden), (("layers", "2"), f"layers.{self.depth}")]
