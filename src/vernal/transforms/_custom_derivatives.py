"""Functions with their own derivative rules, as Vernal's operations.

They do what `jax.custom_jvp` and `jax.custom_vjp` do, and more. JAX 0.10 loses the rules of those where a `lax.scan`
around them is differentiated twice: the second derivative is then silently that of the function. The rule of an
operation is never lost.

`call_with_jvp` calls a function that has a rule for its derivative. `linear_by_transpose` is a linear function of
which only the transpose is known, which is all that a rule for reverse mode defines. It cannot run forward: that
would be the transpose of the transpose, but a rule need not be linear (it may clip or round a gradient), and JAX
silently transposes functions that are not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import (
    UndefinedPrimal,
    Zero,
    add_tangents,
    cached_weakly,
    callable_name,
    instantiate_zeros,
)
from ..show import type_error, value_error
from ._operations import vprim_p
from ._placement import placed_like, summed_like
from ._poison import poison
from ._runtime_check import reports_in
from ._traits import Traits

SymbolicZero = jax.custom_derivatives.SymbolicZero


def as_jax(x: Any) -> Any:
    """Converts a Python or NumPy number, which JAX passes through unchanged, to a JAX array. Otherwise
    `jax.grad(f)(1.0)` would give a rule something that is not an array, and so not differentiated."""
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def is_inexact(x: Any) -> bool:
    """Whether an array can have tangents other than zero."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def replaced(values: Sequence[Any], which: Sequence[bool], new: Sequence[Any]) -> list[Any]:
    """Replaces the marked values.

    Args:
        values: the values.
        which: marks those to replace.
        new: their replacements, in order.
    """
    rest = iter(new)
    return [next(rest) if mark else x for x, mark in zip(values, which, strict=True)]


def chosen(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    """The marked values.

    Args:
        values: the values.
        which: marks those to return.
    """
    return [x for x, mark in zip(values, which, strict=True) if mark]


def _is_zero(dot: Any) -> bool:
    return isinstance(dot, (Zero, SymbolicZero)) or jax.typeof(dot).dtype == jax.dtypes.float0


def _tangent(x: Any, dot: Any) -> Any:
    aval = jax.typeof(x).to_tangent_aval()
    return Zero(aval) if _is_zero(dot) else placed_like(dot, aval)


_NOTHING_KNOWN = Traits()


@cached_weakly
class WithJvp:
    """The rules of a function that has a rule for its derivative, called with arguments of one structure.

    Args:
        fn: the function, of trees of arrays.
        rule: `rule(primals, tangents)`.
        args: the structure of the arguments.
        is_linear: as for `call_with_jvp`.
        traits: what is known of it.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        rule: Callable[..., Any],
        args: Any,
        is_linear: Callable[..., bool] | None = None,
        traits: Traits = _NOTHING_KNOWN,
    ):
        self.name = callable_name(fn)
        self.traits = traits
        self._is_linear = is_linear
        self._fn = fn
        self._rule = rule
        self._args = args
        # The structure of the result, known when the function or its rule has run.
        self.out: Any = None

    def __repr__(self) -> str:
        return self.name

    def compute(self, *arrays: Any) -> list[Any]:
        flat, self.out = jtu.tree_flatten(self._fn(*self._args.unflatten(arrays)))
        return list(map(as_jax, flat))

    def abstract(self, *avals: Any) -> tuple[Sequence[Any], Any]:
        closed = jax.make_jaxpr(self.compute)(*avals)
        return closed.out_avals, closed.effects

    def jvp(self, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        dots = [SymbolicZero(t.aval) if isinstance(t, Zero) else t for t in tangents]
        given = self._args.unflatten(map(as_jax, primals)), self._args.unflatten(dots)
        out, out_dots = self._rule(*given)
        flat, self.out = jtu.tree_flatten(out)
        flat = list(map(as_jax, flat))
        return flat, list(map(_tangent, flat, self.out.flatten_up_to(out_dots)))

    def transpose(self, cotangents: Any, *args: Any) -> list[Any]:
        """The transpose of the function itself, if it is linear."""
        if self.traits.has_own_rule:
            return _WithRule(self, args).transpose(cotangents, args)
        wanted = [isinstance(x, UndefinedPrimal) for x in args]
        avals = [x.aval for x in chosen(args, wanted)]

        def of_wanted(*new: Any) -> list[Any]:
            given = replaced(args, wanted, new)
            if self._is_linear is None:
                out = self.compute(*given)
            else:
                out = vprim_p.bind(*map(as_jax, given), rules=self)
            return [x for x in out if is_inexact(x)]

        cts = [
            instantiate_zeros(ct)
            for ct in cotangents
            if is_inexact(ct.aval if isinstance(ct, Zero) else ct)
        ]
        zeros = [placed_like(jnp.zeros(a.shape, a.dtype), a) for a in avals]
        if self._is_linear is not None:
            point = self._args.unflatten(map(as_jax, replaced(args, wanted, zeros)))
            marks = self._args.unflatten(wanted)
            if not all(map(is_inexact, avals)) or not self._is_linear(*point, *marks):
                raise self.no_transpose("a function that is not linear")
        try:
            if self._is_linear is None:
                found = jax.linear_transpose(of_wanted, *avals)(cts)
            else:
                # A linear function is its own derivative.
                out, back = jax.vjp(of_wanted, *zeros)
                found = back(cts)
                given = map(as_jax, replaced(args, wanted, zeros))
                if reports_in(jax.make_jaxpr(self.compute)(*given).jaxpr):
                    # A derivative has no checks. The function has them, and its result is used, so they stay.
                    failed = jnp.any(jnp.array([jnp.isnan(x).any() for x in out]))
                    found = [poison(ct, failed) for ct in found]
        except Exception as error:
            raise self.no_transpose(f"{type(error).__name__} while transposing it") from error
        of_args: list[Any] = [None] * len(args)
        cts = [placed_like(ct, a.to_ct_aval()) for ct, a in zip(found, avals, strict=True)]
        return replaced(of_args, wanted, cts)

    def no_transpose(self, got: str) -> ValueError:
        """The error for a function without a transpose."""
        return value_error(
            f"`{self.name}` cannot be transposed",
            where=f"jax.linear_transpose of `{self.name}`",
            expected="a function that is linear, made of operations that JAX can transpose",
            got=got,
            instead="`jax.vjp`, which takes the derivative first; in a rule, the function of what does not depend "
            "on the tangent, multiplied by the tangent",
        )


class _WithRule:
    """The transpose of a linear function with respect to some arguments, with a rule: its derivative by the others is
    the transpose of the function's derivative by them.

    A rule may call a function with a rule of its own on a tangent, which reverse mode transposes. Without a rule, the
    next derivative would silently be that of its value.

    Args:
        rules: those of the function.
        args: the arguments, `UndefinedPrimal` for those to transpose with respect to.
    """

    def __init__(self, rules: WithJvp, args: Sequence[Any]):
        self._rules = rules
        self._wanted = [isinstance(x, UndefinedPrimal) for x in args]
        self._avals = [x.aval for x in chosen(args, self._wanted)]

    def transpose(self, cotangents: Any, args: Sequence[Any]) -> list[Any]:
        known = chosen(args, [not mark for mark in self._wanted])
        cts = [ct for ct in map(instantiate_zeros, cotangents) if is_inexact(ct)]
        return replaced([None] * len(args), self._wanted, self._call(known, cts))

    def _call(self, known: Any, cts: Any) -> list[Any]:
        one_way = self._rules.traits.one_way
        return call_with_jvp(
            self._transposed, self._rule, known, cts, one_way=one_way, has_own_rule=True
        )

    def _transposed(self, known: Any, cts: Any) -> list[Any]:
        return self._back(lambda *new: self._rules.compute(*self._args(known, new)), cts)

    def _rule(self, primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
        (known, cts), (known_dots, ct_dots) = primals, tangents
        found = self._call(known, cts)
        dots: list[Any] = [Zero(jax.typeof(x).to_tangent_aval()) for x in found]
        if not all(map(_is_zero, known_dots)):
            one_way = self._rules.traits.one_way
            dots = (self._by_known_one_way if one_way else self._by_known)(known, cts, known_dots)
        if not all(map(_is_zero, ct_dots)):
            moved = list(map(instantiate_zeros, map(_tangent, cts, ct_dots)))
            dots = list(map(add_tangents, dots, self._call(known, moved)))
        return found, dots

    def _by_known(self, known: Any, cts: Any, dots: Any) -> list[Any]:
        still = [Zero(a.to_tangent_aval()) for a in self._avals]
        given = self._args(list(map(_tangent, known, dots)), still)

        def changed(*new: Any) -> list[Any]:
            return list(map(instantiate_zeros, self._rules.jvp(self._args(known, new), given)[1]))

        return self._back(changed, cts)

    def _by_known_one_way(self, known: Any, cts: Any, dots: Any) -> list[Any]:
        """The same for a function with a rule for reverse mode."""
        live = [not _is_zero(dot) for dot in dots]

        def of_known(residuals: list[Any], of_new: list[Any]) -> list[Any]:
            known, cts = residuals[: len(live)], residuals[len(live) :]
            new = list(map(instantiate_zeros, of_new))

            def called(*moving: Any) -> list[Any]:
                args = map(as_jax, self._args(replaced(known, live, moving), new))
                return list(filter(is_inexact, vprim_p.bind(*args, rules=self._rules)))

            return list(jax.vjp(called, *chosen(known, live))[1](cts))

        out = [a.to_ct_aval() for a in self._avals]
        name, residuals = self._rules.name, [*known, *cts]
        return linear_by_transpose(name, of_known, residuals, chosen(dots, live), out)

    def _args(self, known: Sequence[Any], new: Sequence[Any]) -> list[Any]:
        """All arguments."""
        others = replaced([None] * len(self._wanted), [not mark for mark in self._wanted], known)
        return replaced(others, self._wanted, new)

    def _back(self, fn: Callable[..., Any], cts: Any) -> list[Any]:
        """The transpose of a function of the wanted arguments."""
        try:
            found = jax.linear_transpose(
                lambda *new: list(filter(is_inexact, fn(*new))), *self._avals
            )(cts)
        except Exception as error:
            raise self._rules.no_transpose(
                f"{type(error).__name__} while transposing it"
            ) from error
        return [placed_like(ct, a.to_ct_aval()) for ct, a in zip(found, self._avals, strict=True)]


def call_with_jvp(
    fn: Callable[..., Any],
    rule: Callable[..., Any],
    *args: Any,
    is_linear: Callable[..., bool] | None = None,
    one_way: bool = False,
    replays: bool = False,
    may_check: bool = False,
    has_own_rule: bool = False,
) -> Any:
    """Calls a function that has a rule for its derivative.

    Args:
        fn: the function, of trees of arrays. It may not hold a tracer, and neither may the rule.
        rule: `rule(primals, tangents)`, two tuples like `args`, with a `SymbolicZero` where a tangent is known to be
            zero; returns the result and, in the same structure, its tangents, with `SymbolicZero` for zero. Must be
            linear in the tangents.
        *args: the arguments.
        is_linear: for a function made of operations without a transpose: `is_linear(*args, *marks)`, whether it is
            linear in the marked arguments. Then its transpose is that of its derivative.
        one_way: whether the rule is for reverse mode only.
        replays: whether the function repeats the steps of a loop that another function has run.
        may_check: whether there may be a check in the rule, which is known only when the rule runs.
        has_own_rule: whether the rule may be another than the derivative of the function, as a user's.

    Returns:
        `fn(*args)`.
    """
    arrays, structure = jtu.tree_flatten(args)
    traits = Traits(
        one_way=one_way,
        replays=replays,
        may_check=may_check,
        splits=True,
        has_own_rule=has_own_rule,
    )
    rules = WithJvp(fn, rule, structure, is_linear, traits)
    out = vprim_p.bind(*map(as_jax, arrays), rules=rules)
    return rules.out.unflatten(out)


@cached_weakly
class _ByTranspose:
    """The rules of a linear function of which only the transpose is known.

    Args:
        name: the name of the function that it is the derivative of.
        back: `back(residuals, cotangents)`, of lists; None stands for zero among the results.
        count: how many residuals there are.
        out: the types of its results.
    """

    def __init__(self, name: str, back: Callable[..., Any], count: int, out: Sequence[Any]):
        self.name = f"derivative of {name}"
        self._fn_name = name
        self._back = back
        # It is only ever transposed, so it has no program.
        self.traits = Traits(
            is_written=False, one_way=True, may_check=True, transposed=(name, count)
        )
        self._count = count
        self._out = out

    def __repr__(self) -> str:
        return self.name

    def compute(self, *args: Any) -> list[Any]:
        del args
        raise type_error(
            f"`{self._fn_name}` has no derivative in forward mode",
            where=f"`{self._fn_name}`",
            expected="reverse mode (`jax.grad`, `jax.vjp`), which is what its rule is for",
            got="forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`)",
            instead="`filter_custom_jvp`, which works in both modes; `jax.jacrev` in place of `jax.jacfwd`",
        )

    def abstract(self, *avals: Any) -> tuple[Sequence[Any], Any]:
        del avals
        return self._out, set()

    def jvp(self, primals: Any, tangents: Any) -> Any:
        del tangents
        return self.compute(*primals)

    def transpose(self, cotangents: Any, *args: Any) -> list[Any]:
        n = self._count
        if all(isinstance(ct, Zero) for ct in cotangents):
            return [None] * len(args)
        found = self._back([*map(as_jax, args[:n])], list(cotangents))
        wanted = zip(args[n:], found, strict=True)
        return [None] * n + [
            summed_like(as_jax(ct), x.aval.to_ct_aval(), by=self._fn_name, cotangents=cotangents)
            if isinstance(x, UndefinedPrimal) and ct is not None
            else None
            for x, ct in wanted
        ]


def linear_by_transpose(
    name: str,
    back: Callable[..., Any],
    residuals: Sequence[Any],
    dots: Sequence[Any],
    out: Sequence[Any],
) -> list[Any]:
    """The linear function of `dots` that has this transpose.

    Args:
        name: the name of the function that it is the derivative of.
        back: `back(residuals, cotangents)` returns a list like `dots` of their cotangents, None for zero. A cotangent
            that is known to be zero is passed as a `Zero`. `back` may not hold a tracer.
        residuals: arrays.
        dots: arrays of floating-point numbers.
        out: the types of the results.
    """
    rules = _ByTranspose(name, back, len(residuals), out)
    return vprim_p.bind(*residuals, *dots, rules=rules)
