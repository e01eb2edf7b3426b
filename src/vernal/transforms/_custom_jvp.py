"""`filter_custom_jvp`: a function with its own rule for forward-mode derivatives (and so for all).

The difficulty: a function and its rule are closures, and what they close over may be traced by
any transformation around the call. A derivative rule (`_custom_derivatives.py`) handles only arguments correctly.

The plan: everything traced is taken out of both closures and made an argument, besides the arrays of
the call. Then there are three kinds of arguments:

* what the function (or a function among its arguments) captures: the rule does not cover it, so its
  contribution to the tangent comes from ordinary differentiation of the function, with the arrays
  held fixed;
* what the rule captures: a constant at this level of differentiation. Its own tangents belong to
  outer levels, and reach the result because the rule is ordinary code to those;
* the arrays of the call, which the rule is for.

A contribution whose tangents are all known to be zero is not computed.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax

from .._ground import callable_name, trace_state_clean
from ..show import is_traced
from ..trees import split
from ._captured import captured
from ._custom_derivatives import SymbolicZero, as_jax, call_with_jvp
from ._hoisting import HoistedCall, hoist
from ._rules import (
    Rule,
    alive,
    check_same_out,
    matched,
    pair,
    put_arrays,
    refuse_differentiated,
    spec_of,
    zero_for,
)
from ._transformed import Transformed, check_callable, wrap

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Callable[..., Any])

_KEYWORD = "pass it by position: keyword arguments are never differentiated; or apply \
`jax.lax.stop_gradient` to it"


class _CustomJvp(Transformed[P, T]):
    """What `filter_custom_jvp` returns."""

    rule: Rule

    @overload
    def def_jvp(self, rule: R, *, symbolic_zeros: bool = False) -> R: ...
    @overload
    def def_jvp(self, *, symbolic_zeros: bool = False) -> Callable[[R], R]: ...
    def def_jvp(self, rule: Any = None, *, symbolic_zeros: bool = False) -> Any:
        """Sets the rule of the function. Use it as a decorator, with or without options.

        Args:
            rule: called as `rule(primals, tangents, **kwargs)`; returns `(out, tangent_out)`. See
                `filter_custom_jvp`.
            symbolic_zeros: whether the rule is given `ZeroTangent` for tangents that are zero, rather
                than arrays of zeros.

        Returns:
            The rule.

        Raises:
            TypeError: if the rule cannot be called.
            ValueError: if the function already has a rule.
        """
        return self.rule.give(self.fn, rule, symbolic_zeros)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        rule = self.rule.get(self.fn)
        if trace_state_clean():
            return self.fn(*args, **kwargs)
        of_rule, make_rule = captured(rule, is_traced)
        call, outside, arrays = hoist(self.fn, args, kwargs)
        core = _Core(call, make_rule, len(split(args)[0]), self.rule.symbolic_zeros)
        fn = core.function(callable_name(self.fn))
        out, out_rest = call_with_jvp(
            fn, core.derivative, outside, of_rule, arrays, may_check=True, has_own_rule=True
        )
        return out_rest.fill(out)


class _Core:
    """One call, as JAX sees it: `run(outside, of_rule, arrays)` and its derivative.

    Holds no array: JAX keeps it for as long as the program that it becomes part of.

    Args:
        call: the call.
        rule: makes the rule from what it captures.
        positional: the number of arrays that belong to positional arguments.
        symbolic_zeros: whether the rule is given `ZeroTangent`.
    """

    def __init__(self, call: HoistedCall, rule: Any, positional: int, symbolic_zeros: bool):
        self.call = call
        self.rule = rule
        self.positional = positional
        self.symbolic_zeros = symbolic_zeros
        # What the function returned when JAX last called it, as shapes.
        self.out: Any = None

    def function(self, name: str) -> Callable[..., Any]:
        def run(outside: list[Any], of_rule: list[Any], arrays: list[Any]) -> Any:
            out = self.call(outside, [*map(as_jax, arrays)])
            self.out = spec_of(out)
            return split(out)

        run.__name__ = run.__qualname__ = name
        return run

    def derivative(self, primals: Any, tangents: Any) -> Any:
        (outside, of_rule, arrays), (outside_dots, _, dots) = primals, tangents
        arrays = [*map(as_jax, arrays)]
        contributions = []
        if any(alive(outside_dots)):
            contributions.append(self.by_captured(outside, outside_dots, arrays))
        if any(alive(dots)):
            contributions.append(self.by_rule(outside, of_rule, arrays, dots))
        # Without contributions, only what the rule captures has tangents at this level.
        out = contributions[-1][0] if contributions else split(self.call(outside, arrays))
        total = [
            functools.reduce(_sum, of_leaf, SymbolicZero.from_primal_value(x))
            for x, *of_leaf in zip(out[0], *(dots for _, dots in contributions), strict=True)
        ]
        return out, (total, out[1])

    def by_captured(self, outside: list[Any], dots: list[Any], arrays: list[Any]) -> Any:
        """The output, and the tangents that come from what the function captures."""
        moving = [i for i, is_alive in enumerate(alive(dots)) if is_alive]

        def run(chosen: list[Any]) -> Any:
            values = list(outside)
            for i, x in zip(moving, chosen, strict=True):
                values[i] = x
            return split(self.call(values, arrays))

        at, along = ([as_jax(values[i]) for i in moving] for values in (outside, dots))
        out, (out_dots, _) = jax.jvp(run, (at,), (along,))
        return out, [t if a else None for t, a in zip(out_dots, alive(out_dots), strict=True)]

    def by_rule(
        self, outside: list[Any], of_rule: list[Any], arrays: list[Any], dots: list[Any]
    ) -> Any:
        """The output, and the tangents that come from the arrays of the call."""
        fn, rule, rest = self.call.function(outside), self.rule(of_rule), self.call.rest(outside)
        is_alive = alive(dots)
        keywords = [a and i >= self.positional for i, a in enumerate(is_alive)]
        refuse_differentiated(fn, rest, keywords, _KEYWORD)
        given = [
            as_jax(t) if a else zero_for(x, self.symbolic_zeros)
            for x, t, a in zip(arrays, dots, is_alive, strict=True)
        ]
        _, args, kwargs = rest.fill(arrays)
        returned = rule(args, put_arrays(rest, given)[1], **kwargs)
        out, tangent_out = pair(returned, rule, "(out, tangent_out)")
        if self.out is not None:
            check_same_out(fn, rule, self.out, spec_of(out))
        return split(out), matched("tangent_out", rule, out, tangent_out)


def _sum(total: Any, tangent: Any) -> Any:
    if tangent is None:
        return total
    return tangent if isinstance(total, SymbolicZero) else total + tangent


def filter_custom_jvp(fn: Callable[P, T]) -> _CustomJvp[P, T]:
    """Gives a function its own rule for derivatives, in forward and in reverse mode.

    Use it as a decorator of functions or methods, and define the rule with `def_jvp`. Arguments and
    results may be any Python objects. The function and the rule may close over traced values: the
    derivative with respect to what the function closes over is the ordinary one.

    The rule is called as `rule(primals, tangents, **kwargs)`:

    * `primals` are the positional arguments (of a method, the object comes first).
    * `tangents` have the same structure. For an array that is not differentiated the tangent is
      zeros (for integers or bools, weakly typed zeros of its shape), so that a rule need not
      distinguish; for a PRNG key, and for everything that is not an array, it is None. With
      `def_jvp(symbolic_zeros=True)` those zeros are `ZeroTangent(shape, dtype)`, which lets a rule
      skip work.
    * `kwargs` are the keyword arguments. They are never differentiated.

    It returns `(out, tangent_out)`. `out` is the result of the function; under `jit` that is checked.
    `tangent_out` has the same structure, with None or a `ZeroTangent` for a zero tangent, and None for
    a leaf that is not an array. It must be linear in `tangents`.

    Args:
        fn: the function.

    Returns:
        A function of the same arguments with the same results. Its method `def_jvp` sets the rule, once,
        and returns it.

    Raises:
        TypeError: if `fn` cannot be called; when called, if there is no rule, or if a result of the rule
            does not fit in structure, shape or dtype.
        ValueError: if a keyword argument is differentiated.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.transforms import filter_custom_jvp
        >>> @filter_custom_jvp
        ... def norm(x):
        ...     return jnp.sqrt(jnp.sum(x**2))
        >>> @norm.def_jvp
        ... def norm_jvp(primals, tangents):
        ...     (x,), (x_dot,) = primals, tangents
        ...     out = norm(x)
        ...     return out, jnp.sum(x * x_dot) / jnp.where(out == 0, 1, out)
        >>> jax.grad(norm)(jnp.zeros(2))
        Array([0., 0.], dtype=float32)
    """
    check_callable(fn, "filter_custom_jvp")
    return wrap(_CustomJvp(fn, Rule("def_jvp")))
