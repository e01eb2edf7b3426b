"""The engine of checkpointed loops: one loop for forward and reverse mode, in any order.

**The difficulty.** `jax.lax.while_loop` has a derivative in forward mode only; `jax.custom_vjp` would give it one
in reverse mode only. We want both, and derivatives of derivatives, without a second implementation for each
combination.

**The plan.** A loop is a function `run` of its inputs `z` (constants, initial carry, buffers, scanned arrays). Two
functions have rules, and everything else follows:

- `run(z)` is a plain loop. Its derivative along `dz` is, forward, `run` of the loop that carries tangents along
  (`_augmented`). Its transpose is `_pull`, from the checkpoints that `save` collected. `linear_call` pairs the two,
  and JAX takes the one that it needs.
- `_pull(z, saved, ct)` gives `J(z)^T ct`. Since `<l, J(z)^T ct> = <J(z) l, ct>`, its derivatives are derivatives of
  `run` in forward mode followed by reverse mode, in both directions: the order in which steps are taken need not be
  differentiated. So the rules call each other, and every order of differentiation ends in plain loops.

**What holds.** Only perturbed arrays have tangents and cotangents (`which`, found by a fixpoint over the carry).
What `save` collects is an aid, not a function of `z`: its tangents are zero, because all derivatives are accounted
for in `z`. None of the functions holds an array.

Glossary: `z` the inputs; `which` marks the inputs, and `spread` the outputs (and the carry in between), that
have a tangent; `seeds` are the inputs that have one from the start; `saved` is what the backward pass starts from.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._ground import weak_like
from ..primitives import local_linear_call
from ..transforms import call_with_jvp, chosen, is_zero, replaced, zeros_like
from ._bounded import DEFAULT_BASE, scans
from ._linear import CALLBACK, computed_again, linear_in
from ._machines import (
    Backward,
    Forward,
    Inputs,
    Loop,
    Outputs,
    Saved,
    space_for_states,
    stacked_space,
)
from ._perturbation import differentiable
from ._plan import MOST_STEPS, make_plan
from ._schedule import fill, sweep
from ._spread import Spread, spread_of


def checkpointed(
    cond: Callable[..., Any] | None,
    step: Callable[..., Any],
    consts: Sequence[Any],
    carry: Sequence[Any],
    buffers: Sequence[Any],
    xs: Sequence[Any],
    *,
    max_steps: int | None,
    length: int | None,
    checkpoints: int | None,
    one_way: bool = False,
    once_only: bool = False,
) -> tuple[list[Any], list[Any], list[Any]]:
    """A loop that is differentiable in forward and reverse mode, with few states in memory.

    Args:
        cond: `cond(consts, carry, buffers, index)`, a scalar bool: whether to take another step; None
            for a scan.
        step: `step(consts, carry, buffers, index, x, replay)`, returns `carry, buffers, y`. With
            `replay` the buffers have their final contents, which it leaves unchanged; it only writes
            tangents. Like `cond` it holds no array. Under `vmap` it leaves an element unchanged for
            which `cond` does not hold.
        consts: arrays that every step sees.
        carry: arrays that a step is given and returns.
        buffers: arrays whose entries are written once at most, and read after that.
        xs: arrays with a leading axis, of which a step sees one entry. Only in a scan.
        max_steps: the greatest number of steps, or None.
        length: the number of steps of a scan.
        checkpoints: how many states are kept for reverse mode; None for the default.
        one_way: whether a step has a derivative in reverse mode only.
        once_only: whether a step has effects and must not be computed again.

    Returns:
        The final carry, the final buffers, and the stacked results of a scan's steps.
    """
    if any(isinstance(x, jax.Ref) for x in consts):
        raise computed_again("checkpointed", "reads or writes a `jax.Ref`")
    z = Inputs(*[[jnp.asarray(x) for x in part] for part in (consts, carry, buffers, xs)])
    max_steps = length if cond is None else max_steps
    state_bytes = sum(x.size * x.dtype.itemsize for x in z.carry)
    # The size is unknown if it is symbolic, in a program for export.
    known = state_bytes if isinstance(state_bytes, int) else None
    plan = make_plan(max_steps, checkpoints, known)
    loop = Loop(cond, step, max_steps, plan, one_way, once_only)
    if max_steps == 0:
        return z.carry, z.buffers, stacked_space(loop, z)
    out = _run(loop, z)
    return out.carry, out.buffers, out.ys


def _run(loop: Loop, z: Inputs) -> Outputs:
    """The loop, differentiable."""

    def checkpointed_loop(z: Inputs) -> Outputs:
        machine = Forward(loop, z)
        state = z.carry, z.buffers, stacked_space(loop, z)
        start = jnp.int32(0), state
        end = lax.while_loop(
            lambda run: machine.going(*run),
            lambda run: (run[0] + 1, machine.step(*run)),
            start,
        )
        return Outputs(*end[1])

    def rule(primals: Any, tangents: Any) -> Any:
        if loop.once_only:
            raise computed_again("checkpointed", CALLBACK)
        out, saved = _save(loop, primals[0])
        return out, _push(loop, primals[0], saved, out, tangents[0])

    is_linear = linear_in(loop.cond, loop.step)
    return call_with_jvp(checkpointed_loop, rule, z, is_linear=is_linear)


def _save(loop: Loop, z: Inputs) -> tuple[Outputs, Saved]:
    """The loop, and what the backward pass starts from."""

    def save(z: Inputs) -> tuple[Outputs, Saved]:
        machine = Forward(loop, z)
        state = z.carry, z.buffers, stacked_space(loop, z)
        slots = space_for_states(loop.plan, z.carry)
        end, filled = fill(machine, loop.plan, state, slots, jnp.int32(0))
        out = Outputs(*end)
        return out, Saved(filled, out.buffers)

    def rule(primals: Any, tangents: Any) -> Any:
        out, saved = _save(loop, primals[0])
        if loop.one_way:
            dots = _derivative_of_pass(loop, primals[0], tangents[0])
        else:
            dots = _push(loop, primals[0], saved, out, tangents[0])
        return (out, saved), (dots, jax.tree.map(SymbolicZero.from_primal_value, saved))

    return call_with_jvp(save, rule, z)


def _push(loop: Loop, z: Inputs, saved: Saved, out: Outputs, tangents: Inputs) -> Outputs:
    """The tangents of the outputs."""
    marks = [not isinstance(dot, SymbolicZero) for dot in tangents.flat]
    spread = spread_of(loop.step, z, z.like(marks))

    def forward(residuals: Any, dots: list[Any]) -> list[Any]:
        return _tangents(loop, spread, residuals[0], dots)

    def transposed(residuals: Any, cotangents: list[Any]) -> list[Any]:
        z, saved = residuals
        cts = [None if is_zero(ct) else ct for ct in cotangents]
        return _pull(loop, spread, z, saved, cts)

    dots = local_linear_call(forward, transposed, (z, saved), chosen(tangents.flat, marks))
    zeros = [SymbolicZero.from_primal_value(x) for x in out.flat]
    return out.like(replaced(zeros, spread.out.flat, dots))


def _tangents(loop: Loop, spread: Spread, z: Inputs, dots: Sequence[Any]) -> list[Any]:
    """The tangents of the perturbed outputs, from the loop that carries them along."""
    marks = zip(z.flat, spread.which.flat, spread.seeds.flat, strict=True)
    # A part of the carry that becomes perturbed on the way starts with a tangent of zero.
    full = [zeros_like(x) if which and not seed else None for x, which, seed in marks]
    full = z.like(replaced(full, spread.seeds.flat, dots))
    with_dots = zip(z, full, spread.which, strict=True)
    both = Inputs(*[[*x, *chosen(dots, which)] for x, dots, which in with_dots])
    out = _run(_augmented(loop, spread), both)
    return [dot for part, marks in zip(out, spread.out, strict=True) for dot in part[len(marks) :]]


def _augmented(loop: Loop, spread: Spread) -> Loop:
    """The loop that carries tangents along: each list is followed by the tangents of its perturbed
    members."""
    which = spread.which
    lengths = [len(marks) for marks in which]

    def cond(consts: Any, carry: Any, buffers: Any, index: Any) -> Any:
        assert loop.cond is not None
        parts = zip((consts, carry, buffers), lengths[:3], strict=True)
        return loop.cond(*[part[:n] for part, n in parts], index)

    def step(consts: Any, carry: Any, buffers: Any, index: Any, x: Any, replay: bool) -> Any:
        parts = list(zip((consts, carry, buffers, x), lengths, strict=True))
        point = Inputs(*[part[:n] for part, n in parts])
        dots = [dot for part, n in parts for dot in part[n:]]

        def of_chosen(*new: Any) -> Outputs:
            consts, carry, buffers, x = point.put(which, new)
            return Outputs(*loop.step(consts, carry, buffers, index, x, replay))

        out, out_dots = jax.jvp(of_chosen, tuple(chosen(point.flat, which.flat)), tuple(dots))
        with_dots = zip(out, out_dots, spread.out, strict=True)
        return tuple([*x, *chosen(dots, marks)] for x, dots, marks in with_dots)

    return loop._replace(cond=None if loop.cond is None else cond, step=step)


def _pull(
    loop: Loop, spread: Spread, z: Inputs, saved: Saved, cotangents: Sequence[Any]
) -> list[Any]:
    """The cotangents of the seeds, from those of the perturbed outputs (None for zero)."""
    present = [ct is not None for ct in cotangents]
    seeds, which = spread.seeds.flat, spread.which
    of_seeds = list(map(jax.typeof, chosen(z.flat, seeds)))

    def checkpointed_pullback(z: Inputs, saved: Saved, cts: list[Any]) -> list[Any]:
        cotangents = replaced([None] * len(present), present, cts)
        given = Outputs(*[[None] * sum(marks) for marks in spread.out]).like(cotangents)
        parts = zip(z._replace(buffers=saved.buffers), which, strict=True)
        zeros = Inputs(*[[zeros_like(x) for x in chosen(part, marks)] for part, marks in parts])
        start = zeros._replace(
            carry=_or_zeros(given.carry, zeros.carry),
            buffers=_or_zeros(given.buffers, zeros.buffers),
        )
        machine = Backward(loop, z, (which, spread.out), saved.buffers, given.ys)
        end = sweep(machine, loop.plan, saved.filled, start)
        # Weakly typed where the inputs are, like JAX's own gradients.
        return list(map(weak_like, chosen(end.flat, chosen(seeds, which.flat)), of_seeds))

    def rule(primals: Any, tangents: Any) -> Any:
        if loop.one_way:
            return _derivative_of_pullback(loop, spread, present, primals, tangents)
        z, _, cts = primals
        moved = z.like([not isinstance(dot, SymbolicZero) for dot in tangents[0].flat])
        moved_cts = [not isinstance(dot, SymbolicZero) for dot in tangents[2]]

        def outputs(z: Inputs) -> list[Any]:
            return chosen(chosen(_run(loop, z).flat, spread.out.flat), present)

        def forward(residuals: Any, dots: Any) -> list[Any]:
            (z, cts), (dots, ct_dots) = residuals, dots
            ct_dots = replaced([zeros_like(ct) for ct in cts], moved_cts, ct_dots)
            _, back = _pullback(lambda z: _along(outputs, z, moved, dots), z, spread.seeds)
            return list(back((ct_dots, cts)))

        def transposed(residuals: Any, cotangents: list[Any]) -> Any:
            z, cts = residuals
            zeros = [zeros_like(x) for x in chosen(z.flat, seeds)]
            dots = [x if is_zero(ct) else ct for ct, x in zip(cotangents, zeros, strict=True)]
            out, back = _pullback(lambda z: _along(outputs, z, spread.seeds, dots)[1], z, moved)
            return list(back(cts)), chosen(out, moved_cts)

        dots = chosen(tangents[0].flat, moved.flat), chosen(tangents[2], moved_cts)
        out = call_with_jvp(
            checkpointed_pullback, rule, *primals, is_linear=is_linear, replays=True
        )
        return out, local_linear_call(forward, transposed, (z, cts), dots)

    def is_linear(z: Inputs, saved: Saved, cts: list[Any], *marks: Any) -> bool:
        return not any(jax.tree.leaves(marks[:2]))

    given = z, saved, chosen(cotangents, present)
    return call_with_jvp(checkpointed_pullback, rule, *given, is_linear=is_linear, replays=True)


# A step may have a derivative in reverse mode only, and then cannot carry tangents along. To differentiate such a loop
# again, it is run as nested scans, which JAX differentiates to any order.


def _derivative_of_pass(loop: Loop, z: Inputs, tangents: Inputs) -> Outputs:
    """The tangents of the outputs of `save`, in which every step runs by its rule already."""
    moved = [not isinstance(dot, SymbolicZero) for dot in tangents.flat]
    marks = z.like([differentiable(x) for x in z.flat])

    def outputs(*new: Any) -> Outputs:
        return _pullback(lambda z: _plain(loop, z), z.put(z.like(moved), new), marks)[0]

    return jax.jvp(outputs, tuple(chosen(z.flat, moved)), tuple(chosen(tangents.flat, moved)))[1]


def _derivative_of_pullback(
    loop: Loop, spread: Spread, present: list[bool], primals: Any, tangents: Any
) -> Any:
    """`pull` and its tangents."""
    (z, _, cts), (z_dots, _, ct_dots) = primals, tangents
    flat, dots = [*z.flat, *cts], [*z_dots.flat, *ct_dots]
    moved = [not isinstance(dot, SymbolicZero) for dot in dots]

    def pull(*new: Any) -> list[Any]:
        values = replaced(flat, moved, new)
        z_new, cts_new = z.like(values[: len(z.flat)]), values[len(z.flat) :]

        def outputs(z: Inputs) -> list[Any]:
            return chosen(chosen(_plain(loop, z).flat, spread.out.flat), present)

        return list(_pullback(outputs, z_new, spread.seeds)[1](cts_new))

    return jax.jvp(pull, tuple(chosen(flat, moved)), tuple(chosen(dots, moved)))


def _plain(loop: Loop, z: Inputs) -> Outputs:
    """The loop, made of loops that JAX can differentiate."""
    if loop.cond is not None:
        if loop.max_steps is None:
            # Four levels: more take long to compile.
            return scans(loop.cond, loop.step, z, MOST_STEPS, 256)
        return scans(loop.cond, loop.step, z, loop.max_steps, DEFAULT_BASE)

    def body(state: Any, x: Any) -> Any:
        (carry, buffers), (index, x) = state, x
        carry, buffers, y = loop.step(z.consts, carry, buffers, index, x, False)
        return (carry, buffers), y

    xs = jnp.arange(loop.max_steps, dtype=jnp.int32), z.xs
    body = jax.checkpoint(body, prevent_cse=False)
    (carry, buffers), ys = lax.scan(body, (z.carry, z.buffers), xs)
    return Outputs(carry, buffers, ys)


def _or_zeros(cotangents: Sequence[Any], zeros: Sequence[Any]) -> list[Any]:
    return [x if ct is None else ct for ct, x in zip(cotangents, zeros, strict=True)]


def _pullback(fn: Any, z: Inputs, which: Inputs) -> tuple[Any, Any]:
    """`fn(z)`, and its pullback with respect to the members that `which` marks."""
    return jax.vjp(lambda *new: fn(z.put(which, new)), *chosen(z.flat, which.flat))


def _along(fn: Any, z: Inputs, which: Inputs, dots: Sequence[Any]) -> tuple[Any, Any]:
    """`fn(z)` and its tangent along `dots`, the tangents of the members that `which` marks."""
    return jax.jvp(
        lambda *new: fn(z.put(which, new)), tuple(chosen(z.flat, which.flat)), tuple(dots)
    )
