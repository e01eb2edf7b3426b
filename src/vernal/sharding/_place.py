"""Moves whole trees onto a mesh, from it, and from one mesh to another."""

import json
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from .._ground import by_data
from ..show import is_traced, listed, path_text, short, shown_name, value_error
from ..transforms import axis_names, filter_shard
from ..trees import is_array
from ._agreement import compare
from ._ledger import Signature
from ._rules import Rules, axis_size, placed_leaves, shardings

T = TypeVar("T")


def place(tree: T, mesh: Mesh, rules: Rules, *, like: Any = None, default: P | None = None) -> T:
    """Shards the arrays of a tree over a mesh.

    The arrays may be anywhere: NumPy arrays, which are copied, arrays on one device, or on this or another mesh. In a
    program of several processes, all of them must call this, with the same values. (In compiled code, explicit axes
    need `jax.set_mesh`.) For a model that does not exist yet, use `init_sharded`, which never holds it whole in one
    place.

    Args:
        tree: any pytree. Leaves that are not arrays are unchanged.
        mesh: see `make_mesh`.
        rules: see `shardings`; `data_parallel()` replicates everything on every device.
        like: see `shardings`: for the state of an optimiser, the model.
        default: see `shardings`.

    Returns:
        The same tree, with its arrays placed.

    Raises:
        TypeError: for a rule that is not a `jax.P`.
        ValueError: if the rules do not fit, or an array has no values (`jax.ShapeDtypeStruct`).

    Example:
        >>> import jax
        >>> import vernal
        >>> from vernal.sharding import make_mesh, place
        >>> mesh = make_mesh(model=-1)
        >>> model = vernal.nn.Linear(2, 8, key=jax.random.key(0))
        >>> model = place(model, mesh, {"weight": jax.P("model", None), "bias": jax.P()})
        >>> jax.typeof(model.weight).sharding.spec
        P('model', None)
    """
    leaves = placed_leaves(tree)
    empty = [shown_name(n) for n, x in leaves.items() if isinstance(x, jax.ShapeDtypeStruct)]
    if empty:
        raise value_error(
            "an array that is only a shape and dtype cannot be placed",
            where="place(tree, mesh, rules)",
            expected="arrays",
            got=listed(empty, "\n"),
            instead="init_sharded(make_model, key, mesh, rules) makes a model in its place",
        )
    leaves, treedef = jtu.tree_flatten(tree)
    places = treedef.flatten_up_to(shardings(tree, mesh, rules, like=like, default=default))
    # JAX does not move random keys between processes.
    return treedef.unflatten(
        [
            x if to is None else by_data(filter_shard, x, to)
            for x, to in zip(leaves, places, strict=True)
        ]
    )


def gather(tree: T) -> T:
    """Gathers the arrays of a tree, whole, in the memory of the host.

    In a program of several processes, all of them must call this, and all of them receive everything. Only one array
    at a time is whole on the devices.

    Args:
        tree: any pytree. Leaves that are not JAX arrays are unchanged.

    Returns:
        The same tree with NumPy arrays; typed random keys, which NumPy does not have, are JAX arrays on one device.

    Example:
        >>> import jax
        >>> from vernal.sharding import gather, make_mesh, shard_batch
        >>> mesh = make_mesh(data=-1)
        >>> x = shard_batch(jax.numpy.arange(2 * jax.device_count()), mesh, "data")
        >>> type(gather(x)).__name__, gather(x)[:3]
        ('ndarray', array([0, 1, 2], dtype=int32))
    """
    return jtu.tree_map(lambda x: by_data(_whole, x) if isinstance(x, jax.Array) else x, tree)


def _whole(x: jax.Array) -> np.ndarray:
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


def shard_batch(batch: T, mesh: Mesh, axis: str | tuple[str, ...]) -> T:
    """Shards a batch over one axis of a mesh (or several), along the leading axis of its arrays.

    In a program of several processes, each gives its own part of the batch: the examples of its own devices. The batch
    is then as large as all parts together. (Processes whose devices are in the same place along the axis hold the same
    examples, and must give the same.) Parts of different structure, shape or dtype are an error in every process, and
    so is a process that ends before the others: see `even_batches`. Processes joined by `vernal.sharding.initialise`
    wait for the others only when a batch differs in these from their last; otherwise they wait at every batch.

    Args:
        batch: any pytree. Leaves that are not arrays are unchanged, and NumPy arrays are copied. An array that is
            already sharded over several processes counts as the whole batch, and is resharded.
        mesh: see `make_mesh`.
        axis: the name of the mesh axis, or a tuple of names: `("replica", "data")`.

    Returns:
        The same tree, with its arrays placed.

    Raises:
        ValueError: for an axis that the mesh does not have, arrays whose leading axis does not divide into equal
            parts, or parts that differ between processes in structure, shape or dtype, or are given along another axis.

    Example:
        >>> import jax, numpy as np
        >>> from vernal.sharding import make_mesh, shard_batch
        >>> mesh = make_mesh(data=-1)
        >>> batch = {"image": np.zeros((2 * jax.device_count(), 3)), "split": "train"}
        >>> shard_batch(batch, mesh, "data")["image"].sharding.spec
        P('data',)
    """
    where = "shard_batch(batch, mesh, axis)"
    whole, own = axis_size(mesh, axis, where), _own_parts(mesh, axis)
    several = len({device.process_index for device in mesh.devices.flat}) > 1
    sharding = NamedSharding(mesh, P(axis))
    problems: list[str] = []
    # What each process gives. It must be alike.
    said: list[tuple[str, Any]] = []

    def is_own(x: Any) -> bool:
        """Whether each process gives its own array."""
        return several and not is_traced(x) and getattr(x, "is_fully_addressable", True)

    def is_local(x: Any) -> bool:
        """Whether it is a part of the batch, not the whole."""
        return whole > own and is_own(x)

    def look(path: Any, x: Any) -> None:
        if not is_array(x):
            return
        parts = own if is_local(x) else whole
        name = path_text(path, "batch")
        if not np.ndim(x) or np.shape(x)[0] % parts:
            problems.append(f"{name}, {short(x)}, for {parts} parts")
        elif is_own(x):
            rows, *rest = np.shape(x)
            said.append((f"{name} {short(x)}", (name, str(x.dtype), rows // own, rest)))

    for path, x in jtu.tree_leaves_with_path(batch):
        look(path, x)
    if problems:
        raise value_error(
            "a batch does not divide into equal parts",
            where=where,
            expected="arrays whose leading axis is a multiple of the number of parts",
            got=listed(problems, "\n"),
            instead="drop or pad the last examples; `place` for what is not a batch",
        )
    if said:
        texts, keys = zip(*said, strict=True)
        text = f"{', '.join(texts)}, along {axis!r}"
        compare(mesh, Signature(json.dumps([axis_names(axis), keys]), text))
    return jtu.tree_map(
        lambda x: (
            by_data(_from_local if is_local(x) else filter_shard, x, sharding) if is_array(x) else x
        ),
        batch,
    )


def _own_parts(mesh: Mesh, axis: str | tuple[str, ...]) -> int:
    """The number of parts of a batch that the devices of this process hold."""
    columns = [mesh.axis_names.index(name) for name in axis_names(axis)]
    process = jax.process_index()
    own = [at for at, device in np.ndenumerate(mesh.devices) if device.process_index == process]
    return len({tuple(at[column] for column in columns) for at in own})


def _from_local(x: Any, sharding: NamedSharding) -> jax.Array:
    # A copy: on the CPU, JAX may share the memory of a NumPy array, which may be the buffer of a data loader.
    return jax.make_array_from_process_local_data(sharding, np.array(x))
