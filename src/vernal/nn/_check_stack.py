"""What a `Stack` refuses: arguments that do not fit its layers, and layers that do not fit each other."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._ground import same
from ..show import diff_text, path_text, short, type_error, value_error
from ..trees import is_array, partition
from ._layer_arguments import as_flag


def check_maker(make_layer: Any) -> None:
    if not callable(make_layer):
        raise type_error(
            "`Stack` makes its layers by a function",
            where="Stack(make_layer, num_layers, key=...)",
            expected="a function from a random key to a layer",
            got=short(make_layer),
            instead="nn.Stack(lambda key: Layer(..., key=key), num_layers, key=key), or nn.Stack.of(layers)",
        )


def as_policy(checkpoint: Any) -> bool | Callable[..., Any]:
    """The setting `checkpoint`: a flag, or a policy of JAX."""
    if callable(checkpoint):
        return checkpoint
    policy = "a policy such as jax.checkpoint_policies.dots_saveable, for what else to keep"
    return as_flag("Stack", "checkpoint", checkpoint, policy)


def check_each(each: dict[str, Any], num_layers: int, instead: str) -> None:
    for path, leaf in jtu.tree_leaves_with_path(each):
        if not is_array(leaf) or np.shape(leaf)[:1] != (num_layers,):
            raise value_error(
                "`each` does not have an entry for every layer",
                where=path_text(path, "each"),
                expected=f"an array with a leading axis of length num_layers={num_layers}",
                got=short(leaf),
                instead=instead,
            )


def check_alike(layers: Any) -> None:
    if not isinstance(layers, list | tuple):
        raise type_error(
            "the layers of `Stack.of` must be in a list",
            where="Stack.of(layers)",
            expected="a list of layers",
            got=short(layers),
            instead="nn.Stack.of([layer, layer])",
        )
    if not layers:
        raise value_error(
            "there are no layers to stack", where="Stack.of(layers)", expected="at least one"
        )
    first, rest = partition(layers[0], is_array)
    for i, layer in enumerate(layers):
        arrays, other = partition(layer, is_array)
        alike = jtu.tree_structure((first, rest)) == jtu.tree_structure((arrays, other))
        if not (alike and types_of(first) == types_of(arrays) and _same_leaves(rest, other)):
            raise value_error(
                "the layers of a `Stack` may differ only in the values of their arrays",
                where=f"Stack.of(layers)[{i}]",
                expected="a layer like layers[0]",
                got=diff_text(layers[0], layer, weak_type=False, root="layer"),
                instead="a Stack for each run of layers that are alike; vernal.unfreeze for a layer that is frozen",
            )


def _same_leaves(a: Any, b: Any) -> bool:
    return all(map(same, jtu.tree_leaves(a), jtu.tree_leaves(b)))


def types_of(tree: Any) -> list[Any]:
    return [(np.shape(leaf), leaf.dtype) for leaf in map(jnp.asarray, jtu.tree_leaves(tree))]


def as_pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise value_error(
            "with collect=True, every layer of a `Stack` must return a pair",
            where="stack(x, ..., collect=True)",
            expected="(x, what to collect)",
            got=short(result),
        )
    return result


def check_same(x: Any, y: Any) -> None:
    if jtu.tree_structure(x) != jtu.tree_structure(y) or types_of(x) != types_of(y):
        raise value_error(
            "each layer of a `Stack` must return what the next one takes",
            where="stack(x, ...)",
            expected="an output of the structure, shapes and dtypes of the input",
            got=diff_text(x, y, weak_type=False, root="output"),
            instead="convert `x` to this shape and dtype before the stack, or let the layers keep those of `x`",
        )
