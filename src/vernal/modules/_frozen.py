"""Freezing: which arrays of a model are not trained.

A frozen array is the same array as before. Nothing wraps it, and the model's code does not notice.
Only the structure of the module that owns it, the innermost one around it, changes: it gets a hidden
static entry with the names of its frozen arrays. So the mark is part of the treedef. It goes through
every transformation, stays on a part that is taken out of its model, and costs a compiled call
nothing. It marks a place, not a value: an updated array stays frozen.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..show import FROZEN, short, type_error, value_error
from ..trees import (
    NoGradient,
    Paths,
    filter,
    is_inexact_array,
    is_sealed,
    path_name,
    picked_nodes,
    refuse_sealed,
)
from ._attributes import attributes_of
from ._marks import HELD, buffer_leaves, is_marked, is_module, own, remark

T = TypeVar("T")

Where = str | Sequence[str] | Callable[[Any], Any]


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
    for node in jtu.tree_leaves(pytree, is_leaf=_is_own):
        refuse_sealed(node, "gradients, optimisers and frozen parts")
        if not is_marked(node):
            frozen.append(False)
            continue
        names = attributes_of(node)[FROZEN]
        for path, x in own(node)[0]:
            refuse_sealed(x, "gradients, optimisers and frozen parts")
            frozen.extend(frozen_leaves(x) if is_module(x) else [path_name(path) in names])
    return frozen


def _is_own(node: Any) -> bool:
    return is_marked(node) or is_sealed(node)


def is_frozen(module: Any) -> bool:
    """Whether `freeze` covers a whole layer: all of its arrays, buffers included.

    Args:
        module: the layer, or any tree.

    Returns:
        True if it has arrays, and `freeze` was asked for each of them.

    Example:
        >>> import vernal
        >>> norm = vernal.nn.BatchNorm(2)
        >>> [vernal.modules.is_frozen(vernal.freeze(norm, where)) for where in ("weight", "**")]
        [False, True]
    """
    found = _covered_leaves(module)
    return bool(found) and all(found)


def is_partly_frozen(module: Any) -> bool:
    """Whether `freeze` covers anything of a layer.

    Args:
        module: the layer, or any tree.

    Returns:
        True if `freeze` was asked for one of its arrays, a buffer or not.

    Example:
        >>> import vernal
        >>> norm = vernal.nn.BatchNorm(2)
        >>> frozen = vernal.freeze(norm, "running_mean")
        >>> [vernal.modules.is_partly_frozen(layer) for layer in (norm, frozen, frozen.running_var)]
        [False, True, False]
    """
    return any(_covered_leaves(module))


def _covered_leaves(pytree: Any) -> list[bool]:
    """For every leaf, whether `freeze` was asked for it. For a buffer, the mark alone does not tell."""

    def below(node: Any) -> Iterator[bool]:
        for x in jtu.tree_leaves(node, is_leaf=is_module):
            if not is_module(x):
                # A leaf outside of any module cannot be marked.
                next(buffers)
                yield False
                continue
            names = attributes_of(x).get(FROZEN, ())
            for path, part in own(x)[0]:
                if is_module(part):
                    yield from below(part)
                else:
                    name = path_name(path)
                    yield (HELD + name if next(buffers) else name) in names

    buffers = iter(buffer_leaves(pytree))
    return list(below(pytree))


def _patterns(where: Any, transform: str) -> list[str]:
    patterns = [where] if isinstance(where, str) else where
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) for p in patterns):
        raise type_error(
            "`where` does not pick a part of the model",
            where=f"{transform}(model, where)",
            expected="a path, a list of paths, or a function that picks parts of the model",
            got=short(where),
            instead='"encoder", ["encoder", "**.bias"], or lambda model: model.encoder',
        )
    return list(patterns)


def _refuse_mask(where: Any, transform: str) -> None:
    """Refuses a tree of bools. That of a model can be called, as a function that picks parts is."""
    leaves = jtu.tree_leaves(where)
    if leaves and all(isinstance(leaf, bool) for leaf in leaves):
        raise type_error(
            "`where` is a tree of bools: whether True means trained or frozen is ambiguous",
            where=f"{transform}(model, where)",
            expected="a path, a list of paths, or a function that picks parts of the model",
            got=short(where),
            instead="the paths of what is meant; such a tree is for wrt=, partition and the masks of Optax",
        )


def _covered(
    pytree: Any, where: Any, transform: str, apart: Sequence[bool] | None = None
) -> list[bool]:
    """For every leaf, whether `where` covers it and it is not set apart."""
    _refuse_mask(where, transform)
    leaves = [path for path, _ in jtu.tree_flatten_with_path(pytree)[0]]
    paths = Paths(leaves)
    if callable(where) and not isinstance(where, type):
        parts = [path for path, _ in picked_nodes(where, pytree)]
        names = [path_name(part) for part in parts]
        hits = [{i for i, leaf in enumerate(leaves) if leaf[: len(part)] == part} for part in parts]
    else:
        names = _patterns(where, transform)
        hits = [set(paths.covered(name)) for name in names]
    idle = [name for name, hit in zip(names, hits, strict=True) if not hit]
    if idle:
        raise paths.refusal(f"{transform}(model, where)", idle)
    if apart is not None:
        hits = [{i for i in hit if not apart[i]} for hit in hits]
        idle = [name for name, hit in zip(names, hits, strict=True) if not hit]
        if idle:
            raise _only_buffers(idle, transform)
    chosen = set[int]().union(*hits)
    return [i in chosen for i in range(len(leaves))]


def _only_buffers(idle: list[str], transform: str) -> ValueError:
    return value_error(
        "only buffers match, which are never trained: their class declares them trainable=False",
        where=f"{transform}(model, where)",
        expected="paths that match at least one array that is not a buffer",
        got=", ".join(map(repr, idle)),
        instead="to train such an array, declare its field without trainable=False",
    )


def freeze(model: T, where: Where) -> T:
    """Excludes arrays of a model from training.

    `filter_grad` and the other derivatives of this library do not compute a gradient for a frozen
    array (`vernal.NoGradient` stands in its place). An `Optimizer` keeps no state for it and never changes
    it, not even by weight decay. A layer whose state is frozen, such as a `BatchNorm`, keeps its
    statistics, and uses them. Nothing else changes: the arrays are the same objects in the same
    places, with the same names in checkpoints. (`jax.grad` ignores the marks, and differentiates
    every array.)

    The mark belongs to a place in the structure of the module that holds the array. It survives `jit`,
    `scan`, `tree_at` of an array and pickling, and stays on a part that is taken out of the model. A
    saved file does not hold it: `vernal.load` takes the marks of `like`. A module that replaces another
    brings its own marks.

    Args:
        model: a module, or a tree of modules.
        where: which arrays. The path (see `vernal.trees.Pattern`) of arrays or of whole parts:
            `"encoder"` is everything in the encoder, `"**.bias"` all biases, `"**"` everything. Or a
            list of paths, or a function that picks parts, as for `tree_at`:
            `lambda model: model.encoder`.

    Returns:
        The model with these arrays frozen, in addition to those already frozen.

    Raises:
        ValueError: if a path matches no array, or a picked part holds none; if an array is not in a
            module.
        TypeError: if `where` is none of the above.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> model = vernal.nn.MLP(2, 1, 8, depth=1, key=jax.random.key(0))
        >>> model = vernal.freeze(model, "layers.0")
        >>> grads = vernal.filter_grad(lambda m: m(jnp.ones(2))[0])(model)
        >>> grads.layers[0].weight, grads.layers[1].weight.shape
        (NoGradient(), (1, 8))
    """
    chosen, buffers = _covered(model, where, "freeze"), buffer_leaves(model)
    model = remark(model, iter(chosen), set.union)
    held = (c and b for c, b in zip(chosen, buffers, strict=True))
    return remark(model, held, lambda old, here: old | {HELD + name for name in here})


def unfreeze(model: T, where: Where = "**") -> T:
    """Undoes `freeze`.

    Buffers, the arrays in a field declared `vernal.field(trainable=False)`, stay frozen: their class
    decides that.

    Args:
        model: a module, or a tree of modules.
        where: which arrays, as for `freeze`. All of them by default. They need not be frozen.

    Returns:
        The model with these arrays trainable, except for buffers.

    Raises:
        ValueError: as for `freeze`; if a path matches only buffers.
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
    for node in jtu.tree_leaves(model, is_leaf=is_sealed):
        refuse_sealed(node, "unfreeze(model, where)")
    buffers, asked = buffer_leaves(model), _covered_leaves(model)
    apart = [b and not a for b, a in zip(buffers, asked, strict=True)]
    chosen = _covered(model, where, "unfreeze", apart=apart)
    free = (c and not b for c, b in zip(chosen, buffers, strict=True))
    model = remark(model, free, set.difference)
    held = (c and b for c, b in zip(chosen, buffers, strict=True))
    return remark(model, held, lambda old, here: old - {HELD + name for name in here})


def _is_parameter(x: Any) -> bool:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.issubdtype(x.dtype, jnp.inexact)
    return is_inexact_array(x)


def trainable(model: T, where: Where | None = None) -> T:
    """Which leaves of a model are trained, as a tree of bools: a mask for `partition`, for Optax, and for
    `wrt` of the derivatives.

    Args:
        model: any pytree. (Its arrays may be `jax.ShapeDtypeStruct`.)
        where: which arrays, as for `freeze`. All of them by default.

    Returns:
        A tree of the same structure: True for the floating-point (and complex) arrays that `where`
        chooses and that are not frozen, False for every other leaf.

    Raises:
        ValueError: if a path matches no array, or a picked part holds none.
        TypeError: if `where` is neither a path, a list of paths nor a function.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(2), "steps": 3}
        >>> vernal.trainable(params)
        {'encoder': True, 'head': True, 'steps': False}
        >>> mask = vernal.trainable(params, "head")
        >>> vernal.filter_grad(lambda p: p["encoder"] @ p["head"], wrt=mask)(params)
        {'encoder': NoGradient(), 'head': Array([1., 1.], dtype=float32), 'steps': NoGradient()}
    """
    leaves, treedef = jtu.tree_flatten(model)
    chosen = [True] * len(leaves) if where is None else _covered(model, where, "trainable")
    frozen = frozen_leaves(model)
    return treedef.unflatten(
        [_is_parameter(x) and c and not f for x, c, f in zip(leaves, chosen, frozen, strict=True)]
    )


def params(model: T, where: Where | None = None) -> T:
    """The trained arrays of a model: the model with `vernal.NoGradient` in place of every other leaf.

    It has the structure of the gradients, so plain Optax and `jax.tree.map` accept the two side by
    side: `opt.init(params(model))`, `opt.update(grads, state, params(model))`, then
    `vernal.apply_updates(model, updates)`. Frozen arrays have no optimiser state and are not decayed.
    Start from it, too, for zeros to accumulate gradients in and for averages of weights.
    `vernal.combine(params, model)` is the whole model again. (A `vernal.Optimizer` takes the model
    itself.)

    Args:
        model: any pytree. (Its arrays may be `jax.ShapeDtypeStruct`.)
        where: which arrays, as for `freeze`. All of them by default.

    Returns:
        A tree with the floating-point (and complex) arrays that `where` chooses and that are not
        frozen: those for which `vernal.trainable(model, where)` is True.

    Raises:
        ValueError: as for `trainable`.
        TypeError: as for `trainable`.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import vernal
        >>> model = {"w": jnp.ones(2), "steps": 3}
        >>> vernal.params(model)
        {'steps': NoGradient(), 'w': Array([1., 1.], dtype=float32)}
        >>> opt = optax.sgd(0.5, momentum=0.9)
        >>> grads = vernal.filter_grad(lambda m: jnp.sum(m["w"]))(model)
        >>> updates, state = opt.update(grads, opt.init(vernal.params(model)), vernal.params(model))
        >>> vernal.apply_updates(model, updates)
        {'steps': 3, 'w': Array([0.5, 0.5], dtype=float32)}
    """
    return filter(model, trainable(model, where), replace=NoGradient())
