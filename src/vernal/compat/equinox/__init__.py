"""The names of `equinox` 0.13.8."""

from ..._ground import clear_caches as clear_caches
from ..._ground import publish as _publish
from ...modules import AbstractClassVar as AbstractClassVar
from ...modules import AbstractVar as AbstractVar
from ...modules import Partial as Partial
from ...modules import field as field
from ...modules import module_update_wrapper as module_update_wrapper
from ...nn import inference_mode as tree_inference
from ...runtime import Enumeration as Enumeration
from ...runtime import RuntimeCheckError as EquinoxRuntimeError

# A check that fails while tracing raises the same class here.
from ...runtime import RuntimeCheckError as EquinoxTracetimeError
from ...saving import default_serialise_filter_spec as default_serialise_filter_spec
from ...saving import tree_serialise_leaves as tree_serialise_leaves
from ...show import tree_pformat as tree_pformat
from ...show import tree_pprint as tree_pprint
from ...transforms import filter_checkpoint as filter_checkpoint
from ...transforms import filter_jit as filter_jit
from ...transforms import filter_jvp as filter_jvp
from ...transforms import filter_make_jaxpr as filter_make_jaxpr
from ...transforms import filter_pmap as filter_pmap
from ...transforms import filter_shard as filter_shard
from ...transforms import filter_vmap as filter_vmap
from ...transforms import if_array as if_array
from ...trees import combine as combine
from ...trees import is_inexact_array as is_inexact_array
from ...trees import is_inexact_array_like as is_inexact_array_like
from ...trees import tree_check as tree_check
from ...trees import tree_equal as tree_equal
from ...trees import tree_flatten_one_level as tree_flatten_one_level
from . import debug as debug
from . import internal as internal
from . import nn as nn
from ._checks import branched_error_if as branched_error_if
from ._checks import error_if as error_if
from ._closures import filter_closure_convert as filter_closure_convert
from ._custom_rules import filter_custom_jvp as filter_custom_jvp
from ._custom_rules import filter_custom_vjp as filter_custom_vjp
from ._derivatives import filter_grad as filter_grad
from ._derivatives import filter_hessian as filter_hessian
from ._derivatives import filter_jacfwd as filter_jacfwd
from ._derivatives import filter_jacrev as filter_jacrev
from ._derivatives import filter_value_and_grad as filter_value_and_grad
from ._derivatives import filter_vjp as filter_vjp
from ._files import default_deserialise_filter_spec as default_deserialise_filter_spec
from ._files import tree_deserialise_leaves as tree_deserialise_leaves
from ._module import Module as Module
from ._module import StrictConfig as StrictConfig
from ._module import static_field as static_field
from ._spelling import filter_eval_shape as filter_eval_shape
from ._spelling import filter_pure_callback as filter_pure_callback
from ._trees import filter as filter
from ._trees import is_array as is_array
from ._trees import is_array_like as is_array_like
from ._trees import partition as partition
from ._trees import tree_at as tree_at
from ._updates import apply_updates as apply_updates

__version__ = "0.13.8"

_publish(__name__, globals())
