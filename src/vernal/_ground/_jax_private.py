"""The only module that imports private JAX. Every name below says why it is needed and what retires it.

A name that is also in `jax.extend` is imported from its original module: importing `jax.extend` takes
a fifth of the time of importing Vernal.
"""

import contextlib
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax

# A new setting that compiled programs depend on. Retired by: any JAX version with a public way to declare one.
# The operations that finalisation opens, and finding the programs inside of an operation.
# Present in JAX 0.10.2 to 0.12. Retired by: no version; this is how jaxprs are read.
from jax._src import (
    config,  # JAX 0.10.2 to 0.12
    core,  # JAX 0.10.2 to 0.12
)
from jax._src.ad_checkpoint import name_p as name_p  # JAX 0.10.2 to 0.12
from jax._src.ad_checkpoint import remat_p as remat_p  # JAX 0.10.2 to 0.12
from jax._src.ad_util import stop_gradient_p as stop_gradient_p  # JAX 0.10.2 to 0.12

# The class of arrays that hold values: `type(x) is ArrayImpl` takes a tenth of the time of
# `isinstance(x, jax.Array)`, and is evaluated for every argument of every call. Present in JAX 0.10.2
# to 0.12. Retired by: a public name of it.
from jax._src.array import ArrayImpl as ArrayImpl

# The class of new operations. Present in JAX 0.10.2 to 0.12. Retired by: any JAX version in which a
# `jax.experimental.hijax` primitive has rules for batching, jvp and transposition on all of 0.10.2
# to the newest (hijax changed in each).
from jax._src.core import Primitive as Primitive
from jax._src.core import jaxprs_in_params as jaxprs_in_params  # JAX 0.10.2 to 0.12

# Removing and adding a batch axis of an abstract value, its sharding included: the abstract
# evaluation of an operation under vmap. Present in JAX 0.10.2 to 0.12. Retired by: as Primitive.
from jax._src.core import mapped_aval as mapped_aval
from jax._src.core import pvary_p as pvary_p  # JAX 0.10.2 to 0.12

# The programs inside a program, to look for checks. Present in JAX 0.10.2 to 0.12. Retired by: a
# public walk over a jaxpr.
from jax._src.core import subjaxprs as subjaxprs

# Whether no trace is active, so that no tracer is alive that a cache could keep. Present in JAX 0.10.2
# to 0.12. Retired by: any JAX version that makes it public (jax.core had it until 0.10).
from jax._src.core import trace_state_clean as trace_state_clean
from jax._src.core import unmapped_aval as unmapped_aval  # JAX 0.10.2 to 0.12
from jax._src.custom_derivatives import custom_jvp_call_p as custom_jvp_call_p  # JAX 0.10.2 to 0.12
from jax._src.custom_derivatives import custom_vjp_call_p as custom_vjp_call_p  # JAX 0.10.2 to 0.12

# The tokens that JAX waits for when Python exits and in `jax.effects_barrier`. A failed program stays
# among them, and its error would be raised again. Present in JAX 0.10.2 to 0.12. Retired by: any JAX
# version that forgets a failed program once its error has been raised.
from jax._src.dispatch import runtime_tokens as runtime_tokens

# The index of this process (the public function initialises the devices), the address of process 0, and
# the key-value store that processes share. Present in JAX 0.10.2 to 0.12. Retired by: any JAX version
# with a public store in `jax.distributed`.
from jax._src.distributed import global_state

# The effects that `jax.checkpoint` may have twice, such as printing. Present in JAX 0.10.2 to 0.12. Retired by: any JAX
# version with a public name for them.
from jax._src.effects import remat_allowed_effects

# The module whose functions run while JAX makes a program. Present in JAX 0.10.2 to 0.12. Retired by: any JAX version
# with a public way to learn where the innermost trace began.
from jax._src.interpreters import partial_eval

# A program without constants as the parameter of an operation (a jaxpr that is closed, on JAX 0.10).
# Present in JAX 0.10.2 to 0.12. Retired by: any JAX version without open jaxprs, 0.12 among them.
from jax._src.interpreters.partial_eval import close_jaxpr as close_jaxpr

# A program whose constants are its first arguments, so that keeping the program does not keep the
# constants (from JAX 0.12 a jaxpr holds them). Present in JAX 0.10.2 to 0.12. Retired by: any JAX
# version with a public way to take the constants out.
from jax._src.interpreters.partial_eval import convert_constvars_jaxpr as convert_constvars_jaxpr

# The known results of an operation of which only some arguments are known. Present in JAX 0.10.2 to 0.12.
# Retired by: as Primitive.
from jax._src.interpreters.partial_eval import (
    custom_partial_eval_rules as custom_partial_eval_rules,  # JAX 0.10.2 to 0.12
)

# The form of an operation in a program: with it, the program holds the operations of the functions
# that the operation calls. Present in JAX 0.10.2 to 0.12. Retired by: as Primitive.
from jax._src.interpreters.partial_eval import custom_staging_rules as custom_staging_rules

# Which arguments of a program some of its results use. Present in JAX 0.10.2 to 0.12. Retired by: as Primitive.
from jax._src.interpreters.partial_eval import dce_jaxpr as dce_jaxpr

# Which results of a program depend on unknown arguments. Present in JAX 0.10.2 to 0.12. Retired by: as Primitive.
from jax._src.interpreters.partial_eval import (
    partial_eval_jaxpr_nounits as partial_eval_jaxpr_nounits,  # JAX 0.10.2 to 0.12
)

# Makes a weakly typed array, as JAX's own loops do for a Python number. Present in JAX 0.10.2 to 0.12.
# Retired by: any JAX version whose public `convert_element_type` takes `weak_type`.
from jax._src.lax.lax import _convert_element_type as _convert_element_type

# The value by which an inner `jit` leaves the sharding of an argument or a result to the compiler: for
# those that are added to a program. Present in JAX 0.10.2 to 0.12. Retired by: any JAX version with a
# public way to rewrite an inner `jit`.
from jax._src.named_sharding import UNSPECIFIED as UNSPECIFIED

# Operations that do not change values, and those of `jit` and `shard_map`: operations are recognised by
# identity, not by name, because others may have the same name. Present in JAX 0.10.2 to 0.12.
# Retired by: any JAX version with these in `jax.lax`, where the others are.
from jax._src.pjit import jit_p as jit_p
from jax._src.pjit import reshard_p as reshard_p  # JAX 0.10.2 to 0.12
from jax._src.shard_map import shard_map_p as shard_map_p  # JAX 0.10.2 to 0.12

# The named scopes around an operation, and where the user wrote it: kept when a program is evaluated
# operation by operation, and read for messages. Present in JAX 0.10.2 to 0.12. Retired by: any JAX
# version whose `eval_jaxpr` takes a function to be called for each operation.
from jax._src.source_info_util import current_name_stack, user_context

# Leaves a file of ours out of the frames that `jax.debug.breakpoint` shows. Present in JAX 0.10.2
# to 0.12. Retired by: any JAX version whose breakpoint can be told which frame is the first.
from jax._src.traceback_util import register_exclusion

# The registry in which None is a leaf: flattening with it stays in C++, where `is_leaf=lambda x: x
# is None` calls Python at every node. Present in JAX 0.10.2 to 0.12. Retired by: any JAX version
# whose public tree_flatten can treat None as a leaf.
from jax._src.tree_util import none_leaf_registry

# The classes of which JAX's caches keep no object alive. Present in JAX 0.10.2 to 0.12. Retired by: any JAX
# version that does not cache the abstract evaluation of a user's operations, as of `jax.custom_vjp`'s.
from jax._src.util import weakref_cache_key_types
from jax.core import Tracer

# The derivative rules of an operation, and the values in them: a tangent known to be zero, and the
# argument that a transposition is with respect to. Present in JAX 0.10.2 to 0.12. Retired by: as
# Primitive.
from jax.interpreters.ad import UndefinedPrimal as UndefinedPrimal
from jax.interpreters.ad import Zero as Zero  # JAX 0.10.2 to 0.12
from jax.interpreters.ad import add_tangents as add_tangents  # JAX 0.10.2 to 0.12
from jax.interpreters.ad import instantiate_zeros as instantiate_zeros  # JAX 0.10.2 to 0.12
from jax.interpreters.ad import primitive_jvps as primitive_jvps  # JAX 0.10.2 to 0.12
from jax.interpreters.ad import primitive_transposes as primitive_transposes  # JAX 0.10.2 to 0.12

# Moving or adding the batch axis in front, its sharding included. Present in JAX 0.10.2 to 0.12.
# Retired by: as Primitive.
from jax.interpreters.batching import bdim_at_front

# The batching rules of operations: the registry whose rules get the mapped axis (its name, size and
# mesh axis). Present in JAX 0.10.2 to 0.12. Retired by: as Primitive.
from jax.interpreters.batching import fancy_primitive_batchers as fancy_primitive_batchers

# Calls Python from a compiled program, in a lowering rule. Unlike `jax.pure_callback` it lets us
# choose the devices that call, passes the arrays without dispatching anything (which can wait for the
# very program that is running), and logs nothing when the callback raises.
# Present in JAX 0.10.2 to 0.12. Retired by: any JAX version whose public callbacks can raise without
# logging and run on every device.
from jax.interpreters.mlir import emit_python_callback

# The lowering of an operation to the compiler. Present in JAX 0.10.2 to 0.12. Retired by: as
# Primitive.
from jax.interpreters.mlir import lower_fun as lower_fun
from jax.interpreters.mlir import register_lowering as register_lowering  # JAX 0.10.2 to 0.12

_Class = TypeVar("_Class", bound=type)


def trace_flag(name: str, help: str) -> Any:
    """A new JAX setting, off by default, that functions may read while they are traced: compiled programs are cached
    for each of its values. `flag.value` is the value, and `with flag(True)` sets it for the thread."""
    return config.bool_state(
        name=name, default=False, help=help, include_in_jit_key=True, include_in_trace_context=True
    )


def cached_weakly(cls: _Class) -> _Class:
    """A decorator of a class whose objects are parameters of operations: JAX's caches do not keep them alive."""
    weakref_cache_key_types.add(cls)
    return cls


def batch_axis_in_front(axis: Any, x: Any, dim: int | None) -> Any:
    """Moves the batch axis of an argument of a batching rule to the front, or adds one."""
    return bdim_at_front(x, dim, axis.size, mesh_axis=axis.explicit_mesh_axis)


def lower_to_python(ctx: Any, callback: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Lowers an operation to a call of Python with the arrays; in a program for several devices, each of them calls."""
    return emit_python_callback(
        ctx,
        callback,
        None,
        list(args),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=False,
        returns_token=False,
        # Not placed on one device: every device runs it.
        sharding=None,
    )[0]


def concrete_value(x: Any) -> Any:
    """The concrete array that an eager `grad`, `vmap` or `shard_map` computes with; None if there is
    only an abstract value."""
    # The attributes of their tracers. Present in JAX 0.10.2 to 0.12; if one is missing, the value
    # counts as abstract.
    while isinstance(x, Tracer):
        x = getattr(x, "primal", getattr(x, "val", None))
    return x if isinstance(x, jax.Array) else None


_programs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_number = itertools.count(1)


def current_program() -> int:
    """A number for the program (jaxpr) that is being traced, the innermost one; 0 outside of tracing."""
    # Present in JAX 0.10.2 to 0.12: a trace that writes a program has a frame, any other a parent.
    trace = core.trace_ctx.trace
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return 0 if trace is None else _programs.setdefault(trace, next(_number))


def is_of_current_trace(tracer: Any) -> bool:
    """Whether a tracer belongs to the innermost trace. Present in JAX 0.10.2 to 0.12."""
    return tracer._trace is core.trace_ctx.trace


def current_scope() -> str:
    """The named scopes (`jax.named_scope`) that the program is in, as `outer/inner`."""
    return str(current_name_stack())


@contextlib.contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """The settings (precision, mesh, ...), named scopes and place in the user's source under which an
    equation was traced."""
    stack = current_name_stack() + eqn.source_info.name_stack
    with user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def mapped_mesh_axes() -> frozenset[Any]:
    """The explicit mesh axes that the surrounding `jax.vmap`s map over: mapped arrays are sharded over them,
    though their types do not show it, and nothing inside can be sharded over them again."""
    # Present in JAX 0.10.2 to 0.12. Retired by: types under vmap that show it.
    return core.get_axis_env().explicit_mesh_axis_names


def scan_parts(params: dict[str, Any], args: Sequence[Any]) -> list[list[Any]]:
    """The arguments of a scan in three parts: constants, carry, and scanned arrays."""
    if "ft_in" in params:  # JAX 0.12
        sizes = [len(list(part)) for part in params["ft_in"].unpack()]
    else:  # JAX 0.10 and 0.11
        sizes = [params["num_consts"], params["num_carry"], len(args)]
    first, second = sizes[0], sizes[0] + sizes[1]
    return [list(args[:first]), list(args[first:second]), list(args[second:])]


def manual_devices(ctx: Any) -> int:
    """In a lowering rule: the number of devices that each run their own program inside `shard_map`; 1
    outside of it."""
    # Only the context of `shard_map` has manual axes. Present in JAX 0.10.2 to 0.12.
    context = ctx.module_context.axis_context
    return context.mesh.size if getattr(context, "manual_axes", None) else 1


def runs_alone(ctx: Any) -> bool:
    """In a lowering rule: whether the program is for one device, and for this process."""
    # Present in JAX 0.10.2 to 0.12. Only the context of `shard_map` has no `num_devices`.
    context = ctx.module_context.axis_context
    exported = ctx.module_context.lowering_parameters.for_export
    return getattr(context, "num_devices", None) == 1 and not exported


# The `inline` parameter of an inner `jit` that JAX inlines while tracing, and the parameters that it must not set.
_INLINED: Any = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)  # JAX 0.12, and before
_PLACES = ("in_shardings", "out_shardings", "in_layouts", "out_layouts")


def _is_inlined(params: dict[str, Any]) -> bool:
    """Whether JAX inlines an inner `jit` with these parameters."""
    return params["inline"] is _INLINED and all(
        {*params[name]} <= {UNSPECIFIED, None} for name in _PLACES
    )


class _KeepingCalls:
    """A wrapper of a trace that keeps the inner `jit`s that JAX would inline."""

    def __init__(self, trace: Any):
        self._trace = trace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trace, name)

    def process_primitive(self, primitive: Any, args: Any, params: Any, /) -> Any:
        if primitive is jit_p and _is_inlined(params):
            params = {**params, "inline": None}
        return self._trace.process_primitive(primitive, args, params)


def makes_a_program(frame: types.FrameType) -> bool:
    """Whether a frame is JAX's, making a program of the function that it calls."""
    return frame.f_globals is vars(partial_eval)


def keeping_calls() -> contextlib.AbstractContextManager[Any]:
    """A context for tracing a function that is evaluated afterwards: inner `jit`s that JAX would inline stay operations
    of its program, and are inlined where it is evaluated. JAX caches the derivative of an inner `jit`, but not those of
    the operations in it, which take most of the time of tracing."""
    # A trace processes every operation. Present in JAX 0.10.2 to 0.12. Retired by: any JAX version that can be told
    # not to inline.
    return core.set_current_trace(_KeepingCalls(core.trace_ctx.trace))


def is_kept_call(eqn: Any) -> bool:
    """Whether an operation is an inner `jit` that only `keeping_calls` has kept."""
    return eqn.primitive is jit_p and eqn.params["inline"] is None


def bind_kept_call(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates such an operation, inlined as JAX does it."""
    return eqn.primitive.bind(*args, **{**eqn.params, "inline": _INLINED})


# From JAX 0.12 a closed jaxpr is a jaxpr.
Jaxpr: Any = core.Jaxpr
ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)

# Its declared type allows None for attributes that are set once the processes have joined.
distributed_state: Any = global_state

flatten_none_is_leaf: Callable[[Any], tuple[list[Any], Any]] = none_leaf_registry.flatten

hide_frames: Callable[[str], None] = register_exclusion


def may_run_again(jaxpr: Any) -> bool:
    """Whether nobody notices that a program is run twice; not so if it calls `io_callback`."""
    return not remat_allowed_effects.filter_not_in(jaxpr.effects)
