"""Evaluating a program with slots: keeps the current value of every slot; `planted` reads it, `sow` replaces it.

An operation that has a program with a `planted` or `sow` inside (a loop, a branch, an inner `jit`, ...) is replaced by
one whose program takes the current values as further arguments and returns the new ones as further results; in a loop
they are part of the carry, so each step sees what the one before has sown. Every other operation is evaluated
unchanged, with all its derivative rules and settings.

Invariants: the value of a slot keeps its type, and has no derivative (the caller stops the gradient of the first
value). The evaluation inside another program has its own `Slots`, with values of that program.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._ground import (
    UNSPECIFIED,
    bind_kept_call,
    close_jaxpr,
    convert_constvars_jaxpr,
    custom_jvp_call_p,
    custom_vjp_call_p,
    equation_context,
    is_kept_call,
    jaxprs_in_params,
    jit_p,
    remat_p,
    scan_parts,
    shard_map_p,
)
from ..primitives import linear_call_p
from ..show import value_error
from ..transforms import check_p, placed_like, program_of, traits_of, vprim_p
from . import _in_rules as in_rules
from ._capture import capture_p, captures
from ._slots import Slots, Views, checks, sows, touches, unknown, unknown_capture
from ._sow import parts_of_sow, planted_p, sow_p
from ._views import View, element, follow, only_takes_parts


def evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], views: Views, slots: Slots
) -> tuple[list[Any], Views]:
    """Evaluates a program. Returns its results, and their views; `views` are those of the arguments. Updates the values
    of `slots`."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    seen = {v: view for v, view in zip(jaxpr.invars, views, strict=True) if view is not None}

    def value(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else known[atom]

    def view(atom: Any) -> Any:
        return None if hasattr(atom, "val") else seen.get(atom)

    for eqn in jaxpr.eqns:
        with equation_context(eqn):
            out, of_out = _equation(eqn, [*map(value, eqn.invars)], [*map(view, eqn.invars)], slots)
        known.update(zip(eqn.outvars, out, strict=True))
        seen.update((v, view) for v, view in zip(eqn.outvars, of_out, strict=False) if view)
    return [*map(value, jaxpr.outvars)], [*map(view, jaxpr.outvars)]


def _equation(eqn: Any, args: list[Any], views: Views, slots: Slots) -> tuple[Sequence[Any], Views]:
    """The results of one operation, and their views."""
    primitive = eqn.primitive
    if primitive is planted_p:
        view = views[0]
        if view is None:
            return args, []
        slots.read.add((view.slot, eqn.params["program"]))
        return [view.get(slots.values)], []
    if primitive is sow_p:
        return _sow(args, views, slots, **eqn.params)
    if primitive is capture_p:
        return _capture(eqn, args, slots), views
    if primitive is check_p and slots.told:
        return [_check(args, slots, **eqn.params)], []
    inside = list(jaxprs_in_params(eqn.params))
    captured = any(captures(jaxpr, slots.labels) for jaxpr in inside)
    touched = any(map(touches, inside))
    if is_kept_call(eqn):
        if captured or touched or any(views):
            closed = eqn.params["jaxpr"]
            return evaluate(closed.jaxpr, closed.consts, args, views, slots)
        return bind_kept_call(eqn, args), []
    if captured and primitive not in _CAPTURING:
        raise unknown_capture(primitive.name)
    if captured or touched:
        return _opened(eqn, args, views, slots), []
    if slots.told and (any(map(checks, inside)) or traits_of(eqn).may_check):
        # In an operation that cannot be opened, a check counts for every element, so no error is lost.
        with contextlib.suppress(NotImplementedError):
            return _opened(eqn, args, views, slots), []
    if primitive is jit_p and any(views) and only_takes_parts(eqn.params["jaxpr"].jaxpr):
        closed = eqn.params["jaxpr"]
        return evaluate(closed.jaxpr, closed.consts, args, views, slots)
    hidden = program_of(eqn) if any(views) else None
    if hidden is not None and touches(hidden):
        return _opened(eqn, args, views, slots), []
    out = primitive.bind(*args, **primitive.get_bind_params(eqn.params))
    if primitive.multiple_results:
        return list(out), []
    return [out], [follow(eqn, args, views[0])] if views and views[0] else []


def _opened(eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    rule = _RULES.get(eqn.primitive)
    if rule is None:
        raise unknown(
            f"the operation `{eqn.primitive.name}`",
            "the layer outside of it; a loop of `vernal.loops` of another kind than 'checkpointed'",
        )
    return rule(eqn, args, views, slots)


def _capture(eqn: Any, args: list[Any], slots: Slots) -> list[Any]:
    label = eqn.params["label"]
    if label not in slots.labels:
        return eqn.primitive.bind(*args, **eqn.params)
    slots.caught[label], slots.rests[label] = args, eqn.params["rest"]
    return args


def _check(args: list[Any], slots: Slots, *, loops: int, **params: Any) -> Any:
    condition, *operands = args
    if slots.active is not None:
        condition = jnp.logical_and(condition, slots.values[slots.active])
    if slots.step is not None:
        operands.append(jnp.broadcast_to(slots.values[slots.step], condition.shape))
        loops += 1
    return check_p.bind(condition, *operands, loops=loops, **params)


def _sow(
    args: list[Any], views: Views, slots: Slots, *, n: int, where: str, needed: bool, **params: Any
) -> tuple[list[Any], Views]:
    values, olds, rest = parts_of_sow(args, n)
    _, of_olds, of_rest = parts_of_sow(views, n)
    for value, old, view in zip(values, olds, of_olds, strict=True):
        if view is None and not needed:
            continue
        if view is None:
            raise value_error(
                "the old value of a state was computed, so it is not known where the new one belongs",
                where=where,
                expected="the state of the model as it is, or indexed, sliced, reshaped, transposed or cast",
                got=f"a new value for {jax.typeof(old).str_short()}, which the function computes, or `jax.vmap` of "
                "a `cond` that chooses for each element by itself",
                instead="take the layer from the model that `apply` was given. For such a `cond`: map "
                "`vernal.nn.apply` (or `reap`) as a whole, a state for each element",
            )
        slots.sown.add((view.slot, params["program"]))
        if needed:
            slots.needed.add(view.slot)
        view.put(slots.values, _as_before(value, jax.typeof(old), where))
    return rest, of_rest


def _as_before(value: Any, aval: Any, where: str) -> Any:
    """A new value, placed on the devices of the old one, without a derivative."""
    more = jax.typeof(value).manual_axis_type.varying - aval.manual_axis_type.varying
    if more:
        raise value_error(
            "the devices of `jax.shard_map` disagree about a state that they share",
            where=where,
            expected="one new value for all of them",
            got=f"one that varies over {', '.join(map(repr, sorted(more)))}",
            instead="give the layer this axis as its `axis_name`, or take `jax.lax.pmean` of the value",
        )
    return placed_like(jax.lax.stop_gradient(value), aval)


def _traced(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[Any], Any]:
    """Traces a function of lists of arrays. Returns a program that takes the constants as its first arguments, the
    constants, and the structure of the results."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*jax.tree.map(jax.typeof, args))
    program = close_jaxpr(convert_constvars_jaxpr(closed.jaxpr))
    return program, closed.consts, jax.tree.structure(shapes)


def _jit(eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    closed, used, labels = eqn.params["jaxpr"], slots.used(views), []

    def inside(values: list[Any], args: list[Any]) -> Any:
        inner = slots.inside(used, values)
        out, _ = evaluate(closed.jaxpr, closed.consts, args, views, inner)
        labels[:] = inner.caught
        return inner.of(used), [*inner.caught.values()], out

    new, consts, structure = _traced(inside, slots.of(used), args)
    params = dict(eqn.params, jaxpr=new)
    before, after = len(consts) + len(used), len(new.out_avals) - len(eqn.outvars)
    for name, more, default in (
        ("in_shardings", before, UNSPECIFIED),
        ("out_shardings", after, UNSPECIFIED),
        ("in_layouts", before, None),
        ("out_layouts", after, None),
    ):
        params[name] = (default,) * more + tuple(params[name])
    # No argument is donated: one may be a slot, which is read as well.
    params["donated_invars"] = (False,) * (before + len(args))
    results = eqn.primitive.bind(*consts, *slots.of(used), *args, **params)
    values, caught, out = jax.tree.unflatten(structure, results)
    slots.update(used, values)
    slots.catch(labels, caught)
    return out


def _checkpoint(eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    if eqn.params["differentiated"] and touches(eqn.params["jaxpr"]):
        raise unknown(
            "`jax.checkpoint` that is differentiated inside of the function: it would be computed twice",
            "the derivative outside of `vernal.nn.apply`, or no checkpoint",
        )
    used, labels = slots.used(views), []

    def inside(values: list[Any], args: list[Any]) -> Any:
        inner = slots.inside(used, values)
        out, _ = evaluate(eqn.params["jaxpr"], (), args, views, inner)
        labels[:] = inner.caught
        return inner.of(used), [*inner.caught.values()], out

    new, consts, structure = _traced(inside, slots.of(used), args)
    params = dict(eqn.params, jaxpr=new.jaxpr)
    if isinstance(params["prevent_cse"], tuple):
        more = (False,) * (len(consts) + len(used))
        params["prevent_cse"] = (*more, *params["prevent_cse"])
    results = eqn.primitive.bind(*consts, *slots.of(used), *args, **params)
    values, caught, out = jax.tree.unflatten(structure, results)
    slots.update(used, values)
    slots.catch(labels, caught)
    return out


def _unchanged(views: Views, before: Sequence[Any], after: Sequence[Any]) -> Views:
    """The views of a carry: an entry that the step passes on unchanged keeps its view."""
    return [view if a is b else None for view, a, b in zip(views, before, after, strict=True)]


def _scan(eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    params, closed = eqn.params, eqn.params["jaxpr"]
    consts, init, xs = scan_parts(params, args)
    of_consts, of_init, of_xs = scan_parts(params, views)
    n, used, last = len(init), slots.used(views), params["length"] - 1
    before = scan_parts(params, closed.jaxpr.invars)[1]
    of_carry = _unchanged(of_init, before, closed.jaxpr.outvars[:n])
    labels = []

    def step(carry: Any, x: list[Any]) -> Any:
        i, values, carry = carry
        place = last - i if params["reverse"] else i
        of_x = [view and element(view, place) for view in of_xs]
        inner = slots.inside_loop(used, values)
        args, of_args = [*consts, *carry, *x], [*of_consts, *of_carry, *of_x]
        out, _ = evaluate(closed.jaxpr, closed.consts, args, of_args, inner)
        slots.leave_loop(inner)
        labels[:] = inner.caught
        return (i + 1, inner.of(used), out[:n]), (out[n:], [*inner.caught.values()])

    (_, values, carry), (ys, caught) = jax.lax.scan(
        step,
        (jnp.zeros((), jnp.int32), slots.of(used), init),
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    slots.update(used, values)
    slots.catch(labels, caught)
    return [*carry, *ys]


def _while(eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    params, cond, body = eqn.params, eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    if cond.out_avals[0].shape:
        raise unknown(
            "a `while_loop` that `jax.vmap` maps, with another number of steps for each element",
            "`jax.vmap` of `vernal.nn.apply` as a whole",
        )
    if sows(cond.jaxpr):
        raise unknown("the condition of a `while_loop`", "the layer in its body")
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    used = slots.used(views)
    of_carry = _unchanged(
        views[second:], body.jaxpr.invars[params["body_nconsts"] :], body.jaxpr.outvars
    )

    def run(closed: Any, own: slice, carry: Any) -> Any:
        values, carry = carry
        inner = slots.inside_loop(used, values)
        of_args = [*views[own], *of_carry]
        out, _ = evaluate(closed.jaxpr, closed.consts, [*args[own], *carry], of_args, inner)
        slots.leave_loop(inner)
        return inner.of(used), out

    values, carry = jax.lax.while_loop(
        lambda carry: run(cond, slice(first), carry)[1][0],
        lambda carry: run(body, slice(first, second), carry),
        (slots.of(used), args[second:]),
    )
    slots.update(used, values)
    return carry


def _cond(eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    if eqn.params.keys() > {"branches"}:
        raise unknown("`jax.lax.platform_dependent`", "the layer outside of it")
    used = slots.used(views)

    def branch(closed: Any) -> Callable[..., Any]:
        def inside(values: list[Any], *args: Any) -> Any:
            inner = slots.inside(used, values)
            out, _ = evaluate(closed.jaxpr, closed.consts, args, views[1:], inner)
            return inner.of(used), out

        return inside

    index, *operands = args
    branches = [branch(closed) for closed in eqn.params["branches"]]
    values, out = jax.lax.switch(index, branches, slots.of(used), *operands)
    slots.update(used, values)
    return out


def _shard_map(eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    """Each device has only parts of the arrays, so every argument that is part of a slot becomes its own slot."""
    params = eqn.params
    parts = {v: view for v, view in zip(eqn.invars, views, strict=True) if view}
    if len(slots.used(views)) < len(parts):
        raise unknown("`jax.shard_map`, in two parts at once", "the whole state as an argument")
    specs = [params["in_specs"][eqn.invars.index(v)] for v in parts]
    numbers = {v: View(i) for i, v in enumerate(parts)}
    of_args = [
        None if view is None else numbers[v] for v, view in zip(eqn.invars, views, strict=True)
    ]

    outer = [view.slot for view in parts.values()]

    def inside(values: list[Any], *args: Any) -> Any:
        inner = Slots(values)
        out, _ = evaluate(params["jaxpr"], (), args, of_args, inner)
        slots.read |= {(outer[i], program) for i, program in inner.read}
        slots.sown |= {(outer[i], program) for i, program in inner.sown}
        slots.needed |= {outer[i] for i in inner.needed}
        return inner.values, out

    values, out = jax.shard_map(
        inside,
        mesh=params["mesh"],
        in_specs=(specs, *params["in_specs"]),
        out_specs=(specs, list(params["out_specs"])),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )([view.get(slots.values) for view in parts.values()], *args)
    for view, value in zip(parts.values(), values, strict=True):
        view.put(slots.values, value)
    return out


def _custom_jvp(eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    if traits_of(eqn).transposed:
        return in_rules.by_transpose(evaluate, eqn, args, slots)
    return in_rules.custom_jvp(evaluate, eqn, args, views, slots)


def _custom_vjp(eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    return in_rules.custom_vjp(evaluate, eqn, args, views, slots)


def _linear_call(eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    return in_rules.linear(evaluate, eqn, args, views, slots)


_RULES: dict[Any, Callable[[Any, list[Any], Views, Slots], list[Any]]] = {
    jax.lax.cond_p: _cond,
    custom_jvp_call_p: _custom_jvp,
    custom_vjp_call_p: _custom_vjp,
    jit_p: _jit,
    linear_call_p: _linear_call,
    remat_p: _checkpoint,
    jax.lax.scan_p: _scan,
    shard_map_p: _shard_map,
    vprim_p: _custom_jvp,
    jax.lax.while_p: _while,
}
# Operations that run their program a known number of times, so that captured values can be results.
_CAPTURING = {jit_p, remat_p, jax.lax.scan_p}
