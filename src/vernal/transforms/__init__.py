"""JAX's transformations for functions of arbitrary Python objects."""

from .._ground import publish
from ._axes import if_array as if_array
from ._batch import filter_vmap as filter_vmap
from ._boundary import Rest as Rest
from ._boundary import split as split
from ._branches import filter_cond as filter_cond
from ._branches import filter_switch as filter_switch
from ._callbacks import filter_debug_callback as filter_debug_callback
from ._callbacks import filter_io_callback as filter_io_callback
from ._callbacks import filter_pure_callback as filter_pure_callback
from ._devices import filter_shard as filter_shard
from ._devices import filter_shard_map as filter_shard_map
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
from ._shapes import filter_eval_shape as filter_eval_shape
from ._shapes import filter_make_jaxpr as filter_make_jaxpr
from ._traced_shapes import TracedShapeError as TracedShapeError

publish(__name__, globals())
