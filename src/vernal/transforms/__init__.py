"""JAX's transformations for functions of arbitrary Python objects."""

from .._ground import publish
from ._axes import if_array as if_array
from ._batch import filter_vmap as filter_vmap
from ._branches import filter_cond as filter_cond
from ._branches import filter_switch as filter_switch
from ._callbacks import filter_debug_callback as filter_debug_callback
from ._callbacks import filter_io_callback as filter_io_callback
from ._callbacks import filter_pure_callback as filter_pure_callback
from ._captured import Recipe as Recipe
from ._captured import captured as captured
from ._closures import closure_to_pytree as closure_to_pytree
from ._closures import filter_closure_convert as filter_closure_convert
from ._closures import trace_closure as trace_closure
from ._custom_jvp import filter_custom_jvp as filter_custom_jvp
from ._custom_vjp import filter_custom_vjp as filter_custom_vjp
from ._devices import filter_shard as filter_shard
from ._devices import filter_shard_map as filter_shard_map
from ._explain import Trace as Trace
from ._explain import Watch as Watch
from ._explain import guard_traces as guard_traces
from ._explain import traces_of as traces_of
from ._explain import watch_traces as watch_traces
from ._gradients import filter_grad as filter_grad
from ._gradients import filter_value_and_grad as filter_value_and_grad
from ._jacobians import filter_hessian as filter_hessian
from ._jacobians import filter_jacfwd as filter_jacfwd
from ._jacobians import filter_jacrev as filter_jacrev
from ._jit import filter_jit as filter_jit
from ._linear import filter_jvp as filter_jvp
from ._linear import filter_vjp as filter_vjp
from ._lowered import Compiled as Compiled
from ._lowered import Lowered as Lowered
from ._pmap import filter_pmap as filter_pmap
from ._remat import filter_checkpoint as filter_checkpoint
from ._runtime_check import awaited as awaited
from ._runtime_check import batch_text as batch_text
from ._runtime_check import check as check
from ._runtime_check import fail_if as fail_if
from ._runtime_check import poison as poison
from ._runtime_check import without_checks as without_checks
from ._settled import settled as settled
from ._shapes import filter_eval_shape as filter_eval_shape
from ._shapes import filter_make_jaxpr as filter_make_jaxpr
from ._signatures import Difference as Difference
from ._signatures import Signature as Signature
from ._signatures import signature_of_call as signature_of_call
from ._traced_shapes import TracedShapeError as TracedShapeError
from ._transformed import Transformed as Transformed
from ._transformed import check_callable as check_callable
from ._zeros import ZeroTangent as ZeroTangent
from ._zeros import is_zero as is_zero
from ._zeros import materialise as materialise

publish(__name__, globals())
