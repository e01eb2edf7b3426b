"""`filter_custom_vjp`: a function with its own rule for reverse-mode derivatives.

As in `_custom_jvp.py`, everything traced that the function and its rules capture becomes an argument
of what JAX sees. Here the rule is for the first argument only. What the function captures is
differentiated as usual, by computing the function a second time when the gradient needs it; what the
rules capture is constant.
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax

from .._ground import Zero, callable_name, instantiate_zeros, trace_state_clean
from ..show import is_traced, type_error
from ..trees import Rest, split
from ._captured import captured
from ._custom_derivatives import (
    SymbolicZero,
    as_jax,
    call_with_jvp,
    chosen,
    is_inexact,
    linear_by_transpose,
    replaced,
)
from ._hoisting import HoistedCall, flatten_hoisted, hoist
from ._rules import (
    Rule,
    alive,
    check_same_out,
    matched,
    pair,
    put_arrays,
    refuse_differentiated,
    spec_of,
)
from ._transformed import Transformed, check_callable, wrap
from ._zeros import ZeroTangent

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Callable[..., Any])

_FIRST = "put what is differentiated into the first argument, as a tuple; or apply \
`jax.lax.stop_gradient` to the others"


class _CustomVjp(Transformed[P, T]):
    """What `filter_custom_vjp` returns."""

    fwd: Rule
    bwd: Rule

    @overload
    def def_fwd(self, fwd: R) -> R: ...
    @overload
    def def_fwd(self) -> Callable[[R], R]: ...
    def def_fwd(self, fwd: Any = None) -> Any:
        """Sets the rule for the forward pass. Use it as a decorator.

        Args:
            fwd: called as `fwd(perturbed, vjp_arg, *args, **kwargs)`; returns `(out, residuals)`.
                See `filter_custom_vjp`.

        Returns:
            The rule.

        Raises:
            TypeError: if the rule cannot be called.
            ValueError: if the function already has one.
        """
        return self.fwd.give(self.fn, fwd, False)

    @overload
    def def_bwd(self, bwd: R, *, symbolic_zeros: bool = False) -> R: ...
    @overload
    def def_bwd(self, *, symbolic_zeros: bool = False) -> Callable[[R], R]: ...
    def def_bwd(self, bwd: Any = None, *, symbolic_zeros: bool = False) -> Any:
        """Sets the rule for the backward pass. Use it as a decorator, with or without options.

        Args:
            bwd: called as `bwd(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs)`; returns
                the gradient with respect to `vjp_arg`. See `filter_custom_vjp`.
            symbolic_zeros: whether the rule is given `ZeroTangent` for gradients of unused outputs,
                rather than arrays of zeros.

        Returns:
            The rule.

        Raises:
            TypeError: if the rule cannot be called.
            ValueError: if the function already has one.
        """
        return self.bwd.give(self.fn, bwd, symbolic_zeros)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        fwd, bwd = self.fwd.get(self.fn), self.bwd.get(self.fn)
        if not args:
            raise type_error(
                f"`{callable_name(self.fn)}` was called without a positional argument",
                where=f"the call of `{callable_name(self.fn)}`",
                expected="the differentiated argument, by position",
                got="keyword arguments only" if kwargs else "no arguments",
                instead=f"{callable_name(self.fn)}(x, ...)",
            )
        if trace_state_clean():
            return self.fn(*args, **kwargs)
        (of_fwd, make_fwd), (of_bwd, make_bwd) = (captured(f, is_traced) for f in (fwd, bwd))
        call, outside, arrays = hoist(self.fn, args, kwargs)
        first = len(split(args[0])[0])
        core = _Core(call, make_fwd, make_bwd, first, self.bwd.symbolic_zeros)
        fn = core.function(callable_name(self.fn))
        out, out_rest = call_with_jvp(
            fn,
            core.derivative,
            outside,
            of_fwd,
            of_bwd,
            arrays,
            one_way=True,
            may_check=True,
            has_own_rule=True,
        )
        return out_rest.fill(out)


class _Core:
    """One call, as JAX sees it: `run(outside, of_fwd, of_bwd, arrays)` and its derivative.

    Holds no array: JAX keeps it for as long as the program that it becomes part of.

    Args:
        call: the call.
        fwd: makes the forward rule from what it captures.
        bwd: makes the backward rule from what it captures.
        first: the number of arrays that belong to the first argument.
        symbolic_zeros: whether the backward rule is given `ZeroTangent`.
    """

    def __init__(self, call: HoistedCall, fwd: Any, bwd: Any, first: int, symbolic_zeros: bool):
        self.call = call
        self.fwd = fwd
        self.bwd = bwd
        self.first = first
        self.symbolic_zeros = symbolic_zeros
        # What the function returned when JAX last called it, as shapes.
        self.out: Any = None

    def function(self, name: str) -> Callable[..., Any]:
        def run(outside: Any, of_fwd: Any, of_bwd: Any, arrays: Any) -> Any:
            out = self.call(outside, [*map(as_jax, arrays)])
            self.out = spec_of(out)
            return split(out)

        run.__name__ = run.__qualname__ = name
        return run

    def derivative(self, primals: Any, tangents: Any) -> Any:
        """The output and its tangent, whose transpose is the backward rule."""
        outside, of_fwd, of_bwd, arrays = primals
        of_outside, flags = (
            [a and is_inexact(x) for a, x in zip(alive(dots), values, strict=True)]
            for dots, values in ((tangents[0], outside), (tangents[3], arrays))
        )
        fn, rest = self.call.function(outside), self.call.rest(outside)
        others = [f and i >= self.first for i, f in enumerate(flags)]
        refuse_differentiated(fn, rest, others, _FIRST)
        kept = None
        if any(flags):
            fwd = self.fwd(of_fwd)
            _, args, kwargs = rest.fill(arrays)
            returned = fwd(_perturbed(rest, flags), *args, **kwargs)
            result, kept = pair(returned, fwd, "(out, residuals)")
            if self.out is not None:
                check_same_out(fn, fwd, self.out, spec_of(result))
        else:
            result = self.call(outside, arrays)
        out, out_rest = split(result)
        out = [*map(as_jax, out)]
        values, hidden, rest_of = flatten_hoisted(kept)
        inputs = outside, of_bwd, arrays, values, hidden
        lengths = [*map(len, inputs)]
        moves = [is_inexact(x) for x in out]

        def back(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            left = iter(residuals)
            outside, of_bwd, arrays, values, hidden = (
                [next(left) for _ in range(n)] for n in lengths
            )
            cts = replaced(no_cotangents, moves, cotangents)
            found: list[Any] = []
            if any(of_outside):
                found += self.by_captured(outside, of_outside, arrays, cotangents)
            if any(flags):
                bwd, rest = self.bwd(of_bwd), self.call.rest(outside)
                grad_out = put_arrays(out_rest, [_cotangent(ct, self.symbolic_zeros) for ct in cts])
                _, args, kwargs = rest.fill(arrays)
                kept = rest_of(hidden).fill(values)
                gradient = bwd(kept, grad_out, _perturbed(rest, flags), *args, **kwargs)
                found += chosen(matched("gradient", bwd, args[0], gradient), flags[: self.first])
            return found

        zeros = [SymbolicZero.from_primal_value(x) for x in out]
        dots = [*chosen(tangents[0], of_outside), *chosen(tangents[3], flags)]
        if not dots:
            # Only what the rules capture has tangents at this level.
            return (out, out_rest), (zeros, out_rest)
        no_cotangents = [None] * len(out)
        types = [jax.typeof(x).to_tangent_aval() for x in chosen(out, moves)]
        residuals = [as_jax(x) for part in inputs for x in part]
        found = linear_by_transpose(callable_name(fn), back, residuals, dots, types)
        return (out, out_rest), (replaced(zeros, moves, found), out_rest)

    def by_captured(
        self, outside: list[Any], flags: Sequence[bool], arrays: list[Any], cts: Sequence[Any]
    ) -> list[Any]:
        """The gradient with respect to what the function captures."""

        def run(new: list[Any]) -> list[Any]:
            return [
                x
                for x in split(self.call(replaced(outside, flags, new), arrays))[0]
                if is_inexact(x)
            ]

        pullback = jax.vjp(run, chosen(outside, flags))[1]
        return pullback([_cotangent(ct, False) for ct in cts])[0]


def _perturbed(rest: Rest, flags: Sequence[bool]) -> Any:
    """The flags of the arrays as a tree like the first argument, False for every other leaf."""
    left = iter(flags)
    return rest.treedef.unflatten([m and next(left) for m in rest.mask])[1][0]


def _cotangent(ct: Any, symbolic: bool) -> Any:
    """A cotangent in the form that a rule is given; None for an output without cotangents."""
    if not isinstance(ct, Zero):
        return ct
    aval: Any = ct.aval
    return ZeroTangent(aval.shape, aval.dtype) if symbolic else instantiate_zeros(ct)


def filter_custom_vjp(fn: Callable[P, T]) -> _CustomVjp[P, T]:
    """Gives a function its own rule for derivatives in reverse mode.

    Use it as a decorator of functions or methods, and define the two halves of the rule with
    `def_fwd` and `def_bwd`. Arguments and results may be any Python objects. The rule is for the
    first argument, `vjp_arg`, which may be any tree (of a method, it is the object); the others must
    not be differentiated. The function and the rule may close over traced values: the derivative with
    respect to what the function closes over is the ordinary one. The function cannot be differentiated
    in forward mode; use `filter_custom_jvp` for both modes.

    `fwd(perturbed, vjp_arg, *args, **kwargs)` returns `(out, residuals)`:

    * `perturbed` is a tree like `vjp_arg`, with True for the arrays that are differentiated, and
      False for all other leaves.
    * `out` is the result of the function; under `jit` that is checked.
    * `residuals` may be any tree of any Python objects.

    `bwd(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs)` returns the gradient:

    * `grad_out` is a tree like `out`, with the gradient of every floating-point array, and None
      for everything else. The gradient of an unused array is zeros, or a `ZeroTangent` with
      `def_bwd(symbolic_zeros=True)`.
    * The gradient is a tree like `vjp_arg`, with None for every leaf that is not a floating-point
      array. Elsewhere None or a `ZeroTangent` stands for zero, also for a whole subtree. Inside
      `jax.shard_map` the gradient of an array that is the same on all devices may be the same on all
      devices too, or each device's part of it: then the parts are added.

    Args:
        fn: the function.

    Returns:
        A function of the same arguments with the same results. Its methods `def_fwd` and `def_bwd` each
        set a rule, once, and return it.

    Raises:
        TypeError: if `fn` cannot be called; when called, if a rule is missing, if there is no
            positional argument, or if a result of a rule does not fit in structure, shape or dtype.
        ValueError: if any argument but the first is differentiated; in `jax.shard_map`, if gradients would be added
            over devices, and some results differ between devices while a result in use does not.
        TypeError: in forward mode.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.transforms import filter_custom_vjp
        >>> @filter_custom_vjp
        ... def clip_gradient(x, limit):
        ...     return x
        >>> @clip_gradient.def_fwd
        ... def clip_gradient_fwd(perturbed, x, limit):
        ...     return x, None
        >>> @clip_gradient.def_bwd
        ... def clip_gradient_bwd(residuals, grad_out, perturbed, x, limit):
        ...     return jnp.clip(grad_out, -limit, limit)
        >>> jax.grad(lambda x: 3.0 * clip_gradient(x, 1.0))(2.0)
        Array(1., dtype=float32, weak_type=True)
    """
    check_callable(fn, "filter_custom_vjp")
    return wrap(_CustomVjp(fn, Rule("def_fwd"), Rule("def_bwd")))
