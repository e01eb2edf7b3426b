"""Freezing: which arrays of a model are not to be trained.

A frozen array is the array it was. Nothing wraps it, and the code of the model does not notice.
What changes is the structure of the module that owns it, the innermost one around it: that gets a
hidden static entry, the names within the module of its frozen arrays. So the mark is part of the
treedef. It goes through every transformation, stays on a part that is taken out of its model, and
costs a compiled call nothing; and since it says where, not what, an updated array is as frozen as
the old one.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..show import FROZEN, message, short
from ..trees import Pattern, is_inexact_array, path_name, picked_nodes
from ._attributes import attributes_of
from ._module import ModuleMeta, _assemble
from ._structure import KEY

T = TypeVar("T")

Where = str | Sequence[str] | Callable[[Any], Any]

_SHOWN = 10


def _is_module(x: Any) -> bool:
    return isinstance(type(x), ModuleMeta)


def _is_marked(x: Any) -> bool:
    # Not by `_is_module`: this runs for every node of a model at every derivative.
    return isinstance(type(x), ModuleMeta) and FROZEN in attributes_of(x)


def _own(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """What a node itself holds: its arrays and the modules in it, with their paths."""
    return jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node and _is_module(x))


def frozen_leaves(pytree: Any) -> list[bool]:
    """Which leaves of a tree are frozen.

    Args:
        pytree: any pytree.

    Returns:
        A bool for every leaf, in order.

    Example:
        >>> import jax
        >>> import vernal
        >>> linear = vernal.freeze(vernal.nn.Linear(2, 3, key=jax.random.key(0)), "bias")
        >>> [leaf.shape for leaf in jax.tree.leaves(linear)], vernal.modules.frozen_leaves(linear)
        ([(3, 2), (3,)], [False, True])
    """
    frozen: list[bool] = []
    for node in jtu.tree_leaves(pytree, is_leaf=_is_marked):
        if not _is_marked(node):
            frozen.append(False)
            continue
        names = attributes_of(node)[FROZEN]
        for path, x in _own(node)[0]:
            frozen.extend(frozen_leaves(x) if _is_module(x) else [path_name(path) in names])
    return frozen


def _patterns(where: Any, transform: str) -> list[str]:
    patterns = [where] if isinstance(where, str) else where
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            message(
                "`where` does not say which part of the model is meant",
                where=f"{transform}(model, where)",
                expected="a pattern, a list of patterns, or a function that picks parts of the model",
                got=short(where),
                instead='"encoder", ["encoder", "**.bias"], or lambda model: model.encoder',
            )
        )
    return list(patterns)


def _covered(pytree: Any, where: Any, transform: str) -> list[bool]:
    """For every leaf, whether `where` names it or a part that it is in."""
    paths = [path for path, _ in jtu.tree_flatten_with_path(pytree)[0]]
    if callable(where):
        parts = [path for path, _ in picked_nodes(where, pytree)]
        names = [path_name(part) for part in parts]
        hits = [[path[: len(part)] == part for path in paths] for part in parts]
    else:
        names = _patterns(where, transform)
        hits = [[Pattern(name).covers(path) for path in paths] for name in names]
    idle = [name for name, hit in zip(names, hits, strict=True) if not any(hit)]
    if idle:
        raise _refusal(idle, paths, transform)
    return [any(hit[i] for hit in hits) for i in range(len(paths))]


def _refusal(idle: list[str], paths: list[Any], transform: str) -> ValueError:
    leaves = list(map(path_name, paths))
    parts = dict.fromkeys(path_name(path[:i]) for path in paths for i in range(1, len(path) + 1))
    near = dict.fromkeys(
        repr(found) for name in idle for found in difflib.get_close_matches(name, parts)
    )
    more = len(leaves) - _SHOWN
    listed = ", ".join(leaves[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return ValueError(
        message(
            "`where` names no array",
            where=f"{transform}(model, where)",
            expected="names or patterns of arrays, or of parts with arrays in them",
            got=", ".join(map(repr, idle)),
            instead=f"did you mean {' or '.join(near)}?"
            if near
            else f"the arrays are: {listed or 'none'}",
        )
    )


def _with_mark(module: Any, names: set[str]) -> Any:
    """The module with just these arrays of its own frozen."""
    current = attributes_of(module)
    kinds = dict(current[KEY][0].layout.kinds)
    kinds.pop(FROZEN, None)
    values = {name: current[name] for name in kinds}
    if names:
        kinds[FROZEN], values[FROZEN] = False, tuple(sorted(names))
    return _assemble(type(module), kinds, values)


def _remark(node: Any, chosen: Iterator[bool], change: Callable[[set[str], set[str]], Any]) -> Any:
    """The node with its marks changed.

    Args:
        node: a module, or a whole tree.
        chosen: for each of its leaves, whether it is to be changed.
        change: computes the names of the frozen arrays of a module from the old ones, and those of
            its arrays that are chosen.
    """
    own, treedef = _own(node)
    here: set[str] = set()
    parts: list[Any] = []
    for path, x in own:
        if _is_module(x):
            x = _remark(x, chosen, change)
        elif next(chosen):
            here.add(path_name(path))
        parts.append(x)
    unchanged = all(part is x for part, (_, x) in zip(parts, own, strict=True))
    if not _is_module(node):
        if change(set(), here):
            raise _unowned(here)
        return node if unchanged else treedef.unflatten(parts)
    old = set(attributes_of(node).get(FROZEN, ()))
    new = change(old, here)
    if new == old:
        return node if unchanged else treedef.unflatten(parts)
    return _with_mark(treedef.unflatten(parts), new)


def _unowned(names: set[str]) -> ValueError:
    return ValueError(
        message(
            "only arrays in a module can be frozen: it is their module that remembers it",
            where=", ".join(sorted(names)[:_SHOWN]) or "the array itself",
            expected="arrays in a vernal.Module",
            got="arrays that are in no module",
            instead="vernal.trainable(tree, where) makes a tree of bools for wrt= and for Optax's masks",
        )
    )


def freeze(model: T, where: Where) -> T:
    """Marks arrays of a model as not to be trained.

    `filter_grad` and the other derivatives of this library do not compute a gradient for a frozen
    array (None stands in its place), an `Optimizer` has no state for it and leaves it as it is,
    also with weight decay. Nothing else changes: the arrays are the same objects in the same
    places, with the same names in checkpoints. (`jax.grad` knows nothing of marks, and
    differentiates all.)

    The mark belongs to a place in the structure, of the module that the array is in: it stays
    through `jit`, `scan`, `tree_at` of an array, pickling, saving, and on a part that is taken out
    of the model. A module that is put in the place of another brings its own marks.

    Args:
        model: a module, or a tree of modules.
        where: which arrays. A pattern over names (see `vernal.trees.Pattern`), of arrays or of
            whole parts: `"encoder"` is everything in the encoder, `"**.bias"` all biases, `"**"`
            everything. Or a list of patterns, or a function that picks parts, as `tree_at` takes
            it: `lambda model: model.encoder`.

    Returns:
        The model with these arrays frozen, besides those that were.

    Raises:
        ValueError: if a pattern fits no array, or a picked part has none in it; if an array is in
            no module.
        TypeError: if `where` is none of the above.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> model = vernal.nn.MLP(2, 1, 8, depth=1, key=jax.random.key(0))
        >>> model = vernal.freeze(model, "layers.0")
        >>> grads = vernal.filter_grad(lambda m: m(jnp.ones(2))[0])(model)
        >>> grads.layers[0].weight is None, grads.layers[1].weight.shape
        (True, (1, 8))
    """
    return _remark(model, iter(_covered(model, where, "freeze")), set.union)


def unfreeze(model: T, where: Where = "**") -> T:
    """Undoes `freeze`.

    Args:
        model: a module, or a tree of modules.
        where: which arrays, as for `freeze`. All of them by default. They need not be frozen.

    Returns:
        The model with these arrays trainable.

    Raises:
        ValueError: as for `freeze`.
        TypeError: as for `freeze`.

    Example:
        >>> import jax
        >>> import vernal
        >>> model = vernal.nn.MLP(2, 1, 8, depth=1, key=jax.random.key(0))
        >>> frozen = vernal.unfreeze(vernal.freeze(model, "**"), "**.bias")
        >>> [layer.bias for layer in vernal.trainable(frozen).layers]
        [True, True]
        >>> vernal.unfreeze(frozen) == model
        True
    """
    return _remark(model, iter(_covered(model, where, "unfreeze")), set.difference)


def _is_parameter(x: Any) -> bool:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.issubdtype(x.dtype, jnp.inexact)
    return is_inexact_array(x)


def trainable(model: T, where: Where | None = None) -> T:
    """What of a model is trained, as a tree of bools: a mask for `partition`, for Optax, and for
    `wrt` of the derivatives.

    Args:
        model: any pytree. (Its arrays may be `jax.ShapeDtypeStruct`.)
        where: which arrays, as for `freeze`. All of them by default.

    Returns:
        A tree of the same structure: True for the floating-point (and complex) arrays that `where`
        chooses and that are not frozen, False for every other leaf.

    Raises:
        ValueError: if a pattern fits no array, or a picked part has none in it.
        TypeError: if `where` is neither a pattern, a list of patterns nor a function.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2), "steps": 3}
        >>> vernal.trainable(params)
        {'encoder': True, 'head': True, 'steps': False}
        >>> mask = vernal.trainable(params, "head")
        >>> vernal.filter_grad(lambda p: p["encoder"] @ p["head"], wrt=mask)(params)
        {'encoder': None, 'head': Array([1., 1.], dtype=float32), 'steps': None}
    """
    leaves, treedef = jtu.tree_flatten(model)
    chosen = [True] * len(leaves) if where is None else _covered(model, where, "trainable")
    frozen = frozen_leaves(model)
    return treedef.unflatten(
        [_is_parameter(x) and c and not f for x, c, f in zip(leaves, chosen, frozen, strict=True)]
    )
