"""Ready-made rules for the usual ways to shard a model, made from the model.

All of them return plain dictionaries, which can be printed and changed: `rules | {"head.weight": jax.P()}`.
"""

import math
from collections.abc import Iterator
from typing import Any

from jax import P
from jax.sharding import Mesh

from ..trees import has_shape, node_parts, path_name
from ._rules import Rules, axis_size, placed_leaves, specs_by_name


def data_parallel() -> dict[str, P]:
    """Rules that replicate the model on every device; only the batch is sharded, by `shard_batch`.

    All devices run one program together. So a loop whose length depends on the data (an adaptive solver) runs on all of
    them for as long as the slowest example needs, and they communicate at every iteration. `vernal.filter_shard_map`
    runs the loop on each device separately, with one sum at the end; see the example. (`check_vma=False`, because the
    function writes out all of its communication.)

    Returns:
        Rules for any tree.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal.sharding import data_parallel, make_mesh, place, shard_batch
        >>> data_parallel()
        {'**': P()}
        >>> mesh = make_mesh(data=-1)
        >>> def loss(model, x):
        ...     last = lambda x: jax.lax.while_loop(lambda x: x > 1, lambda x: x - 1, x)
        ...     return jnp.mean(jax.vmap(lambda x: last(x) * model["scale"])(x))
        >>> @vernal.filter_jit
        ... @vernal.filter_shard_map(mesh=mesh, in_specs=(None, jax.P("data")), out_specs=None, check_vma=False)
        ... def loss_and_grads(model, x):
        ...     return jax.lax.pmean(vernal.filter_value_and_grad(loss)(model, x), "data")
        >>> model = place({"scale": jnp.array(3.0, jnp.float32)}, mesh, data_parallel())
        >>> x = shard_batch(jnp.arange(1.0, 1.0 + jax.device_count()), mesh, "data")
        >>> loss_and_grads(model, x)
        (Array(3., dtype=float32), {'scale': Array(1., dtype=float32)})
    """
    return {"**": P()}


def fsdp(
    model: Any,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    *,
    min_bytes: int = 2**16,
    rules: Rules | None = None,
) -> dict[str, P]:
    """Rules that shard each large array over the devices: fully sharded data parallelism.

    Parameters, gradients and the state of the optimiser take one n-th of the memory on each of n devices. An array is
    gathered where it is used, and gradients are summed into their parts. S. Rajbhandari et al., "ZeRO",
    arXiv:1910.02054, stage 3.

    Each large array is cut along its longest axis that divides evenly; among axes of equal length, along the first.
    Stacked layers (`nn.Stack`) are not cut along the stack, because its loop takes them out one by one. Arrays that do
    not divide stay whole.

    Args:
        model: any pytree of arrays, or of shapes, as `vernal.filter_eval_shape` makes it.
        mesh: see `make_mesh`.
        axis: the mesh axis, usually the one over which the batch is sharded; or a tuple of several.
        min_bytes: smaller arrays (for stacked layers: per layer) stay whole, because gathering them would cost more
            than it saves.
        rules: rules for arrays that are cut already, such as by `tensor_parallel`; these are cut along one more axis.

    Returns:
        A rule for each array, by its name.

    Raises:
        ValueError: for an axis that the mesh does not have, or `rules` that do not fit.

    Example:
        >>> import jax
        >>> from vernal import nn
        >>> from vernal.sharding import fsdp, make_mesh
        >>> model = nn.MLP(4, 512, 512, depth=1, key=jax.random.key(0))
        >>> fsdp(model, make_mesh(data=-1), "data", min_bytes=4096)
        {'layers.0.weight': P('data', None), 'layers.0.bias': P(), ...}
    """
    parts = axis_size(mesh, axis, "fsdp(model, mesh, axis)")
    cut = {} if rules is None else specs_by_name(model, mesh, rules, P(), "fsdp")
    stacked = _stacked(model)

    def spec(name: str, leaf: Any) -> P:
        before = stacked[name]
        entries = [*cut.get(name, P())]
        entries += [None] * (leaf.ndim - len(entries))
        one_layer = math.prod(leaf.shape[before:]) * leaf.dtype.itemsize
        free = [
            i
            for i in range(before, leaf.ndim)
            if entries[i] is None and leaf.shape[i] and leaf.shape[i] % parts == 0
        ]
        if one_layer < min_bytes or not free:
            return cut.get(name, P())
        longest = max(free, key=lambda i: leaf.shape[i])
        entries[longest] = axis
        return P(*entries)

    return {name: spec(name, leaf) for name, leaf in placed_leaves(model).items()}


def nodes(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All nodes and leaves of a tree, from the root down."""
    yield path, node
    if not has_shape(node):
        for key, part in node_parts(node) or []:
            yield from nodes(part, (*path, key))


def _stacked(tree: Any) -> dict[str, int]:
    """The number of leading axes that count layers, by the name of each array of stacked layers.

    Modules that stack some of their parts declare them by `__unrolled__`: paths, with a sequence of names instead of
    one name for a part that stands for several.
    """
    stacks = [
        (path_name(path), *below)
        for path, node in nodes(tree)
        if hasattr(type(node), "__unrolled__")
        for below, names in node.__unrolled__()
        if not isinstance(names, str)
    ]
    starts = ["".join(f"{part}." for part in stack if part) for stack in stacks]
    return {name: sum(map(f"{name}.".startswith, starts)) for name in placed_leaves(tree)}
