"""`filter_custom_vjp`: a function with its own rule for reverse-mode derivatives.

As in `_custom_jvp.py`, everything traced that the function and its rules capture is made an
argument of what JAX sees. Here the rule is for the first argument only; what the function captures is differentiated
as usual, by a second computation of the function when the gradient asks for it; what the rules
capture are values.
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from .._ground import callable_name, trace_state_clean
from ..show import is_traced, type_error
from ..trees import Rest, split
from ._captured import captured
from ._hoisting import HoistedCall, hoist
from ._residuals import Residuals
from ._rules import (
    Rule,
    alive,
    as_jax,
    check_same_out,
    is_inexact,
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
        """Gives the function the rule for the way forward. Use it as a decorator.

        Args:
            fwd: called as `fwd(perturbed, vjp_arg, *args, **kwargs)`; returns `(out, residuals)`.
                See `filter_custom_vjp`.

        Returns:
            The rule.

        Raises:
            TypeError: if the rule cannot be called.
            ValueError: if the function has one already.
        """
        return self.fwd.give(self.fn, fwd, False)

    @overload
    def def_bwd(self, bwd: R, *, symbolic_zeros: bool = False) -> R: ...
    @overload
    def def_bwd(self, *, symbolic_zeros: bool = False) -> Callable[[R], R]: ...
    def def_bwd(self, bwd: Any = None, *, symbolic_zeros: bool = False) -> Any:
        """Gives the function the rule for the way back. Use it as a decorator, with or without
        options.

        Args:
            bwd: called as `bwd(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs)`; returns
                the gradient with respect to `vjp_arg`. See `filter_custom_vjp`.
            symbolic_zeros: whether gradients of outputs that are not used arrive as `ZeroTangent`
                rather than as arrays of zeros.

        Returns:
            The rule.

        Raises:
            TypeError: if the rule cannot be called.
            ValueError: if the function has one already.
        """
        return self.bwd.give(self.fn, bwd, symbolic_zeros)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        fwd, bwd = self.fwd.get(self.fn), self.bwd.get(self.fn)
        if not args:
            raise type_error(
                f"`{callable_name(self.fn)}` is called without a positional argument",
                where=f"the call of `{callable_name(self.fn)}`",
                expected="the argument that is differentiated, by position",
                got="keyword arguments only" if kwargs else "no arguments",
                instead=f"{callable_name(self.fn)}(x, ...)",
            )
        if trace_state_clean():
            return self.fn(*args, **kwargs)
        (of_fwd, make_fwd), (of_bwd, make_bwd) = (captured(f, is_traced) for f in (fwd, bwd))
        call, outside, arrays = hoist(self.fn, args, kwargs)
        first = len(split(args[0])[0])
        core = _Core(call, make_fwd, make_bwd, first, self.bwd.symbolic_zeros)
        run = jax.custom_vjp(core.function(callable_name(self.fn)))
        run.defvjp(core.forward, core.backward, symbolic_zeros=True)
        out, out_rest = run(outside, of_fwd, of_bwd, arrays)
        return out_rest.fill(out)


class _Core:
    """One call, as JAX sees it: `run(outside, of_fwd, of_bwd, arrays)` and its two rules.

    Holds no array: JAX keeps it for as long as the program that it becomes part of.

    Args:
        call: the call.
        fwd: makes the rule for the way forward from what it captures.
        bwd: makes the rule for the way back from what it captures.
        first: how many of the arrays belong to the first argument.
        symbolic_zeros: what the rule for the way back asks for.
    """

    def __init__(self, call: HoistedCall, fwd: Any, bwd: Any, first: int, symbolic_zeros: bool):
        self.call = call
        self.fwd = fwd
        self.bwd = bwd
        self.first = first
        self.symbolic_zeros = symbolic_zeros
        self.residuals = Residuals()
        # What the function returned when JAX last called it, as shapes.
        self.out: Any = None

    def function(self, name: str) -> Callable[..., Any]:
        def run(outside: Any, of_fwd: Any, of_bwd: Any, arrays: Any) -> Any:
            out = self.call(outside, [*map(as_jax, arrays)])
            self.out = spec_of(out)
            return split(out)

        run.__name__ = run.__qualname__ = name
        return run

    def forward(self, *inputs: Any) -> Any:
        """The output, and all that `backward` needs."""
        outside, of_fwd, of_bwd, arrays = ([as_jax(p.value) for p in part] for part in inputs)
        of_outside, flags = (
            [p.perturbed and is_inexact(x) for p, x in zip(part, values, strict=True)]
            for part, values in ((inputs[0], outside), (inputs[3], arrays))
        )
        fn, rest = self.call.function(outside), self.call.rest(outside)
        others = [f and i >= self.first for i, f in enumerate(flags)]
        refuse_differentiated(fn, rest, others, _FIRST)
        residuals = None
        if any(flags):
            fwd = self.fwd(of_fwd)
            _, args, kwargs = rest.fill(arrays)
            returned = fwd(_perturbed(rest, flags), *args, **kwargs)
            out, residuals = pair(returned, fwd, "(out, residuals)")
            if self.out is not None:
                check_same_out(fn, fwd, self.out, spec_of(out))
        else:
            out = self.call(outside, arrays)
        again = self.out is not None
        saved = [*outside, *of_bwd, *arrays]
        kept = self.residuals.pack(residuals, (flags, of_outside), saved, again)
        return split(out), (kept, outside, of_bwd, arrays)

    def backward(self, kept: Any, cotangents: Any) -> Any:
        """The gradients of all inputs."""
        leaves, outside, of_bwd, arrays = kept
        inputs = [*outside, *of_bwd, *arrays]
        residuals, (flags, of_outside) = self.residuals.unpack(leaves, inputs)
        cts, out_rest = cotangents
        gradient = of_captured = None
        if any(flags):
            bwd, rest = self.bwd(of_bwd), self.call.rest(outside)
            grad_out = put_arrays(out_rest, [_cotangent(ct, self.symbolic_zeros) for ct in cts])
            _, args, kwargs = rest.fill(arrays)
            found = bwd(residuals, grad_out, _perturbed(rest, flags), *args, **kwargs)
            gradient = matched("gradient", bwd, args[0], found)
            gradient += [None] * (len(arrays) - self.first)
        if any(of_outside):
            of_captured = self.by_captured(outside, of_outside, arrays, cts)
        return of_captured, None, None, gradient

    def by_captured(
        self, outside: list[Any], flags: Sequence[bool], arrays: list[Any], cts: list[Any]
    ) -> list[Any]:
        """The gradient with respect to what the function captures."""

        def run(chosen: list[Any]) -> list[Any]:
            left = iter(chosen)
            values = [next(left) if f else x for x, f in zip(outside, flags, strict=True)]
            return [x for x in split(self.call(values, arrays))[0] if is_inexact(x)]

        pullback = jax.vjp(run, [x for x, f in zip(outside, flags, strict=True) if f])[1]
        given = (_cotangent(ct, False) for ct in cts)
        (found,) = pullback([ct for ct in given if ct is not None])
        left = iter(found)
        return [next(left) if f else None for f in flags]


def _perturbed(rest: Rest, flags: Sequence[bool]) -> Any:
    """The flags of the arrays as a tree like the first argument, False for what is no array."""
    left = iter(flags)
    return rest.treedef.unflatten([m and next(left) for m in rest.mask])[1][0]


def _cotangent(ct: Any, symbolic: bool) -> Any:
    """A cotangent as a rule is given it; None for an output that can have none."""
    if ct.dtype == jax.dtypes.float0:
        return None
    if any(alive([ct])):
        return ct
    return ZeroTangent(ct.shape, ct.dtype) if symbolic else jnp.zeros_like(ct)


def filter_custom_vjp(fn: Callable[P, T]) -> _CustomVjp[P, T]:
    """Gives a function its own rule for derivatives in reverse mode.

    Use it as a decorator of functions or methods, and define the two halves of the rule with
    `def_fwd` and `def_bwd`. Arguments and results may be any Python objects. The rule is for the
    first argument, `vjp_arg`, which may be any tree (of a method, it is the object); the others must
    not be differentiated. Whatever the function and the rule close over may be traced: the
    derivative with respect to what the function closes over is the ordinary one. In forward mode
    the function cannot be differentiated; `filter_custom_jvp` serves both.

    `fwd(perturbed, vjp_arg, *args, **kwargs)` returns `(out, residuals)`:

    * `perturbed` is a tree like `vjp_arg`, with True for the arrays that are differentiated, and
      False for all other leaves.
    * `out` is what the function returns. Under `jit` that is checked.
    * `residuals` may be any tree of any Python objects.

    `bwd(residuals, grad_out, perturbed, vjp_arg, *args, **kwargs)` returns the gradient:

    * `grad_out` is a tree like `out`, with the gradient of every floating-point array, and None
      for everything else. That of an array which is not used is zeros, or a `ZeroTangent` with
      `def_bwd(symbolic_zeros=True)`.
    * The gradient is a tree like `vjp_arg`, with None in place of what is not a floating-point
      array. None, or a `ZeroTangent`, stands for zero elsewhere, also for a whole subtree.

    Args:
        fn: the function.

    Returns:
        A function of the same arguments with the same results, and with the methods `def_fwd` and
        `def_bwd`, which return the rule. Each can be given once.

    Raises:
        TypeError: if `fn` cannot be called; when called, if a rule is missing, if there is no
            positional argument, or if a rule returns what does not fit in structure, shape or dtype.
        ValueError: if any other argument than the first is differentiated.

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
