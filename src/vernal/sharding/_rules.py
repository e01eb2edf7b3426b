"""How the arrays of a tree are sharded over a mesh: rules by path.

A rule is a path and a `jax.P`. Every array must have exactly one, except that a number (an array of rank 0) needs
none. So there is no order or precedence to remember, and a mistyped path cannot leave a large array whole on every
device. One error lists everything that does not fit.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.tree_util as jtu
from jax import P
from jax.sharding import Mesh, NamedSharding

from ..show import listed, short, shown_name, spec_text, type_error, value_error
from ..transforms import axis_names
from ..trees import Paths, has_shape, named_leaves

Rules = Mapping[str, P] | Callable[[Any], Mapping[str, P]]


def placed_leaves(tree: Any) -> dict[str, Any]:
    """The arrays of a tree, or the shapes of arrays, by name."""
    return {name: leaf for name, leaf in named_leaves(tree).items() if has_shape(leaf)}


def axis_size(mesh: Mesh, axis: str | tuple[str, ...], where: str) -> int:
    """The number of parts into which an axis of the mesh, or several together, cut an array."""
    unknown = [name for name in axis_names(axis) if name not in mesh.shape]
    if unknown or not axis:
        raise value_error(
            "the mesh does not have this axis",
            where=where,
            expected=f"one of {', '.join(map(repr, mesh.axis_names))}, or a tuple of some",
            got=short(axis),
        )
    return math.prod(mesh.shape[name] for name in axis_names(axis))


def specs_by_name(
    tree: Any, mesh: Mesh, rules: Any, default: Any = None, where: str = "shardings"
) -> dict[str, P]:
    """The spec of every array of a tree, by its name, in the order of the leaves. `rules`, `default` and the errors
    are as for `shardings`; `where` is the name of the function in errors."""
    rules = rules(tree) if callable(rules) else rules
    for text, spec in [*rules.items(), *([] if default is None else [("default", default)])]:
        if not isinstance(spec, P):
            raise type_error(
                "a rule does not give a jax.P",
                where=f"{where}, the rule {text!r}",
                expected="a jax.P with one entry for each axis of the array: the name of a mesh axis, a tuple of "
                "names, or None",
                got=short(spec),
                instead="jax.P() for an array that every device has whole",
            )
    leaves = placed_leaves(tree)
    paths = Paths(leaves)
    found, idle = paths.rules(rules)
    unruled: list[int] = []
    problems: list[str] = []
    specs: dict[str, P] = {}
    for i, (name, leaf) in enumerate(leaves.items()):
        # `P()` is the only spec for a number.
        fallback = P() if default is None and leaf.ndim == 0 else default
        spec = specs[name] = rules[found[i][0]] if found[i] else fallback or P()
        if not found[i] and fallback is None:
            unruled.append(i)
        elif len(found[i]) < 2:
            about = f"{shown_name(name)}, {spec_text(leaf)}"
            rule = f"{found[i][0]!r}: {spec}" if found[i] else f"default={spec}"
            problems += [f"{about}: {problem}, in {rule}" for problem in _misfit(leaf, spec, mesh)]
    # A tree without arrays, such as the state of a simple optimiser, fits all rules.
    idle = idle if leaves else []
    if problems or idle or unruled or any(len(texts) > 1 for texts in found):
        raise _refusal(paths, idle, found, unruled, problems, mesh, where)
    return specs


def _misfit(leaf: Any, spec: P, mesh: Mesh) -> list[str]:
    """Why a spec does not fit an array; empty if it fits."""
    if len(spec) > leaf.ndim:
        return [f"{len(spec)} entries for {leaf.ndim} axes"]
    problems: list[str] = []
    names = [name for entry in spec for name in axis_names(entry)]
    problems += [
        f"the mesh has no axis {short(n)}" for n in dict.fromkeys(names) if n not in mesh.shape
    ]
    problems += [f"{short(n)} twice" for n in dict.fromkeys(names) if names.count(n) > 1]
    if not problems:
        for length, entry in zip(leaf.shape, spec, strict=False):
            parts = math.prod(mesh.shape[name] for name in axis_names(entry))
            if length % parts:
                problems.append(f"an axis of {length} does not divide into {parts} parts")
    return problems


def _refusal(
    paths: Paths,
    idle: list[str],
    found: list[list[str]],
    unruled: list[int],
    problems: list[str],
    mesh: Mesh,
    where: str,
) -> ValueError:
    instead = [
        "`default=jax.P()` for all arrays without a rule" if unruled else "",
        f"specs with the axes of the mesh ({', '.join(f'{n}={k}' for n, k in mesh.shape.items())}), each at most "
        "once, that divide the axes of the array; None for an axis that is not cut"
        if problems
        else "",
    ]
    return paths.refusal(
        f"{where}(tree, mesh, rules)",
        idle,
        found,
        unruled,
        others=problems,
        instead="\n".join(filter(None, instead)) or None,
    )


def shardings(
    tree: Any, mesh: Mesh, rules: Rules, *, like: Any = None, default: P | None = None
) -> Any:
    """The shardings of the arrays of a tree over a mesh, by rules.

    Pass the result to `filter_jit(in_shardings=..., out_shardings=...)`, `filter_shard`, `jax.jit`, `jax.device_put`
    or checkpoints. Usually `place` or `init_sharded`, which take the same rules, are enough.

    The state of an optimiser follows its parameters: `shardings(state, mesh, rules, like=model)`. An array follows the
    parameter whose name its own name ends with (`0.mu.layers.0.weight` follows `layers.0.weight`), if it has the same
    shape, or that shape after further axes (a history of updates). Everything else (counts, statistics of another
    shape) is replicated on every device.

    Args:
        tree: any pytree: a model, the state of an optimiser, a tuple of both. Only the shapes of arrays are used, so
            `vernal.filter_eval_shape` can make it.
        mesh: see `make_mesh`.
        rules: by path (see `vernal.trees.Pattern`) of arrays, or of parts of the tree, a `jax.P` that names the mesh
            axis over which each axis of the array is sharded:
            `{"**.weight": jax.P("model", None), "**.bias": jax.P()}`. Or a function that makes such rules for a tree.
        like: the tree that the rules are for, if `tree` follows it.
        default: the spec of arrays without a rule. If not given, they are an error. Arrays of rank 0 need no rule.

    Returns:
        A tree of the structure of `tree`, with a `jax.NamedSharding` for every array, and None for other leaves.

    Raises:
        TypeError: for a rule that is not a `jax.P`.
        ValueError: if an array has no rule or several, if a rule has no array, if a spec has more entries than the
            array has axes, names an axis that the mesh does not have or one twice, or does not divide an axis of the
            array: one error lists all of them. Also if `like` is given and nothing follows it, or if a path cannot be
            parsed.

    Example:
        >>> import jax, optax
        >>> import vernal
        >>> from vernal.sharding import make_mesh, shardings
        >>> mesh = make_mesh(model=-1)
        >>> model = vernal.nn.Linear(2, 8, key=jax.random.key(0))
        >>> rules = {"weight": jax.P("model", None), "bias": jax.P("model")}
        >>> shardings(model, mesh, rules).weight.spec
        P('model', None)
        >>> state = vernal.Optimizer(optax.adam, 1e-3).init(model)
        >>> state = shardings(state, mesh, rules, like=model)
        >>> [(name, x.spec) for name, x in vernal.trees.named_leaves(state).items() if "mu" in name]
        [('0.mu.weight', P('model', None)), ('0.mu.bias', P('model',))]
    """
    specs = specs_by_name(tree if like is None else like, mesh, rules, default)
    if like is not None:
        specs = _followers(tree, like, specs)
    treedef = jtu.tree_structure(tree)
    return treedef.unflatten(
        [NamedSharding(mesh, specs[name]) if name in specs else None for name in named_leaves(tree)]
    )


def _keys(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """The arrays of a tree with the texts of their keys."""
    return [
        (tuple(str(jtu.keystr((key,), simple=True)) for key in path), leaf)
        for path, leaf in jtu.tree_leaves_with_path(tree)
        if has_shape(leaf)
    ]


def _followers(tree: Any, like: Any, specs: dict[str, P]) -> dict[str, P]:
    """The specs of a tree that follows another one, whose specs are given."""
    table = {
        keys: (leaf.shape, spec)
        for (keys, leaf), spec in zip(_keys(like), specs.values(), strict=True)
    }
    found: dict[str, P] = {}
    following = False
    for name, (keys, leaf) in zip(placed_leaves(tree), _keys(tree), strict=True):
        # The longest ending is the most specific: `weight` may be a name in the model, too.
        ending = next((keys[i:] for i in range(len(keys) + 1) if keys[i:] in table), None)
        found[name] = P()
        if ending is not None:
            shape, spec = table[ending]
            before = len(leaf.shape) - len(shape)
            following = True
            if before >= 0 and leaf.shape[before:] == shape:
                found[name] = P(*[None] * before, *spec) if spec else P()
    if not following and any(leaf.ndim for _, leaf in _keys(tree)):
        raise value_error(
            "no array of the tree is named after one of `like`",
            where="shardings(tree, mesh, rules, like=...)",
            expected="arrays whose names end with the name of an array of `like`, such as "
            + "\n".join(f"....{name}" for name in list(specs)[:3]),
            got=listed(map(shown_name, placed_leaves(tree)), "\n"),
            instead="give the model whose optimiser state this is; or no `like`, and rules for the tree itself",
        )
    return found
