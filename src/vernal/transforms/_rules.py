"""Code that the rules of `filter_custom_jvp` and `filter_custom_vjp` share: how a rule is set, which
zeros it is given, and the checks of what it returns."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._ground import callable_name
from ..show import diff, diff_text, message, path_text, short, type_error, value_error
from ..trees import Rest, is_array, is_array_like, is_missing, split
from ._boundary import argument_text
from ._custom_derivatives import SymbolicZero, as_jax, is_inexact
from ._transformed import check_callable
from ._zeros import ZeroTangent, is_zero


class Rule:
    """A rule that is set once, after the function it belongs to.

    It compares by identity: two empty ones may be set to different rules. It is callable, so that a
    search for tracers inside callables looks into it too.

    Args:
        option: the name of the method that sets it, for messages.
    """

    def __init__(self, option: str):
        self.option = option
        self.given: Callable[..., Any] | None = None
        self.symbolic_zeros = False

    def give(self, fn: Any, rule: Any, symbolic_zeros: bool) -> Any:
        """Sets the rule of `fn`; None makes a decorator. `symbolic_zeros` is whether it is called with `ZeroTangent`.
        Raises `TypeError` if the rule cannot be called, and `ValueError` if one is already set."""

        def decorate(rule: Any) -> Any:
            check_callable(rule, self.option)
            if self.given is not None:
                name = callable_name(fn)
                raise value_error(
                    f"`{name}` already has a rule",
                    where=f"{name}.{self.option}(...)",
                    expected="one rule for each function: programs compiled with the first one "
                    "would keep it",
                    got=f"{short(rule)} after {short(self.given)}",
                    instead=f"define `{name}` again, then give it the new rule",
                )
            self.given = rule
            self.symbolic_zeros = symbolic_zeros
            return rule

        return decorate if rule is None else decorate(rule)

    def get(self, fn: Any) -> Callable[..., Any]:
        """The rule of `fn`; raises `TypeError` if it is not set."""
        if self.given is None:
            name = callable_name(fn)
            raise type_error(
                f"`{name}` has no rule yet",
                where=f"the call of `{name}`",
                expected=f"a rule, given by `{name}.{self.option}`",
                got="no rule",
                instead=f"decorate the rule with `@{name}.{self.option}`",
            )
        return self.given

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.get(self)(*args, **kwargs)

    def __repr__(self) -> str:
        return "<no rule>" if self.given is None else short(self.given)

    def __deepcopy__(self, memo: Any) -> "Rule":
        # Like a function, it is its own copy.
        return self


def alive(tangents: Sequence[Any]) -> list[bool]:
    """Which tangents are not known to be zero."""
    return [
        not isinstance(t, SymbolicZero) and jax.typeof(t).dtype != jax.dtypes.float0
        for t in tangents
    ]


def zero_for(x: Any, symbolic: bool) -> Any:
    """The tangent of an array that is not differentiated: a `ZeroTangent` if `symbolic`, else zeros of its shape
    and dtype. For integers or bools they are weakly typed, so that they can be multiplied with anything; for a PRNG
    key the tangent is None."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return None
    if is_inexact(x):
        aval = jax.typeof(x)
        if symbolic:
            return ZeroTangent(aval.shape, aval.dtype, weak_type=aval.weak_type)
        return jnp.zeros_like(x)
    if symbolic:
        return ZeroTangent(x.shape, jnp.asarray(0.0).dtype, weak_type=True)
    # Keeps the placement of `x`; the result of `zeros_like` would not be weakly typed.
    return jnp.where(jnp.zeros_like(x, dtype=bool), 0.0, 0.0)


def put_arrays(rest: Rest, values: Sequence[Any]) -> Any:
    """A tree with a value in place of every array, and None in place of every other leaf."""
    left = iter(values)
    return rest.treedef.unflatten([next(left) if m else None for m in rest.mask])


def pair(returned: Any, rule: Any, expected: str) -> tuple[Any, Any]:
    """The result of a rule, which must be a pair; `expected` says of what."""
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return returned[0], returned[1]
    raise type_error(
        f"the rule `{callable_name(rule)}` must return a pair",
        where=f"what `{callable_name(rule)}` returns",
        expected=expected,
        got=short(returned),
        instead=f"return {expected}",
    )


def check_same_out(fn: Any, rule: Any, expected: Any, got: Any) -> None:
    """Refuses a rule whose result differs from the function's in structure, shape, dtype or a leaf that is not an
    array. `expected` is what the function returned, with shapes in place of arrays."""
    if diff(expected, got, weak_type=False):
        text = diff_text(expected, got, weak_type=False, root="out")
        raise type_error(
            f"the rule `{callable_name(rule)}` returns a result that does not match `{callable_name(fn)}`",
            where=f"the first of the two results of `{callable_name(rule)}`",
            expected=f"what `{callable_name(fn)}` returns",
            got=f"(expected: the function, got: the rule)\n{text}",
            instead=f"compute it by calling `{callable_name(fn)}`, or cast with `.astype`",
        )


def spec_of(tree: Any) -> Any:
    """A tree with `jax.ShapeDtypeStruct` in place of every array, which holds no tracer."""
    arrays, rest = split(tree)
    avals = map(jax.typeof, arrays)
    return rest.fill([jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])


def refuse_differentiated(fn: Any, rest: Rest, is_alive: Sequence[bool], instead: str) -> None:
    """Refuses arguments that have a tangent but that the rule does not cover: `is_alive` says for every array in
    `rest`, the structure of `(None, args, kwargs)`, whether it has one."""
    if any(is_alive):
        paths = [path for path, bad in zip(rest.paths(), is_alive, strict=True) if bad]
        names = list(dict.fromkeys(argument_text(fn, path) for path in paths))
        raise value_error(
            f"`{callable_name(fn)}` is differentiated with respect to an argument that its "
            "rule does not handle",
            where=", ".join(f"argument `{name}`" for name in names),
            expected="an argument that is not differentiated",
            got="a differentiated argument",
            instead=instead,
        )


def matched(kind: str, rule: Any, of: Any, given: Any) -> list[Any]:
    """For every array of `of`, the tangent (or gradient, as `kind` says) that a rule returned, or None for zero. Raises
    `TypeError` if they do not fit in structure, shape or dtype.

    None and `NoGradient` stand for zero, at a leaf or for a whole subtree. An array of integers has no tangent; zeros
    in its place, like those that rules are given, are dropped, as is JAX's float0, which says the same.
    """
    found: list[Any] = []

    def take(tangent: Any, node: Any) -> bool:
        leaves, treedef = jtu.tree_flatten(node)
        found.extend([tangent] * len(leaves))
        return is_missing(tangent) or jtu.treedef_is_leaf(treedef)

    try:
        fits = all(jtu.tree_leaves(jtu.tree_map(take, given, of, is_leaf=is_missing)))
    except ValueError:
        fits = False
    if not fits:
        raise TypeError(_structure_text(kind, rule, of, given))
    paths_and_leaves = jtu.tree_flatten_with_path(of)[0]
    checked = [
        (leaf, _fitting(kind, rule, path, leaf, tangent))
        for (path, leaf), tangent in zip(paths_and_leaves, found, strict=True)
    ]
    return [tangent for leaf, tangent in checked if is_array(leaf)]


def _structure_text(kind: str, rule: Any, of: Any, given: Any) -> str:
    whole = "the result" if kind == "tangent_out" else "the first argument"
    one_for_each = kind == "gradient" and type(given) is tuple and type(of) is not tuple
    skeletons = [
        treedef.unflatten([0] * treedef.num_leaves)
        for treedef in (jtu.tree_structure(tree, is_leaf=is_missing) for tree in (of, given))
    ]
    return message(
        f"the `{kind}` of the rule `{callable_name(rule)}` does not have the structure of {whole}",
        where=f"`{kind}`",
        expected=f"the structure of {whole}, with None for leaves that are zero or not arrays",
        got=diff_text(*skeletons, leaves="ignore", root=kind),
        instead=f"make it with jax.tree.map over {whole}"
        + (
            ", and return it alone, not in a tuple with one for each argument"
            if one_for_each
            else ""
        ),
    )


def _fitting(kind: str, rule: Any, path: Any, leaf: Any, tangent: Any) -> Any:
    """One tangent, cast if it is weakly typed; None for zero."""
    if is_missing(tangent) or (_is_float0(tangent) and not _can_have(leaf)):
        return None
    if is_array(leaf) and (is_zero(tangent) or is_array_like(tangent)):
        want, have = jax.typeof(leaf), _type_of(tangent)
        if have.shape == want.shape:
            if not is_inexact(want):
                if kind == "tangent_out" or is_zero(tangent):
                    return None
            elif have.dtype == want.dtype:
                return None if is_zero(tangent) else as_jax(tangent)
            elif have.weak_type and _gives_way(have, want):
                return None if is_zero(tangent) else jnp.asarray(tangent, want.dtype)
    raise type_error(
        f"the `{kind}` of the rule `{callable_name(rule)}` does not fit the value it belongs to",
        where=path_text(path, kind),
        expected=f"{short(leaf)}, or None for zero" if _can_have(leaf) else "None",
        got=short(tangent),
        instead="cast it with `.astype`, or sum over the axes that broadcasting added",
    )


def _type_of(tangent: Any) -> Any:
    return tangent if is_zero(tangent) else jax.typeof(tangent)


def _is_float0(tangent: Any) -> bool:
    return isinstance(tangent, np.ndarray) and tangent.dtype == jax.dtypes.float0


def _can_have(leaf: Any) -> bool:
    return is_array(leaf) and is_inexact(leaf)


def _gives_way(weak: Any, strong: Any) -> bool:
    return jnp.issubdtype(strong.dtype, jnp.complexfloating) or not jnp.issubdtype(
        weak.dtype, jnp.complexfloating
    )
