"""Vernal's operations, and how they are mapped and written into programs.

An operation has rules: what it computes, its abstract evaluation, its derivative, its transpose.
Mapped over an axis it is another operation, whose rules are the mapped rules of the first:

    compute      vmap of compute
    abstract     one more axis on every result
    jvp          vmap of jvp; what is known to be zero stays known
    transpose    vmap of transpose, summed over the axis for an argument without that axis

So mapping needs no rule of its own, and mapping twice repeats the same step. `_Rules` are the rules
of an operation as given, `_Mapped` those of an operation mapped once more. One primitive, `vprim`,
has the mapped ones as its parameter. Results of a mapped operation have the mapped axis first.
Integer results that do not depend on anything mapped have no such axis: a loop counts its steps once
for a whole batch, and looks up the same location for all of it.

Code that reads a program must see the programs inside its operations. So a `vprim` that is written
into a program holds the program of what it computes (`_Written`): a user's function is traced once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer, eval_jaxpr

from .._ground import (
    Primitive,
    UndefinedPrimal,
    Zero,
    cached_weakly,
    close_jaxpr,
    convert_constvars_jaxpr,
    custom_partial_eval_rules,
    custom_staging_rules,
    fancy_primitive_batchers,
    lower_fun,
    mapped_aval,
    primitive_jvps,
    primitive_transposes,
    register_lowering,
    unmapped_aval,
)
from ..show import short, value_error
from ._dependence import depending
from ._placement import unmapped_gathered, zeros_of
from ._traits import Traits


@dataclasses.dataclass(frozen=True, eq=False)
class _Rules:
    """The rules of an operation, in JAX's own conventions: `Zero` is a tangent or cotangent known to be
    zero, `UndefinedPrimal` an argument to transpose with respect to.

    Args:
        name: the name of the operation.
        compute: `(*arrays) -> arrays`.
        abstract: `(*avals) -> (avals, effects)`.
        jvp: `(primals, tangents) -> (arrays, tangents)`.
        transpose: `(cotangents, *args) -> cotangents`.
        traits: what is known of it.
    """

    name: str
    compute: Callable[..., Any]
    abstract: Callable[..., Any]
    jvp: Callable[..., Any]
    transpose: Callable[..., Any]
    traits: Traits = Traits()

    def given(self, params: dict[str, Any]) -> "_Rules":
        """The rules for these parameters."""
        compute, abstract, jvp, transpose = (
            functools.partial(rule, **params)
            for rule in (self.compute, self.abstract, self.jvp, self.transpose)
        )
        return _Rules(self.name, compute, abstract, jvp, transpose, self.traits)


@cached_weakly
class _Mapped:
    """The rules of an operation mapped over one axis.

    Args:
        rules: the rules of the operation that is mapped, perhaps already mapped.
        axis: the mapped axis: its name, size and mesh axes.
        dims: for every argument, the position of the axis, or None.
    """

    def __init__(self, rules: Any, axis: Any, dims: Sequence[int | None]):
        self.name = f"vmap({rules.name})"
        self.traits: Traits = rules.traits
        self._rules = rules
        self._axis = axis
        self._dims = list(dims)
        # Which results have the mapped axis: known once they have been computed.
        self.is_mapped: list[bool] | None = None

    def __repr__(self) -> str:
        return self.name

    def _vmap(self, fn: Callable[..., Any], dims: Sequence[int | None]) -> Callable[..., Any]:
        axis = self._axis
        return jax.vmap(
            fn,
            in_axes=tuple(dims),
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )

    def compute(self, *args: Any) -> Sequence[Any]:
        shared: list[Any] = []

        def compute_one(*args: Any) -> list[Any]:
            return _shared_p.bind(*self._rules.compute(*args), shared=shared)

        return self._results(self._vmap(compute_one, self._dims)(*args), shared)

    def _results(self, mapped: Sequence[Any], shared: Sequence[Any]) -> list[Any]:
        """The results; those that are the same for the whole batch come without the axis, if a rule gave it to them."""
        if self.is_mapped is None:
            self.is_mapped = [x is None or jnp.issubdtype(x.dtype, jnp.inexact) for x in shared]
        results = zip(mapped, shared, self.is_mapped, strict=True)
        return [m if is_mapped else m[0] if x is None else x for m, x, is_mapped in results]

    def abstract(self, *avals: Any) -> tuple[Sequence[Any], Any]:
        one = [self._one(aval, dim) for aval, dim in zip(avals, self._dims, strict=True)]
        out, effects = self._rules.abstract(*one)
        if self.is_mapped is None:
            self.is_mapped = [True] * len(out)
        results = zip(out, self.is_mapped, strict=True)
        return [self._many(aval) if is_mapped else aval for aval, is_mapped in results], effects

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        live = [i for i, t in enumerate(tangents) if not isinstance(t, Zero)]
        live_out: list[int] = []
        shared: list[Any] = []

        def jvp_of_one(*args: Any) -> tuple[list[Any], list[Any]]:
            primals, given = args[: len(self._dims)], args[len(self._dims) :]
            dots = [Zero(jax.typeof(x).to_tangent_aval()) for x in primals]
            for i, t in zip(live, given, strict=True):
                dots[i] = t
            out, out_dots = self._rules.jvp(primals, dots)
            live_out[:] = [i for i, t in enumerate(out_dots) if not isinstance(t, Zero)]
            return _shared_p.bind(*out, shared=shared), [out_dots[i] for i in live_out]

        dims = [*self._dims, *(self._dims[i] for i in live)]
        out, given = self._vmap(jvp_of_one, dims)(*primals, *(tangents[i] for i in live))
        out = self._results(out, shared)
        out_dots: list[Any] = [Zero(jax.typeof(x).to_tangent_aval()) for x in out]
        for i, t in zip(live_out, given, strict=True):
            out_dots[i] = t
        return out, out_dots

    def transpose(self, cotangents: Any, *args: Any) -> list[Any]:
        wanted = [i for i, x in enumerate(args) if isinstance(x, UndefinedPrimal)]
        known = [i for i, x in enumerate(args) if not isinstance(x, UndefinedPrimal)]
        live = [i for i, ct in enumerate(cotangents) if not isinstance(ct, Zero)]
        live_out: list[int] = []

        def transpose_of_one(*values: Any) -> list[Any]:
            one: list[Any] = [None] * len(args)
            cts = [
                Zero(self._one(ct.aval, 0 if is_mapped else None)) if isinstance(ct, Zero) else ct
                for ct, is_mapped in zip(cotangents, self.is_mapped or [], strict=True)
            ]
            for i, x in zip(known, values[: len(known)], strict=True):
                one[i] = x
            for i, ct in zip(live, values[len(known) :], strict=True):
                cts[i] = ct
            for i in wanted:
                one[i] = UndefinedPrimal(self._one(args[i].aval, self._dims[i]))
            out = self._rules.transpose(cts, *one)
            live_out[:] = [i for i in wanted if not (out[i] is None or isinstance(out[i], Zero))]
            return [out[i] for i in live_out]

        dims = [*(self._dims[i] for i in known), *(0 for _ in live)]
        values = [*(args[i] for i in known), *(cotangents[i] for i in live)]
        given = self._vmap(transpose_of_one, dims)(*values)
        out: list[Any] = [None] * len(args)
        for i in wanted:
            out[i] = Zero(args[i].aval.to_ct_aval())
        for i, ct in zip(live_out, given, strict=True):
            dim = self._dims[i]
            out[i] = jnp.sum(ct, axis=0) if dim is None else jnp.moveaxis(ct, 0, dim)
        return out

    def _one(self, aval: Any, dim: int | None) -> Any:
        return aval if dim is None else mapped_aval(self._axis.size, dim, aval)

    def _many(self, aval: Any) -> Any:
        return unmapped_aval(self._axis.size, 0, aval, self._axis.explicit_mesh_axis)


def define(
    name: str,
    compute: Callable[..., Any],
    abstract: Callable[..., Any],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    replays: bool = False,
) -> Any:
    """Defines a new operation from four rules.

    Args:
        name: its name in a jaxpr.
        compute: `(*arrays, **params) -> arrays`.
        abstract: `(*avals, **params) -> (avals, effects)`.
        jvp: `(primals, tangents, **params) -> (arrays, tangents)`, where `Zero` stands for zero.
        transpose: `(cotangents, *args, **params) -> cotangents`, None for an argument without one.
        replays: whether it repeats what another operation has computed.

    Returns:
        The primitive.
    """
    rules = _Rules(name, compute, abstract, jvp, transpose, Traits(replays=replays))
    primitive = _primitive(rules)

    def batch(axis: Any, args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
        if all(dim is None for dim in dims):
            return _unmapped(primitive.bind(*args, **params))
        return _map(rules.given(params), axis, args, dims)

    fancy_primitive_batchers[primitive] = batch
    defined[primitive] = rules
    return primitive


# The operations that `define` has made.
defined: dict[Any, _Rules] = {}


def _primitive(rules: _Rules) -> Any:
    primitive = Primitive(rules.name)
    primitive.multiple_results = True
    primitive.def_impl(rules.compute)
    primitive.def_effectful_abstract_eval(rules.abstract)
    primitive_jvps[primitive] = rules.jvp
    primitive_transposes[primitive] = rules.transpose
    register_lowering(primitive, lower_fun(rules.compute, multiple_results=True))
    return primitive


@cached_weakly
class _Written:
    """The rules of an operation in a program.

    Args:
        rules: the rules of the operation.
        program: the program of what it computes. Its first arguments are what it reads from outside.
        count: the number of those arguments.
    """

    def __init__(self, rules: Any, program: Any, count: int):
        self.name = rules.name
        self.traits: Traits = rules.traits
        self._rules = rules
        self._program = program
        self._count = count

    def __repr__(self) -> str:
        return self.name

    def compute(self, *args: Any) -> Sequence[Any]:
        return eval_jaxpr(self._program.jaxpr, self._program.consts, *args)

    def abstract(self, *avals: Any) -> tuple[Sequence[Any], Any]:
        del avals
        return self._program.out_avals, self._program.effects

    def jvp(self, primals: Any, tangents: Any) -> tuple[Any, Any]:
        n = self._count
        if not all(isinstance(t, Zero) for t in tangents[:n]):
            raise value_error(
                f"`{self.name}` has a custom derivative, which ignores a differentiated value that it reads",
                where=f"`{self.name}`",
                expected="differentiated values that are arguments, or that its functions close over",
                got=f"a derivative with respect to {_first_moving(primals, tangents)}, which it reads "
                "from a global variable or from an object",
                instead="pass the value as an argument",
            )
        if not n:
            return self._rules.jvp(primals, tangents)
        return self._rules.jvp(primals[n:], tangents[n:])

    def transpose(self, cotangents: Any, *args: Any) -> list[Any]:
        n = self._count
        return [None] * n + list(self._rules.transpose(cotangents, *args[n:]))


def _first_moving(primals: Any, tangents: Any) -> str:
    return next(short(x) for x, t in zip(primals, tangents, strict=False) if type(t) is not Zero)


def _note_shared(axis: Any, args: Any, dims: Any, shared: list[Any]) -> tuple[Any, Any]:
    del axis
    shared[:] = [x if dim is None else None for x, dim in zip(args, dims, strict=True)]
    return args, dims


# The identity; under `vmap` it records which of its values are not mapped.
_shared_p = Primitive("shared")
_shared_p.multiple_results = True
fancy_primitive_batchers[_shared_p] = _note_shared


def _map(rules: Any, axis: Any, args: Any, dims: Any) -> tuple[Any, list[int | None]]:
    args = unmapped_gathered(axis, args, dims)
    mapped = _Mapped(rules, axis, dims)
    out = vprim_p.bind(*args, rules=mapped)
    assert mapped.is_mapped is not None
    return out, [0 if is_mapped else None for is_mapped in mapped.is_mapped]


def _unmapped(out: Any) -> tuple[Any, list[None]]:
    return out, [None] * len(out)


def _batch_again(
    axis: Any, args: Any, dims: Any, rules: Any, program: Any = None
) -> tuple[Any, Any]:
    if all(dim is None for dim in dims) and not _uses(axis, args, rules, program):
        return _unmapped(vprim_p.bind(*args, rules=rules, program=program))
    return _map(rules, axis, args, dims)


def _uses(axis: Any, args: Any, rules: Any, program: Any) -> bool:
    """Whether an operation uses the mapped axis by name, as collectives do."""
    if program is None:
        effects = rules.abstract(*map(jax.typeof, args))[1]
    else:
        effects = program.effects
    return any(getattr(effect, "name", None) == axis.name for effect in effects)


vprim_p = _primitive(
    _Rules(
        "vprim",
        compute=lambda *args, rules, program=None: rules.compute(*args),
        abstract=lambda *avals, rules, program=None: rules.abstract(*avals),
        jvp=lambda primals, tangents, rules, program=None: rules.jvp(primals, tangents),
        transpose=lambda cotangents, *args, rules, program=None: rules.transpose(cotangents, *args),
    )
)
fancy_primitive_batchers[vprim_p] = _batch_again
# JAX 0.12 asks this in `shard_map` if the program has a high-level primitive (`jnp.searchsorted`), lowered elsewhere.
vprim_p.is_high = lambda *avals, **params: False


def _write(trace: Any, source: Any, *tracers: Any, rules: Any, program: Any = None) -> Any:
    """Writes a `vprim` into the program of a trace."""
    if program is None and rules.traits.is_written:
        closed = jax.make_jaxpr(lambda *args: list(rules.compute(*args)))(
            *[t.aval for t in tracers]
        )
        read = closed.consts if any(isinstance(x, Tracer) for x in closed.consts) else []
        if read:
            closed = close_jaxpr(convert_constvars_jaxpr(closed.jaxpr))
        rules, program = _Written(rules, closed, len(read)), closed
        tracers = (*[trace.to_jaxpr_tracer(x, source) for x in read], *tracers)
    params = {"rules": rules, "program": program}
    return trace.default_process_primitive(vprim_p, tracers, params, source)


custom_staging_rules[vprim_p] = _write


def _split(trace: Any, *tracers: Any, rules: Any, program: Any = None) -> Any:
    """Finds the results that are known if only some arguments are.

    JAX splits a derivative into what is known and what depends on tangents. In a user's rule a loop may carry a value
    and its tangent. Then the loop runs twice: for the known part, with zeros for the tangents, which it does not depend
    on; and, once the tangents are known, for the rest.
    """
    params = {"rules": rules, "program": program}
    out = trace.default_process_primitive(vprim_p, tracers, params)
    unknown = [not t.is_known() for t in tracers]
    if not rules.traits.splits or not any(unknown) or all(unknown):
        return out
    if program is None:
        compute = lambda *args: list(rules.compute(*args))  # noqa: E731
        program = jax.make_jaxpr(compute)(*[t.aval for t in tracers])
    depends = depending(rules, program, [t.aval for t in tracers], unknown)
    if all(depends):
        return out
    values = [
        zeros_of(t.aval) if x else t.pval.get_known() for t, x in zip(tracers, unknown, strict=True)
    ]
    known = vprim_p.bind(*values, **params)
    return [x if late else y for x, y, late in zip(out, known, depends, strict=True)]


custom_partial_eval_rules[vprim_p] = _split
