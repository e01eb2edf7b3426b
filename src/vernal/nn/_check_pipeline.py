"""What `pipeline` refuses: an axis, layers and rows that do not fit each other."""

from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax import lax

from ..show import message, path_text, short, type_error, value_error
from ..transforms import varying_axes
from ..trees import is_array, partition
from ._keys import keys
from ._stack import Stack


def check_axis(axis_name: Any) -> int:
    """The number of devices along the axis. Without the check of varying axes, derivatives inside the mapped function
    would be those of a sum over the devices."""
    try:
        known = axis_name in varying_axes(lax.axis_index(axis_name))
    except NameError:
        known = False
    if not known:
        raise value_error(
            "a pipeline runs over an axis of `filter_shard_map`",
            where="argument `axis_name` of pipeline",
            expected="the name of one axis that is mapped over, with JAX's check of varying axes",
            got=repr(axis_name),
            instead="vernal.filter_shard_map(..., mesh=vernal.sharding.make_mesh(stage=-1)), without check_vma=False",
        )
    return lax.axis_size(axis_name)


def check_layers(stack: Any, axis_name: str, stages: int) -> None:
    if not isinstance(stack, Stack):
        raise type_error(
            "a pipeline runs a `Stack`",
            where="argument `stack` of pipeline",
            expected="a Stack: layers of one structure",
            got=short(stack),
            instead="nn.Stack.of(layers), for a list of layers",
        )
    if keys(stack, None) is not stack:
        raise keeps_something()
    if stack.num_layers % stages:
        raise value_error(
            "the layers cannot be divided into equal stages",
            where="argument `stack` of pipeline",
            expected=f"a multiple of {stages} layers, one part for each device along {axis_name!r}",
            got=f"{stack.num_layers} layers",
        )
    own = stack.num_layers // stages
    for path, leaf in jtu.tree_leaves_with_path(partition(stack.layers, is_array)[0]):
        if np.shape(leaf)[:1] != (own,) or axis_name not in varying_axes(leaf):
            raise value_error(
                "the layers of a pipeline must be cut into stages",
                where=f"{path_text(path, 'stack.layers')} in pipeline",
                expected=f"{own} of {stack.num_layers} layers, which differ between the {stages} devices along "
                f"{axis_name!r}",
                got=jax.typeof(leaf).str_short(),
                instead=f"the whole stack as an argument, and jax.P({axis_name!r}) in its place in in_specs",
            )


def check_shared(given: dict[str, Any], axis_name: str) -> None:
    for path, leaf in jtu.tree_leaves_with_path(given):
        if axis_name in varying_axes(leaf):
            raise value_error(
                "the input of a pipeline must be the same on all of its devices",
                where=f"{path_text(path, '')} of pipeline",
                expected=f"an array that does not vary over {axis_name!r}",
                got=jax.typeof(leaf).str_short(),
                instead=f"in_specs without {axis_name!r} in its place: jax.P(), or jax.P('data')",
            )


def check_rows(x: Any, parts: int) -> None:
    leaves = jtu.tree_leaves_with_path(x)
    rows = np.shape(leaves[0][1])[:1] if leaves else ()
    for path, leaf in leaves or [((), x)]:
        if not rows or np.shape(leaf)[:1] != rows or rows[0] % parts:
            raise value_error(
                "the batch cannot be divided into equal micro-batches",
                where=f"{path_text(path, 'x')} of pipeline",
                expected=f"arrays with the same number of rows, a multiple of microbatches={parts}",
                got=short(leaf),
                instead="another number of micro-batches, or a padded batch",
            )


def keeps_something() -> NotImplementedError:
    return NotImplementedError(
        message(
            "a layer of a pipeline must not keep anything besides its result",
            where="pipeline(stack, x, ...)",
            expected="layers that update no state, whose results are not captured, and that are given their random "
            "keys by the call",
            instead="pipeline(stack, x, ..., key=key); nn.inference_mode(stack), or a LayerNorm for a BatchNorm",
        )
    )
