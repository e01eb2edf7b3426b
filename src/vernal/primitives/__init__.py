"""New operations: with arbitrary arguments, across batches, with their own transposes."""

from .._ground import publish
from ._borrow import borrow_if_vmap as borrow_if_vmap
from ._finalise import finalise_eval_jaxpr as finalise_eval_jaxpr
from ._finalise import finalise_fn as finalise_fn
from ._finalise import finalise_jaxpr as finalise_jaxpr
from ._finalise import finalise_jaxpr_as_fn as finalise_jaxpr_as_fn
from ._finalise import finalise_make_jaxpr as finalise_make_jaxpr
from ._finalise import primitive_finalisations as primitive_finalisations
from ._finalise import register_impl_finalisation as register_impl_finalisation
from ._guards import nonbatchable as nonbatchable
from ._guards import nonbatchable_p as nonbatchable_p
from ._guards import nondifferentiable as nondifferentiable
from ._guards import nondifferentiable_backward as nondifferentiable_backward
from ._guards import nondifferentiable_backward_p as nondifferentiable_backward_p
from ._guards import nontraceable as nontraceable
from ._guards import nontraceable_p as nontraceable_p
from ._linear_call import linear_call as linear_call
from ._linear_call import linear_call_p
from ._linear_call import local_linear_call as local_linear_call
from ._nextafter import nextafter as nextafter
from ._nextafter import prevbefore as prevbefore
from ._noinline import noinline as noinline
from ._noinline import noinline_p as noinline_p
from ._primitive import filter_primitive_batching as filter_primitive_batching
from ._primitive import filter_primitive_bind as filter_primitive_bind
from ._primitive import filter_primitive_def as filter_primitive_def
from ._primitive import filter_primitive_jvp as filter_primitive_jvp
from ._primitive import filter_primitive_transpose as filter_primitive_transpose
from ._primitive import materialise_zeros as materialise_zeros
from ._select import select_if_vmap as select_if_vmap
from ._select import select_if_vmap_p as select_if_vmap_p
from ._unvmap import unvmap_all as unvmap_all
from ._unvmap import unvmap_all_p as unvmap_all_p
from ._unvmap import unvmap_any as unvmap_any
from ._unvmap import unvmap_any_p as unvmap_any_p
from ._unvmap import unvmap_max as unvmap_max
from ._unvmap import unvmap_max_p as unvmap_max_p
from ._unvmap import unvmap_min as unvmap_min
from ._unvmap import unvmap_min_p as unvmap_min_p
from ._vprim import create_vprim as create_vprim

publish(__name__, globals())
