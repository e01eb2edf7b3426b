"""`tensor_parallel`: rules for attention and perceptrons whose features are sharded over devices.

M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053. Two linear maps with an operation between them that acts on each
feature (or each head) separately form a pair: the first is cut by columns, so that each device computes its features
from the whole input; the second by rows, so that each device computes a partial sum from its features. The only
communication is one sum over the devices for each pair. (A weight here has shape `(out, in)`: columns are its first
axis.)

The modules are recognised by their attributes, because `vernal.nn` and this package do not import each other.
"""

from typing import Any

from jax import P
from jax.sharding import Mesh

from ..show import listed, shown_name, value_error
from ..trees import path_name
from ._ready import nodes
from ._rules import axis_size, placed_leaves

_ATTENTION = ("query_proj", "key_proj", "value_proj", "output_proj", "num_heads")
_MLP = ("layers", "width_size", "depth")


def tensor_parallel(model: Any, mesh: Mesh, axis: str) -> dict[str, P]:
    """Rules that split attention and multi-layer perceptrons over several devices: tensor parallelism.

    Each device holds some of the heads of every `nn.MultiheadAttention`, and some of the features between every two
    consecutive layers of an `nn.MLP` (a last layer without a partner stays whole; with `scan=True`, all layers but the
    last are cut by their outputs). Everything else is replicated on every device. M. Shoeybi et al., "Megatron-LM",
    arXiv:1909.08053.

    Other modules with the same attributes (`query_proj`, `key_proj`, `value_proj`, `output_proj` and `num_heads`; or
    `layers`, `width_size` and `depth`) are treated alike. Add your own rules with `tensor_parallel(...) | {...}`,
    and shard the rest with `fsdp(model, mesh, "data", rules=tensor_parallel(model, mesh, "model"))`.

    Args:
        model: any pytree of arrays, or of shapes, as `vernal.filter_eval_shape` makes it.
        mesh: see `make_mesh`.
        axis: the mesh axis. Its devices should be close to each other.

    Returns:
        A rule for each array, by its name.

    Raises:
        ValueError: for an axis that the mesh does not have, heads or features that do not divide, or a model with
            neither attention nor a perceptron.

    Example:
        >>> import jax
        >>> from vernal import nn
        >>> from vernal.sharding import make_mesh, tensor_parallel
        >>> model = nn.MLP(4, 4, 16, depth=1, key=jax.random.key(0))
        >>> for name, spec in tensor_parallel(model, make_mesh(model=-1), "model").items():
        ...     print(name, spec)
        layers.0.weight P('model', None)
        layers.0.bias P('model',)
        layers.1.weight P(None, 'model')
        layers.1.bias P()
    """
    where = "tensor_parallel(model, mesh, axis)"
    parts = axis_size(mesh, axis, where)
    halves: dict[str, bool] = {}
    uneven: list[str] = []
    for path, node in nodes(model):
        linears, sizes = _linears(node)
        prefix = "".join(f"{path_name((key,))}." for key in path)
        halves |= {f"{prefix}{name}": first for name, first in linears.items()}
        uneven += [f"{prefix}{name}={n}" for name, n in sizes.items() if n % parts]
    if uneven:
        raise value_error(
            "heads or features do not divide into equal parts",
            where=where,
            expected=f"multiples of the {parts} devices along {axis!r}",
            got=listed(uneven, "\n"),
            instead="a mesh with a smaller axis, or other sizes of the layers",
        )
    if not halves:
        raise value_error(
            "the model has no layers that tensor_parallel can split",
            where=where,
            expected="attention, or perceptrons with at least one hidden layer",
            got=listed(map(shown_name, placed_leaves(model)), "\n"),
            instead='rules by path: {"**.up.weight": jax.P("model", None), "**.down.weight": jax.P(None, "model")}',
        )
    return {name: _spec(name, leaf, halves, axis) for name, leaf in placed_leaves(model).items()}


def _linears(node: Any) -> tuple[dict[str, bool], dict[str, int]]:
    """The linear maps of a node to cut, and whether each is the first of its pair; and the sizes that must divide."""
    if all(hasattr(node, name) for name in _ATTENTION):
        sizes = {name: getattr(node, name, 0) for name in ("num_heads", "num_key_value_heads")}
        return {name: name != "output_proj" for name in _ATTENTION[:4]}, sizes
    if all(hasattr(node, name) for name in _MLP) and len(node.layers) > 1:
        last = len(node.layers) - 1
        if getattr(node, "scan", False):
            firsts = [i < last for i in range(last + 1)]
        else:
            firsts = [i % 2 == 0 for i in range(last + last % 2)]
        return {f"layers.{i}": first for i, first in enumerate(firsts)}, {
            "width_size": node.width_size
        }
    return {}, {}


def _spec(name: str, leaf: Any, halves: dict[str, bool], axis: str) -> P:
    linear, _, last = name.rpartition(".")
    # Stacked layers have further leading axes.
    if last == "weight" and linear in halves:
        entries = (axis, None) if halves[linear] else (None, axis)
    elif last == "bias" and halves.get(linear):
        entries = (axis,)
    else:
        return P()
    return P(*[None] * (leaf.ndim - len(entries)), *entries)
