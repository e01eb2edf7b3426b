"""`filter_jvp` and `filter_vjp`: derivatives along a direction, in forward and reverse mode.

None (or `NoGradient`, so that gradients can be directions) stands for a tangent or cotangent of zeros,
whether the value could have one (a floating-point array) or not (everything else). JAX computes with
such zeros, and returns arrays. `filter_jvp` passes the outputs through an identity function whose rule
sees which tangents are zero (`_probe`), and returns None for outputs that do not depend on what is
differentiated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import as_arrays, callable_name
from ..modules import Module, field
from ..show import diff_text, message, path_text, short, type_error, value_error
from ..trees import (
    NoGradient,
    Rest,
    is_array,
    is_array_like,
    is_inexact_array,
    is_inexact_array_like,
    is_missing,
    split,
)
from ._derivatives import Call, assemble, fill_slots, targets_of, value_and_aux
from ._transformed import call_inside, check_callable

# The shape and dtype of a value that can have a tangent; None for any other.
_Spec = tuple[tuple[int, ...], Any] | None


def _spec(leaf: Any) -> _Spec:
    if not is_inexact_array_like(leaf):
        return None
    return jnp.shape(leaf), jnp.result_type(leaf)


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    """Flattens a tree with None and `NoGradient` as leaves."""
    return jtu.tree_flatten(tree, is_leaf=is_missing)


def _match(
    treedef: Any, specs: Sequence[_Spec], given: Any, kind: str, names: Sequence[str]
) -> list[Any]:
    """An array or None for every leaf of a tree of tangents, checked against the values they belong to.

    Args:
        treedef: the structure they must have, as `_flatten` makes it.
        specs: for every leaf, the shape and dtype it must have, or None.
        given: the tangents.
        kind: `"tangent"` or `"cotangent"`.
        names: the user's names for the given tree and for the one that it must match.
    """
    leaves, given_def = _flatten(given)
    if given_def != treedef:
        skeletons = (d.unflatten([0] * d.num_leaves) for d in (treedef, given_def))
        raise value_error(
            f"the {kind}s must have the structure of the values they belong to",
            where=f"`{names[0]}`",
            expected=f"the structure of `{names[1]}`, with an array or None at every leaf",
            got=diff_text(*skeletons, leaves="ignore", root=names[0]),
            instead="make them with jax.tree.map, or give None for a leaf that does not change",
        )
    return [
        None if is_missing(leaf) else _check(leaf, spec, kind, names[0], treedef, i)
        for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
    ]


def _check(leaf: Any, spec: _Spec, kind: str, root: str, treedef: Any, index: int) -> Any:
    array = leaf if is_array(leaf) else jnp.asarray(leaf) if is_array_like(leaf) else None
    if spec is not None and array is not None and (array.shape, array.dtype) == spec:
        return array
    numbered = treedef.unflatten(range(treedef.num_leaves))
    where = path_text(jtu.tree_flatten_with_path(numbered)[0][index][0], root)
    if spec is None:
        raise type_error(
            f"a {kind} was given for a value that is not a floating-point array",
            where=where,
            expected="None",
            got=short(leaf),
            instead="give None there; only floating-point and complex arrays are differentiated",
        )
    shape, dtype = spec
    error = TypeError if array is None or array.dtype != dtype else ValueError
    raise error(
        message(
            f"a {kind} must have the shape and dtype of the value it belongs to",
            where=where,
            expected=f"shape {shape} and dtype {dtype}, or None",
            got=short(leaf),
            instead=f"convert it, e.g. with `.astype({dtype})` or jnp.broadcast_to",
        )
    )


def _part_inexact(arrays: list[Any]) -> tuple[list[Any], list[Any]]:
    """The floating-point arrays, and the list with None in their places."""
    inexact = [x for x in arrays if is_inexact_array(x)]
    return inexact, [None if is_inexact_array(x) else x for x in arrays]


def _merge(inexact: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    left = iter(inexact)
    return [next(left) if x is None else x for x in others]


def _probe(is_alive: list[bool]) -> Callable[[Any, list[Any]], list[Any]]:
    """The identity function of a list of arrays, which records which of them have a tangent that is
    not known to be zero.

    Its first argument must have a tangent: then the rule runs at this level of differentiation only.
    """

    def rule(primals: Any, tangents: Any) -> Any:
        is_alive[:] = [not isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents[1]]
        return primals[1], tangents[1]

    identity = jax.custom_jvp(lambda carrier, values: values)
    identity.defjvp(rule, symbolic_zeros=True)
    return identity


def _as_tuple(values: Any, name: str) -> tuple[Any, ...]:
    if isinstance(values, (tuple, list)):
        return tuple(values)
    raise type_error(
        f"the {name} of filter_jvp must be a tuple with one entry for each positional argument",
        where=f"argument `{name}` of filter_jvp",
        expected="a tuple or list",
        got=short(values),
        instead="filter_jvp(f, (x,), (t,))",
    )


def filter_jvp(
    fn: Callable[..., Any], primals: Any, tangents: Any, **kwargs: Any
) -> tuple[Any, Any]:
    """The value of a function and its derivative along a direction (forward mode).

    Args:
        fn: the function.
        primals: its positional arguments, as a tuple. They may be any Python objects.
        tangents: the direction: a tuple like `primals`, with an array of the same shape and dtype, or
            None for zero, in place of every floating-point array, and None in place of everything
            else. `vernal.NoGradient` works like None, so a gradient can be the direction.
        **kwargs: keyword arguments of the function. They are not differentiated.

    Returns:
        `(out, tangent_out)`. `tangent_out` has the structure of `out`, with None for every leaf that is
        not a floating-point array or does not depend on what is differentiated.

    Raises:
        TypeError: if `fn` is not callable, `primals` or `tangents` is not a tuple, a tangent has
            the wrong dtype, or there is one for something that is not a floating-point array.
        ValueError: if the structure of `tangents` differs from that of `primals`, or a tangent has the
            wrong shape.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> def f(x, y, name):
        ...     return {"xy": x * y, "y": y, "name": name}
        >>> primals = (jnp.float32(2.0), jnp.float32(3.0), "f")
        >>> out, tangent = vernal.filter_jvp(f, primals, (jnp.float32(1.0), None, None))
        >>> tangent
        {'name': None, 'xy': Array(3., dtype=float32), 'y': None}
    """
    check_callable(fn, "filter_jvp")
    leaves, treedef = _flatten(_as_tuple(primals, "primals"))
    given = _as_tuple(tangents, "tangents")
    matched = _match(treedef, [*map(_spec, leaves)], given, "tangent", ("tangents", "primals"))
    # A Python number with a tangent is treated as an array.
    leaves = [
        x if t is None or is_array(x) else jnp.asarray(x)
        for x, t in zip(leaves, matched, strict=True)
    ]
    arrays, rest = split((fn, treedef.unflatten(leaves), kwargs))
    first = len(split(fn)[0])
    directions = [t for x, t in zip(leaves, matched, strict=True) if is_array(x)]
    positions = [first + i for i, t in enumerate(directions) if t is not None]
    is_alive: list[bool] = []
    probe = _probe(is_alive)

    def run(carrier: Any, chosen: list[Any]) -> Any:
        filled = list(arrays)
        for i, array in zip(positions, chosen, strict=True):
            filled[i] = array
        out, out_rest = split(call_inside(fn, rest, filled))
        inexact, others = _part_inexact(out)
        return probe(carrier, inexact), (others, out_rest)

    run.__name__ = run.__qualname__ = callable_name(fn)
    out, tangents_out, (others, out_rest) = jax.jvp(
        run,
        (jnp.zeros(()), [arrays[i] for i in positions]),
        (jnp.ones(()), [t for t in directions if t is not None]),
        has_aux=True,
    )
    alive = [t if live else None for t, live in zip(tangents_out, is_alive, strict=True)]
    return out_rest.fill(_merge(as_arrays(out), others)), _tangent_tree(out_rest, others, alive)


def _tangent_tree(rest: Rest, others: list[Any], tangents: list[Any]) -> Any:
    """A tree like the output, with the tangents of its floating-point arrays and None everywhere
    else."""
    left = iter(tangents)
    of_arrays = iter([next(left) if x is None else None for x in others])
    return rest.treedef.unflatten([next(of_arrays) if m else None for m in rest.mask])


class _Pullback(Module):
    """The second result of `filter_vjp`: from cotangents of the output to cotangents of the
    arguments."""

    pullback: Any
    name: str = field(static=True)
    # The structure of the output, as `_flatten` makes it, and for every leaf the shape and dtype of
    # its cotangent, or None.
    treedef: Any = field(static=True)
    specs: tuple[_Spec, ...] = field(static=True)
    outline: Any = field(static=True)
    # As in `Derivative`.
    missing: NoGradient | None = field(static=True, default_factory=NoGradient)

    def __call__(self, cotangent: Any) -> tuple[Any, ...]:
        """Pulls a cotangent back.

        Args:
            cotangent: a tree like the output, with an array or None (zero) in place of every
                floating-point array and None in place of everything else. `vernal.NoGradient` works
                like None.

        Returns:
            One tree for every positional argument, with `vernal.NoGradient` for everything that is
            not differentiated.

        Raises:
            TypeError: if a cotangent has the wrong dtype, or there is one for something that is
                not a floating-point array.
            ValueError: if the structure of `cotangent` differs from that of the output, or an array has
                the wrong shape.
        """
        names = ("cotangent", f"{self.name}(...)")
        given = _match(self.treedef, self.specs, cotangent, "cotangent", names)
        found = [
            jnp.zeros(*spec) if x is None else x
            for x, spec in zip(given, self.specs, strict=True)
            if spec is not None
        ]
        (result,) = self.pullback(found)
        return assemble(self.outline, result, self.missing)


def filter_vjp(fun: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple[Any, ...]:
    """The value of a function, and the function that pulls cotangents back through it (reverse
    mode).

    Args:
        fun: the function.
        *primals: its arguments. They may be any Python objects; every floating-point array in them
            that is not frozen (see `vernal.freeze`) is differentiated.
        has_aux: whether it returns a pair `(out, aux)`. `aux` may be any Python object.

    Returns:
        `(out, vjp_fn)` or `(out, vjp_fn, aux)`. `vjp_fn` takes one cotangent, a tree like `out`
        with an array, or None for zero, in place of every floating-point array and None in place
        of everything else; it returns a tuple with one tree for every argument, with
        `vernal.NoGradient` for everything that is not differentiated. It is a pytree, so it can be passed to and
        returned from compiled functions.

    Raises:
        TypeError: if `fun` is not callable, or does not return a pair with `has_aux=True`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> def f(x, n):
        ...     return {"y": x**n, "name": "power"}
        >>> out, vjp_fn = vernal.filter_vjp(f, jnp.float32(3.0), 2)
        >>> vjp_fn({"y": jnp.float32(1.0), "name": None})
        (Array(6., dtype=float32), NoGradient())
    """
    check_callable(fun, "filter_vjp")
    arrays, rest = split((fun, primals, {}))
    targets = targets_of(fun, primals, rest)
    fill_slots(targets, arrays, rest)
    call = Call(fun, arrays, rest, targets)

    def run(chosen: list[Any]) -> Any:
        value, aux = value_and_aux(fun, call.run(chosen), has_aux, "filter_vjp")
        out, out_rest = split(value)
        inexact, others = _part_inexact(out)
        return inexact, (others, out_rest, split(aux))

    run.__name__ = run.__qualname__ = callable_name(fun)
    found, pullback, (others, out_rest, (aux, aux_rest)) = jax.vjp(run, call.chosen(), has_aux=True)
    out = out_rest.fill(_merge(found, others))
    leaves, treedef = _flatten(out)
    specs = tuple(_spec(x) if is_array(x) else None for x in leaves)
    vjp_fn = _Pullback(pullback, callable_name(fun), treedef, specs, call.outline())
    return (out, vjp_fn, aux_rest.fill(aux)) if has_aux else (out, vjp_fn)
