"""Primitives whose arguments and results are arbitrary Python objects.

A JAX primitive takes and returns flat lists of arrays, besides parameters that are not traced. Here
the arrays of any arguments become the list, and everything else becomes a parameter. Each kind of
rule has a wrapper, so that rules, too, see the arguments in their original form.

Parameters of every such primitive:

    rest    the arguments without their arrays, compared by value
    out     a record of one call. A primitive can return only arrays, so the rule that computes the
            result records everything else of the result here, for the caller.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import AbstractValue

from .._ground import UndefinedPrimal, Zero, callable_name, instantiate_zeros
from ..show import type_error
from ..trees import Rest, is_array, is_array_like, split


class _Record:
    """The result of one call without its arrays. Compares by identity: a call must not use the record
    of another."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest: Rest | None = None

    def write(self, result: Any) -> list[Any]:
        """Returns the arrays of a result, and records the rest of it."""
        flat, self.rest = split(result, _is_array_or_abstract)
        return [jax.typeof(x) if isinstance(x, jax.ShapeDtypeStruct) else x for x in flat]

    def __repr__(self) -> str:
        return "_"


def _is_array_or_abstract(x: Any) -> bool:
    return is_array(x) or isinstance(x, (AbstractValue, jax.ShapeDtypeStruct))


def filter_primitive_bind(prim: Any, *args: Any) -> Any:
    """Binds a primitive to arbitrary Python objects.

    Args:
        prim: a `jax.extend.core.Primitive` with `multiple_results` whose rules are wrapped by
            `filter_primitive_def` and the like, or one that `create_vprim` made from such rules.
        *args: any Python objects. JAX and NumPy arrays in them are traced; everything else (Python
            numbers, functions, jaxprs, strings, None) is passed on unchanged.

    Returns:
        The result of the rules: any tree.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.extend.core import Primitive
        >>> from vernal.primitives import filter_primitive_bind, filter_primitive_def
        >>> apply_p = Primitive("apply")
        >>> apply_p.multiple_results = True
        >>> rule = filter_primitive_def(lambda fn, x: {"name": "result", "value": fn(x)})
        >>> rule = apply_p.def_impl(rule)
        >>> filter_primitive_bind(apply_p, jnp.square, jnp.array(3.0))
        {'name': 'result', 'value': Array(9., dtype=float32, weak_type=True)}
    """
    arrays, rest = split(args)
    out = _Record()
    flat = prim.bind(*arrays, rest=rest, out=out)
    if out.rest is None:
        # A rule that is not wrapped, such as a batching rule, answered. This one is wrapped, and records.
        prim.abstract_eval(*map(jax.typeof, arrays), rest=rest, out=out)
    assert out.rest is not None
    return out.rest.fill(flat)


def filter_primitive_def(rule: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Wraps an implementation or an abstract evaluation rule of a primitive with arbitrary arguments.

    Args:
        rule: `rule(*args) -> result` with the arguments of `filter_primitive_bind`. An abstract
            evaluation rule gets `jax.core.ShapedArray`s in place of arrays, and its result may hold
            those or `jax.ShapeDtypeStruct`s.

    Returns:
        A rule for `Primitive.def_impl`, `Primitive.def_abstract_eval` and `create_vprim`.

    Example:
        >>> from vernal.primitives import filter_primitive_def
        >>> rule = filter_primitive_def(lambda fn, x: fn(x))
    """

    def filter_primitive_rule(*flat: Any, rest: Rest, out: _Record) -> list[Any]:
        return out.write(rule(*_filled(rest, flat)))

    return filter_primitive_rule


def filter_primitive_jvp(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a jvp rule of a primitive with arbitrary arguments.

    Args:
        rule: `rule(primals, tangents) -> (result, result_tangents)`. `primals` is the tuple of
            arguments, `tangents` a tree of the same structure, with None for a tangent that is
            known to be zero and for a leaf that is not an array. The tangents of the result follow
            the same convention. `materialise_zeros` turns a None into an array.

    Returns:
        A rule for `jax.interpreters.ad.primitive_jvps` and `create_vprim`.

    Raises:
        TypeError: when the rule is used, if it returns tangents of another structure, or one for
            a leaf that is not an array.

    Example:
        >>> from vernal.primitives import filter_primitive_jvp
        >>> rule = filter_primitive_jvp(lambda primals, tangents: (primals[0], tangents[0]))
    """

    def filter_primitive_rule(
        primals: Any, tangents: Any, *, rest: Rest, out: _Record
    ) -> tuple[list[Any], list[Any]]:
        given = [None if isinstance(t, Zero) else _array(t) for t in tangents]
        result, result_tangents = rule(_filled(rest, primals), _alone(rest, given))
        flat = out.write(result)
        assert out.rest is not None
        dots = _matching(out.rest, result_tangents, rule, "tangents", "the result")
        zeros = (Zero(jax.typeof(x).to_tangent_aval()) for x in flat)
        return flat, [zero if t is None else t for zero, t in zip(zeros, dots, strict=True)]

    return filter_primitive_rule


def filter_primitive_transpose(
    rule: Callable[..., Any] | None = None, *, materialise_zeros: bool = False
) -> Callable[..., Any]:
    """Wraps a transposition rule of a primitive with arbitrary arguments.

    Args:
        rule: `rule(inputs, cotangents) -> input_cotangents`. `inputs` is the tuple of arguments,
            with a `jax.interpreters.ad.UndefinedPrimal` for every array to transpose with respect
            to. `cotangents` is a tree like the result, with None for a cotangent that is known to
            be zero and for a leaf that is not an array. The rule returns a tree like `inputs` with
            cotangents in place of the `UndefinedPrimal`s, None for zero, and None for everything
            else (the cotangent of any other array is dropped).
        materialise_zeros: whether the rule gets arrays of zeros in place of None for the cotangents
            of arrays.

    Returns:
        A rule for `jax.interpreters.ad.primitive_transposes` and `create_vprim`; without `rule`, a
        decorator.

    Raises:
        TypeError: when the rule is used, if it returns cotangents of another structure, or one for
            a leaf that is not an array.

    Example:
        >>> from vernal.primitives import filter_primitive_transpose
        >>> @filter_primitive_transpose(materialise_zeros=True)
        ... def rule(inputs, cotangents):
        ...     return (cotangents, None)
    """
    if rule is None:
        return lambda rule: filter_primitive_transpose(rule, materialise_zeros=materialise_zeros)

    def filter_primitive_rule(cotangents: Any, *flat: Any, rest: Rest, out: _Record) -> list[Any]:
        assert out.rest is not None
        if materialise_zeros:
            given = list(map(instantiate_zeros, cotangents))
        else:
            given = [None if isinstance(ct, Zero) else _array(ct) for ct in cotangents]
        result = rule(_filled(rest, flat), _alone(out.rest, given))
        cts = _matching(rest, result, rule, "cotangents", "the arguments")
        return [
            ct if isinstance(x, UndefinedPrimal) else None for ct, x in zip(cts, flat, strict=True)
        ]

    return filter_primitive_rule


def filter_primitive_batching(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a batching rule of a primitive with arbitrary arguments.

    Args:
        rule: `rule(primals, axes) -> (result, result_axes)`. `primals` is the tuple of arguments,
            `axes` a tree of the same structure, with the position of the mapped axis of each array,
            or None. The axes of the result follow the same convention. In a registry whose rules
            get the mapped axis (`jax.interpreters.batching.fancy_primitive_batchers` or
            `axis_primitive_batchers`), it is `rule(axis, primals, axes)`, where `axis` has a `name`
            and a `size`.

    Returns:
        A rule for one of these registries or `primitive_batchers`.

    Raises:
        TypeError: when the rule is used, if it returns axes of another structure, or one for a leaf
            that is not an array.

    Example:
        >>> from vernal.primitives import filter_primitive_batching
        >>> rule = filter_primitive_batching(lambda primals, axes: (primals[0], axes[0]))
    """

    def filter_primitive_rule(
        *axis_flat_dims: Any, rest: Rest, out: _Record
    ) -> tuple[list[Any], list[Any]]:
        *axis, flat, dims = axis_flat_dims
        result, axes = rule(*axis, _filled(rest, flat), _alone(rest, dims))
        flat_result = out.write(result)
        assert out.rest is not None
        return flat_result, _matching(out.rest, axes, rule, "axes", "the result")

    return filter_primitive_rule


def materialise_zeros(primal: Any, tangent: Any, allow_struct: bool = False) -> Any:
    """Replaces a tangent that is None, because it is zero, by an array.

    Args:
        primal: the leaf that the tangent belongs to.
        tangent: its tangent, or None.
        allow_struct: whether a `jax.ShapeDtypeStruct` has a tangent too.

    Returns:
        `tangent` if it is not None. Otherwise zeros of the shape and tangent dtype of `primal`
        (float0 for integers) if that is an array or a Python number, and None if it is anything
        else.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.primitives import materialise_zeros
        >>> materialise_zeros(jnp.ones(2), None)
        Array([0., 0.], dtype=float32)
    """
    is_struct = allow_struct and isinstance(primal, jax.ShapeDtypeStruct)
    if tangent is None and (is_struct or is_array_like(primal)):
        aval = jax.typeof(primal if is_struct else jnp.asarray(primal))
        return instantiate_zeros(Zero(aval.to_tangent_aval()))
    return tangent


def _array(x: Any) -> Any:
    """Converts a Python number to an array. JAX passes a number that stands for an array to rules
    unchanged, but a result must hold an array."""
    return jnp.asarray(x) if isinstance(x, (bool, int, float, complex)) else x


def _filled(rest: Rest, values: Any) -> Any:
    """The tree with these values in place of its arrays."""
    return rest.fill(list(map(_array, values)))


def _alone(rest: Rest, values: Any) -> Any:
    """The tree with these values in place of its arrays, and None for everything else."""
    values = iter(values)
    return rest.treedef.unflatten([next(values) if is_array else None for is_array in rest.mask])


def _matching(rest: Rest, tree: Any, rule: Callable[..., Any], what: str, owner: str) -> list[Any]:
    """The values that a tree returned by a rule has in place of the arrays of `rest`."""
    try:
        flat = rest.treedef.flatten_up_to(tree)
    except (TypeError, ValueError) as error:
        problem = str(error)
    else:
        stray = [x for x, is_array in zip(flat, rest.mask, strict=True) if not is_array]
        if all(x is None for x in stray):
            return [x for x, is_array in zip(flat, rest.mask, strict=True) if is_array]
        problem = f"{sum(x is not None for x in stray)} for leaves that are not arrays"
    raise type_error(
        f"a rule of a primitive returned {what} that do not match {owner}",
        where=f"rule `{callable_name(rule)}`",
        expected=f"{what} in the structure of {owner}; None for zero, and for leaves that are not arrays",
        got=problem,
        instead="`jax.tree.map(lambda _: None, x)` for an argument or result `x` without any",
    )
