"""JAX's transformations for functions of arbitrary Python objects."""

from .._ground import publish
from ._axes import if_array as if_array
from ._batch import filter_vmap as filter_vmap
from ._callbacks import filter_debug_callback as filter_debug_callback
from ._callbacks import filter_io_callback as filter_io_callback
from ._callbacks import filter_pure_callback as filter_pure_callback
from ._captured import Recipe, captured
from ._closures import closure_to_pytree as closure_to_pytree
from ._closures import filter_closure_convert as filter_closure_convert
from ._custom_derivatives import call_with_jvp, chosen, linear_by_transpose, replaced
from ._custom_jvp import filter_custom_jvp as filter_custom_jvp
from ._custom_vjp import filter_custom_vjp as filter_custom_vjp
from ._devices import filter_shard as filter_shard
from ._devices import filter_shard_map as filter_shard_map
from ._explain import Trace as Trace
from ._explain import Watch as Watch
from ._explain import guard_traces, traces_of, watch_traces
from ._gradients import filter_grad as filter_grad
from ._gradients import filter_value_and_grad as filter_value_and_grad
from ._jacobians import filter_hessian as filter_hessian
from ._jacobians import filter_jacfwd as filter_jacfwd
from ._jacobians import filter_jacrev as filter_jacrev
from ._jit import filter_jit as filter_jit
from ._kept_rules import keep_rules
from ._known_operations import one_way, program_of, traits_of
from ._linear import filter_jvp as filter_jvp
from ._linear import filter_vjp as filter_vjp
from ._lowered import Compiled as Compiled
from ._lowered import Lowered as Lowered
from ._operations import define, vprim_p
from ._place import here, place_of_equation
from ._placement import (
    axis_names,
    entries_without,
    explicit_mesh,
    gathered,
    placed_like,
    split_over,
    summed_like,
    unmapped_gathered,
    varying_alike,
    varying_axes,
    varying_over,
)
from ._placement import zeros_like as zeros_like
from ._pmap import filter_pmap as filter_pmap
from ._poison import poison
from ._remat import filter_checkpoint as filter_checkpoint
from ._returned import check_hides_nothing
from ._runtime_check import awaited, batch_text, check, check_p, fail_if, without_checks
from ._settled import settled as settled
from ._shapes import filter_eval_shape as filter_eval_shape
from ._shapes import filter_make_jaxpr as filter_make_jaxpr
from ._signatures import Difference as Difference
from ._signatures import Signature, signature_of_call
from ._summed_losses import refuse_sum_over_devices
from ._traced_shapes import TracedShapeError as TracedShapeError
from ._transformed import Transformed, call_inside, check_callable
from ._zeros import ZeroTangent as ZeroTangent
from ._zeros import is_zero as is_zero
from ._zeros import materialise as materialise

publish(__name__, globals())
