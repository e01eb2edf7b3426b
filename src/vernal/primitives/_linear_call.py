"""A linear function with its own transpose: the basis of derivative rules for both directions.

Difficulty. The derivative of a loop is a linear function, computed in one way when it is pushed
forward (along with the loop) and in quite another when it is pulled back (from checkpoints, in
reverse). `jax.custom_jvp` knows only the first and `jax.custom_vjp` only the second. A jvp
rule that *calls a linear function whose transpose is given* has both, because JAX differentiates in
reverse mode by transposing the operations that a jvp rule applies to its tangents.

Plan. One operation, `linear_call`, on residuals `r` (anything) and tangents `t`:

    compute      F(r, t), from the jaxpr of `forward`, traced once
    jvp          F(r, dt) as this operation again, plus the derivative along r of `forward`
    transpose    `transposed(r, ct)`, called there and then: ordinary JAX code, differentiable. With
                 respect to `r`, where F is linear in it too (a convolution): that of `forward`
    vmap         derived: see `_vprim.py`

Invariants. F is linear in `t`; `transposed` is its transpose for every `r`; neither holds a
tracer, so both may run at any later time and under other transformations.

Parameters of the operation: `forward`, a closed jaxpr on the flat residuals and tangents;
`transposed`, a `_Transposed`, which knows the trees.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer, eval_jaxpr

from .._ground import UndefinedPrimal, Zero, add_tangents, callable_name, instantiate_zeros
from ..show import diff_text, message, path_text, short, type_error, value_error
from ..transforms import ZeroTangent, is_zero, placed_like, summed_like, varying_alike
from ..trees import is_inexact_array
from ._vprim import define


class _Transposed:
    """The transposed function on flat lists.

    Args:
        fn: as the user gave it.
        residuals: the structure of the residuals.
        tangents: the structure of the tangents.
        out: the structure of the results.
    """

    def __init__(self, fn: Callable[..., Any], residuals: Any, tangents: Any, out: Any):
        self._fn = fn
        self._tangents = tangents
        self._out = out
        self._residuals = residuals

    @property
    def num_residuals(self) -> int:
        return self._residuals.num_leaves

    def __call__(self, residuals: Sequence[Any], cotangents: Sequence[Any], avals: Any) -> Any:
        name, given = callable_name(self._fn), cotangents
        cotangents = self._out.unflatten(
            [_zero(ct.aval) if isinstance(ct, Zero) else ct for ct in cotangents]
        )
        out = self._fn(self._residuals.unflatten(residuals), cotangents)
        try:
            flat = self._tangents.flatten_up_to(out)
        except (TypeError, ValueError):
            flat = None
        if flat is None or not all(map(_fits, flat, avals)):
            raise TypeError(self._mismatch(out, avals))
        found = [None if ct is None or is_zero(ct) else jnp.asarray(ct) for ct in flat]
        return [
            None if ct is None else summed_like(ct, aval, by=name, cotangents=given)
            for ct, aval in zip(found, avals, strict=True)
        ]

    def _mismatch(self, out: Any, avals: Any) -> str:
        expected = self._tangents.unflatten(
            [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        )
        return message(
            "linear_call: the transposed function did not return the cotangents of the tangents",
            where=f"result of `{callable_name(self._fn)}`",
            expected="the structure, shapes and dtypes of `tangents`; None or a ZeroTangent for "
            "zero",
            got=diff_text(expected, out, weak_type=False, root="result"),
            instead="return one cotangent for every array in `tangents`",
        )

    def __repr__(self) -> str:
        return callable_name(self._fn)


def _zero(aval: Any) -> ZeroTangent:
    return ZeroTangent(aval.shape, aval.dtype)


def _fits(ct: Any, aval: Any) -> bool:
    if ct is None:
        return True
    if not (is_zero(ct) or is_inexact_array(ct)):
        return False
    return ct.shape == aval.shape and ct.dtype == aval.dtype


def _compute(*args: Any, forward: Any, transposed: _Transposed) -> list[Any]:
    del transposed
    return eval_jaxpr(forward.jaxpr, forward.consts, *args)


def _abstract(*avals: Any, forward: Any, transposed: _Transposed) -> tuple[Any, Any]:
    del avals, transposed
    return forward.out_avals, forward.effects


def _jvp(
    primals: Any, tangents: Any, *, forward: Any, transposed: _Transposed
) -> tuple[list[Any], list[Any]]:
    n = transposed.num_residuals
    out = linear_call_p.bind(*primals, forward=forward, transposed=transposed)
    dots: list[Any] = [Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    if not all(isinstance(dot, Zero) for dot in tangents[n:]):
        inner = map(instantiate_zeros, tangents[n:])
        dots = linear_call_p.bind(*primals[:n], *inner, forward=forward, transposed=transposed)
    live = [i for i in range(n) if not isinstance(tangents[i], Zero)]
    if live:
        # The results do not come from here: `out` must keep our transpose.
        def of_residuals(*given: Any) -> list[Any]:
            args = list(primals)
            for i, x in zip(live, given, strict=True):
                args[i] = x
            return _compute(*args, forward=forward, transposed=transposed)

        given = tuple(primals[i] for i in live)
        given_dots = tuple(tangents[i] for i in live)
        _, more = jax.jvp(of_residuals, given, given_dots)
        dots = list(map(add_tangents, dots, more))
    return out, dots


def _transpose(cotangents: Any, *args: Any, forward: Any, transposed: _Transposed) -> list[Any]:
    n = transposed.num_residuals
    wanted = [isinstance(x, UndefinedPrimal) for x in args]
    if all(isinstance(ct, Zero) for ct in cotangents):
        return [None] * len(args)
    if any(wanted[:n]):
        return _transpose_forward(cotangents, args, forward, transposed)
    avals = [
        x.aval.to_ct_aval() if isinstance(x, UndefinedPrimal) else jax.typeof(x) for x in args[n:]
    ]
    out = [None] * n + transposed(args[:n], cotangents, avals)
    return [ct if want else None for ct, want in zip(out, wanted, strict=True)]


def _transpose_forward(
    cotangents: Any, args: Sequence[Any], forward: Any, transposed: _Transposed
) -> list[Any]:
    """Transposes with respect to residuals, for a function that happens to be linear in these as well."""
    places = [i for i, x in enumerate(args) if isinstance(x, UndefinedPrimal)]
    avals = [args[i].aval for i in places]

    def of_wanted(*given: Any) -> list[Any]:
        known = list(args)
        for i, x in zip(places, given, strict=True):
            known[i] = x
        return _compute(*known, forward=forward, transposed=transposed)

    try:
        back = jax.linear_transpose(of_wanted, *avals)
        found = back([instantiate_zeros(ct) for ct in cotangents])
    except Exception as error:
        raise value_error(
            "linear_call cannot be transposed with respect to these residuals",
            where=f"transposition of the call with `{transposed!r}`",
            expected="residuals in which `forward` is also linear",
            got=f"{type(error).__name__} while transposing `forward`",
            instead="`jax.vjp`, which linearises first, or pass the linear input as `tangents`",
        ) from error
    out: list[Any] = [None] * len(args)
    for i, ct, aval in zip(places, found, avals, strict=True):
        out[i] = placed_like(ct, aval.to_ct_aval())
    return out


linear_call_p = define("linear_call", _compute, _abstract, _jvp, _transpose, True)


def linear_call(
    forward: Callable[[Any, Any], Any],
    transposed: Callable[[Any, Any], Any],
    residuals: Any,
    tangents: Any,
) -> Any:
    """Calls a linear function whose transpose is given by another function.

    Use it to compute the tangent in a rule of `filter_custom_jvp`: `forward` is then the forward-mode
    derivative and `transposed` the reverse-mode derivative, each implemented in the way that is best
    for it. All transformations compose, in any order and number.

    JAX 0.10 forgets the rule of a `jax.custom_jvp` where a `lax.scan` around it is differentiated
    twice; the rule of a `filter_custom_jvp` is never forgotten.

    Both functions may be traced later than this call, so they must not close over a tracer of a
    surrounding transformation: pass arrays that they need in `residuals`. Pass the same function
    objects at every call, rather than new closures, to avoid tracing them again.

    Args:
        forward: `forward(residuals, tangents) -> out`, linear in `tangents`. For derivatives of
            higher order it must be differentiable with respect to `residuals`.
        transposed: `transposed(residuals, cotangents)`, the transpose of `forward` with respect to
            `tangents`. A cotangent that is known to be zero is a `ZeroTangent`. It returns the
            cotangents of `tangents`, None or a `ZeroTangent` for those that are zero.
        residuals: a tree of arrays of any dtype.
        tangents: a tree of arrays of real or complex floating-point numbers.

    Returns:
        `forward(residuals, tangents)`, a tree of floating-point arrays.

    Raises:
        TypeError: if a tangent or a result is not floating-point; when transposing, if `transposed`
            returns anything other than cotangents of `tangents`.
        ValueError: if `forward` holds a tracer; when transposing with respect to `residuals` in which
            `forward` is not linear.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import linear_call
        >>> scale = lambda a, x: a * x
        >>> doubled_back = lambda a, ct: 2 * a * ct  # not the transpose, to tell them apart
        >>> f = lambda x: linear_call(scale, doubled_back, jnp.array(3.0), x)
        >>> jax.jvp(f, (1.0,), (1.0,))[1], jax.grad(f)(1.0)
        (Array(3., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))
    """
    leaves, treedef = jtu.tree_flatten((residuals, tangents))
    return local_linear_call(
        forward, transposed, *treedef.unflatten(varying_alike(list(map(jnp.asarray, leaves))))
    )


def local_linear_call(
    forward: Callable[[Any, Any], Any],
    transposed: Callable[[Any, Any], Any],
    residuals: Any,
    tangents: Any,
) -> Any:
    """`linear_call` that tracks which arguments are the same on all devices of `jax.shard_map`.

    In `linear_call` all arguments vary alike. Here, if an argument is the same on all devices and `transposed` returns
    cotangents for it that are not, these are summed over the devices. If some results differ between devices and others
    do not, that sum would mix parts with wholes, and is refused.

    Args:
        forward: as for `linear_call`.
        transposed: as for `linear_call`.
        residuals: as for `linear_call`.
        tangents: as for `linear_call`.

    Returns:
        `forward(residuals, tangents)`, a tree of floating-point arrays.

    Raises:
        TypeError: as `linear_call`.
        ValueError: as `linear_call`; when transposing, if the sum over devices is refused.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import local_linear_call
        >>> def double(_, x):
        ...     return 2 * x
        >>> jax.grad(lambda x: local_linear_call(double, double, (), x))(jnp.array(3.0))
        Array(2., dtype=float32, weak_type=True)
    """
    residuals, tangents = jax.tree.map(jnp.asarray, (residuals, tangents))
    _check_inexact(tangents, "argument `tangents`")
    leaves, residual_tree = jtu.tree_flatten(residuals)
    dots, tangent_tree = jtu.tree_flatten(tangents)
    jaxpr, out = jax.make_jaxpr(forward, return_shape=True)(residuals, tangents)
    out_tree = jtu.tree_structure(out)
    _check_inexact(out, f"result of `{callable_name(forward)}`")
    if any(isinstance(const, Tracer) for const in jaxpr.consts):
        raise value_error(
            "linear_call: the forward function closes over a traced value",
            where=f"the closure of `{callable_name(forward)}`",
            expected="a function of its two arguments only",
            got=", ".join(short(x) for x in jaxpr.consts if isinstance(x, Tracer)),
            instead="pass the value in `residuals`, or in `tangents` if the function is linear "
            "in it",
        )
    rule = _Transposed(transposed, residual_tree, tangent_tree, out_tree)
    flat = linear_call_p.bind(*leaves, *dots, forward=jaxpr, transposed=rule)
    return out_tree.unflatten(flat)


def _check_inexact(tree: Any, where: str) -> None:
    for path, leaf in jtu.tree_flatten_with_path(tree)[0]:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise type_error(
                "linear_call takes and returns only floating-point arrays",
                where=f"{where}, at {path_text(path)}",
                expected="real or complex floating-point numbers",
                got=short(leaf),
                instead="leave out values without a derivative, or pass them in `residuals`",
            )
