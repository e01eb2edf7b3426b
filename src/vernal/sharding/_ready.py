"""Rules for the usual ways to spread a model over devices, made from the model.

All of them return plain dictionaries, which can be printed, and changed: `rules | {"head.weight": jax.P()}`.
"""

import math
from collections.abc import Iterator
from typing import Any

from jax import P
from jax.sharding import Mesh

from ..trees import has_shape, node_parts, path_name
from ._rules import Rules, axis_size, placed_leaves, specs_by_name


def data_parallel() -> dict[str, P]:
    """Rules by which every device has the whole model; only the batch is spread, by `shard_batch`.

    All devices run one program together. A loop whose length depends on the data (an adaptive solver) is then as long
    for all of them as for the slowest example, and all are asked at every turn. `vernal.filter_shard_map` runs it on
    each device apart, with one sum at the end; see the example. (`check_vma=False`: all that is sent is written down.)

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
    """Rules by which every device has a part of each large array: fully sharded data parallelism.

    Parameters, gradients and the state of the optimiser take one n-th of the memory on each of n devices. An array is
    put together where it is used, and gradients are summed into their parts. S. Rajbhandari et al., "ZeRO",
    arXiv:1910.02054, stage 3.

    Each large array is cut along its longest axis that divides; if several are as long, along the first. Layers that
    are stored stacked (`nn.Stack`) are not cut along the stack, because its loop takes them out one by one. What does
    not divide stays whole.

    Args:
        model: any pytree of arrays, or of shapes, as `vernal.filter_eval_shape` makes it.
        mesh: see `make_mesh`.
        axis: the mesh axis, most often the one over which the batch is spread; or a tuple of several.
        min_bytes: smaller arrays (of stacked layers: for one layer) stay whole: fetching them would take longer than
            they are worth.
        rules: what is cut already, such as by `tensor_parallel`; of those arrays one more axis is cut.

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
    """All nodes and leaves of a tree, from above."""
    yield path, node
    if not has_shape(node):
        for key, part in node_parts(node) or []:
            yield from nodes(part, (*path, key))


def _stacked(tree: Any) -> dict[str, int]:
    """By the names of arrays that belong to stacked layers: how many leading axes count layers.

    Modules that stack parts of theirs say so by `__unrolled__`: paths, and a sequence of names instead of one name for
    a part that stands for several.
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
