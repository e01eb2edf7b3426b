"""`Stack`: many layers of one structure, stored as one with a leading axis and run by a loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array
from jaxtyping import PRNGKeyArray

from ..loops import scan
from ..modules import Module
from ..show import message, path_text, short, type_error, value_error
from ..transforms import filter_vmap
from ..trees import check_key, combine, is_array, partition, tree_at
from ._check_stack import as_pair, as_policy, check_alike, check_each, check_maker, check_same
from ._layer_arguments import as_flag, check_size
from ._mesh import like, stacked
from ._places import Unrolled
from ._sequential import _takes_key
from ._state import State


class Stack(Module):
    """Runs layers of one structure one after another, as a list of them would, but compiles only one.

    Every array of the layers is stored once, with a leading axis over the layers; `vernal.loops.scan` runs them. The
    program is as small for 64 layers as for 2, and compiles as fast; values and gradients are those of the list.

    `len`, iteration, `stack[i]` (a layer) and `stack[i:j]` (a `Stack`) work as on a list; `Stack.of(layers)` makes a
    stack from a list, and `list(stack)` a list again.

    Whatever addresses leaves by name sees `layers.weight` with its leading axis, once for all layers: `tree_at`, and
    the rules of `freeze`, of sharding and of saving. Randomness is per layer: `vernal.nn.initialise` and
    `vernal.nn.keys` give each layer what it would get in a list in the same place, as `blocks.3.weight`.

    Args:
        make_layer: makes a layer from a random key, its one positional argument. It runs once, under `jax.vmap`, so all
            layers have the same structure.
        num_layers: the number of layers.
        key: a JAX random key, split into one for each layer.
        each: keyword arguments of `make_layer` that differ by layer: pytrees whose arrays have a leading axis of length
            `num_layers`. `make_layer` is given traced values, so pass them only to settings that may be arrays, such as
            the `p` of `Dropout` and `DropPath`. `{"index": jnp.arange(num_layers)}` gives each layer its number.
        checkpoint: whether the backward pass recomputes the inside of each layer instead of keeping it: True keeps only
            what goes from layer to layer; a policy, such as `jax.checkpoint_policies.dots_saveable`, says what else to
            keep.
        unroll: the number of layers in one iteration of the loop.

    Attributes:
        layers: one layer, whose arrays have a leading axis of length `num_layers`.
        num_layers: as given; so are `checkpoint` and `unroll`.

    Raises:
        ValueError: for a number of layers or an `unroll` below 1, or an `each` without an entry for every layer; when
            called, for such an `each`, or a layer whose output differs in structure, shape or dtype from its input;
            when called or indexed, for `layers` without the leading axis.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal import nn
        >>> class Block(vernal.Module):
        ...     linear: nn.Linear
        ...     dropout: nn.Dropout
        ...     def __init__(self, size, key):
        ...         self.linear = nn.Linear(size, size, key=key)
        ...         self.dropout = nn.Dropout(0.1)
        ...     def __call__(self, x, *, key=None):
        ...         return x + self.dropout(jax.nn.gelu(self.linear(x)), key=key)
        >>> stack = nn.Stack(lambda key: Block(4, key), 6, key=jax.random.key(0), checkpoint=True)
        >>> stack.layers.linear.weight.shape, len(stack), stack[2].linear.weight.shape
        ((6, 4, 4), 6, (4, 4))
        >>> stack(jnp.ones(4), key=jax.random.key(1)).shape
        (4,)

        With branches that are dropped more often in deeper layers:

        >>> class Branch(vernal.Module):
        ...     linear: nn.Linear
        ...     drop_path: nn.DropPath
        ...     def __init__(self, key, rate):
        ...         self.linear = nn.Linear(4, 4, key=key)
        ...         self.drop_path = nn.DropPath(rate)
        ...     def __call__(self, x, *, key=None):
        ...         return x + self.drop_path(jax.nn.gelu(self.linear(x)), key=key)
        >>> rates = jnp.linspace(0.0, 0.5, 6)
        >>> stack = nn.Stack(Branch, 6, key=jax.random.key(0), each={"rate": rates})
        >>> stack[5].drop_path.p
        Array(0.5, dtype=float32)

        With a cache for each layer:

        >>> class Attending(vernal.Module):
        ...     attention: nn.MultiheadAttention
        ...     def __call__(self, x, cache):
        ...         y, cache = self.attention(x, x, x, cache=cache)
        ...         return x + y, cache
        >>> stack = nn.Stack(lambda key: Attending(nn.MultiheadAttention(2, 4, key=key)), 3, key=jax.random.key(0))
        >>> caches = jax.vmap(lambda layer: layer.attention.make_cache(8))(stack.layers)
        >>> tokens = jnp.ones((5, 4))
        >>> _, caches = stack(tokens[:4], each={"cache": caches}, collect=True)
        >>> y, caches = stack(tokens[4:], each={"cache": caches}, collect=True)
        >>> y.shape, jax.tree.leaves(caches)[0].shape[0]
        ((1, 4), 3)
    """

    layers: Any
    num_layers: int
    checkpoint: bool | Callable[..., Any]
    unroll: int

    def __init__(
        self,
        make_layer: Callable[..., Any],
        num_layers: int,
        *,
        key: PRNGKeyArray,
        each: Mapping[str, Any] | None = None,
        checkpoint: bool | Callable[..., Any] = False,
        unroll: int = 1,
    ):
        check_maker(make_layer)
        self.num_layers = check_size("Stack", "num_layers", num_layers)
        self.checkpoint = as_policy(checkpoint)
        self.unroll = check_size("Stack", "unroll", unroll)
        each = {} if each is None else dict(each)
        check_each(
            each,
            self.num_layers,
            "write values that all layers share into the function: lambda key: Layer(key, name=value)",
        )
        # By name: the signature does not say whether a second positional argument is wanted, and
        # `Block(key, size=4)` would take the number of the layer as its size.
        self.layers = filter_vmap(lambda key, each: make_layer(key, **each))(
            jax.random.split(check_key("Stack", key), num_layers), each
        )

    @classmethod
    def of(
        cls,
        layers: Sequence[Any],
        *,
        checkpoint: bool | Callable[..., Any] = False,
        unroll: int = 1,
    ) -> "Stack":
        """Stacks existing layers.

        Args:
            layers: a list of at least one layer; all of the same structure, with arrays of the same shapes and dtypes.
            checkpoint: as for the class.
            unroll: as for the class.

        Returns:
            The stack.

        Raises:
            TypeError: if `layers` is not a list.
            ValueError: if there is no layer, or if the layers differ in more than the values of their arrays.

        Example:
            >>> import jax
            >>> from vernal import nn
            >>> keys = jax.random.split(jax.random.key(0), 3)
            >>> stack = nn.Stack.of([nn.Linear(2, 2, key=k) for k in keys])
            >>> print(len(stack), stack[1] == nn.Linear(2, 2, key=keys[1]))
            3 True
        """
        check_alike(layers)
        cut = [partition(layer, is_array) for layer in layers]
        stacked = jtu.tree_map(lambda *arrays: jnp.stack(arrays), *(arrays for arrays, _ in cut))
        one = cls(
            lambda key: layers[0], 1, key=jax.random.key(0), checkpoint=checkpoint, unroll=unroll
        )
        return one._with(combine(stacked, cut[0][1]), len(layers))

    def _with(self, layers: Any, num_layers: int) -> "Stack":
        return tree_at(lambda stack: (stack.layers, stack.num_layers), self, (layers, num_layers))

    @jax.named_scope("vernal.nn.Stack")
    def __call__(
        self,
        x: Any,
        *args: Any,
        each: Mapping[str, Any] | None = None,
        collect: bool = False,
        key: PRNGKeyArray | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs all layers, each on the output of the one before: `x = layer(x, *args, **kwargs)`.

        Use `each` to pass every layer its own arguments, and `collect` to return an extra output of every layer. For
        example, a transformer whose layers return a pair `(x, cache)` decodes by
        `x, caches = stack(x, each={"cache": caches}, collect=True)`; `KVCache(..., batch=(num_layers,))` makes such
        caches. (State in the model, as with `vernal.nn.apply`, needs none of this.)

        Args:
            x: the input of the first layer: any pytree of arrays. Every layer must return the same structure, shapes
                and dtypes.
            *args: further arguments, the same for every layer.
            each: keyword arguments that differ by layer: pytrees whose arrays have a leading axis of length
                `num_layers`.
            collect: whether each layer returns a pair: the input of the next layer, and an extra output to keep.
            key: split into one key for each layer, if the layers take a `key`. None passes None on.
            **kwargs: further keyword arguments, the same for every layer.

        Returns:
            What the last layer returns. With `collect`, a pair: this, and the extra outputs of all layers, along a new
            leading axis.

        Raises:
            TypeError: if an argument is a `State`: it cannot be passed from layer to layer.
        """
        if any(isinstance(value, State) for value in (*args, *kwargs.values())):
            raise type_error(
                "a `Stack` takes no `state`: it holds the state of each layer",
                where="Stack(...)(x, state)",
                expected="a model that was not made by `make_with_state`",
                got="a State",
                instead="y, model = nn.apply(model, x)",
            )
        each = {} if each is None else dict(each)
        instead = "pass values that all layers share as ordinary arguments: stack(x, name=value)"
        check_each(each, self.num_layers, instead)
        collect = as_flag("Stack", "collect", collect)
        arrays, rest = partition(self.layers, is_array)
        self._check_stacked(arrays)
        keyed = _takes_key(self.layers) and not (key is None and "key" in each)
        keys = None if key is None else jax.random.split(check_key("Stack", key), self.num_layers)

        def step(x: Any, given: tuple[Any, dict[str, Any], Any]) -> tuple[Any, Any]:
            own, each, key = given
            more = {"key": key} if keyed else {}
            result = combine(own, rest)(x, *args, **each, **kwargs, **more)
            y, kept = as_pair(result) if collect else (result, None)
            check_same(x, y)
            # On a mesh, the output of a layer may be sharded differently.
            return jtu.tree_map(like, y, x), kept

        y, kept = scan(
            self._checkpointed(step),
            jtu.tree_map(jnp.asarray, x),
            stacked((arrays, each, keys)),
            length=self.num_layers,
            unroll=self.unroll,
        )
        return (y, kept) if collect else y

    def _checkpointed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        if self.checkpoint is False:
            return step
        policy = None if self.checkpoint is True else self.checkpoint
        # In a loop XLA cannot merge the recomputation with the forward pass. Fully unrolled, it would, and so keep the
        # results after all.
        return jax.checkpoint(step, policy=policy, prevent_cse=self.unroll >= self.num_layers)

    def __unrolled__(self) -> Unrolled:
        return [(("layers",), tuple(map(str, range(self.num_layers))))]

    def __getitem__(self, i: int | np.integer | slice | Array) -> Any:
        if isinstance(i, slice):
            chosen = range(self.num_layers)[i]
            if not chosen:
                raise value_error(
                    "a `Stack` must have at least one layer",
                    where=f"stack[{i.start}:{i.stop}:{i.step}]",
                    expected=f"a slice that picks some of the {self.num_layers} layers",
                )
            return self._with(self._pick(i), len(chosen))
        is_index = is_array(i) and i.ndim == 0 and jnp.issubdtype(i.dtype, jnp.integer)
        if isinstance(i, bool) or not (isinstance(i, int) or is_index):
            raise type_error(
                "the index of a `Stack` must be one integer or a slice",
                where="stack[i]",
                expected="one layer, stack[i], or some of them, stack[i:j]",
                got=short(i),
            )
        if isinstance(i, np.integer | np.ndarray):
            i = int(i)
        if isinstance(i, int) and not -self.num_layers <= i < self.num_layers:
            raise IndexError(
                message(
                    "the index of a `Stack` is out of range",
                    where=f"stack[{i}]",
                    expected=f"an index from {-self.num_layers} to {self.num_layers - 1}",
                )
            )
        return self._pick(i)

    def _check_stacked(self, arrays: Any) -> None:
        """Refuses arrays without the leading axis. `vernal.tree_at` may put a single layer there, whose rows would
        then be taken for layers."""
        for path, leaf in jtu.tree_leaves_with_path(arrays):
            if np.shape(leaf)[:1] != (self.num_layers,):
                raise value_error(
                    "every array of a `Stack` must have a leading axis over its layers",
                    where=path_text(path, "stack.layers"),
                    expected=f"an array with a leading axis of length num_layers={self.num_layers}",
                    got=short(leaf),
                    instead="nn.Stack.of(layers), which stacks a list of layers",
                )

    def _pick(self, i: Any) -> Any:
        self._check_stacked(partition(self.layers, is_array)[0])

        def pick(leaf: Any) -> Any:
            if is_array(leaf):
                return leaf[i]  # pyright: ignore[reportIndexIssue] (a stacked one)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.eval_shape(lambda array: array[i], leaf)
            if leaf is None or isinstance(leaf, (bool, int, float, complex, str)):
                # In a tree of masks or axes: the same for all layers.
                return leaf
            raise value_error(
                "one layer of a `Stack` cannot be picked: its arrays are slices of the stacked arrays",
                where="stack[i] in a function that picks nodes",
                expected="`stack.layers` or a part of it, which holds all layers together",
                got=f"stack[{i}]",
                instead="tree_at(lambda s: s.layers.weight, stack, replace_fn=lambda w: w.at[i].set(new))",
            )

        return jtu.tree_map(pick, self.layers, is_leaf=lambda x: x is None)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.num_layers))

    def __len__(self) -> int:
        return self.num_layers
