"""Vernal: models are plain immutable classes that are trees of arrays, and every JAX transformation accepts them."""

from . import modules as modules
from . import show as show
from . import transforms as transforms
from . import trees as trees
from ._ground import clear_caches as clear_caches
from .modules import AbstractClassVar as AbstractClassVar
from .modules import AbstractVar as AbstractVar
from .modules import Module as Module
from .modules import Partial as Partial
from .modules import Static as Static
from .modules import field as field
from .modules import module_update_wrapper as module_update_wrapper
from .show import tree_pformat as tree_pformat
from .show import tree_pprint as tree_pprint
from .transforms import filter_jit as filter_jit
from .trees import combine as combine
from .trees import filter as filter
from .trees import is_array as is_array
from .trees import is_array_like as is_array_like
from .trees import is_inexact_array as is_inexact_array
from .trees import is_inexact_array_like as is_inexact_array_like
from .trees import partition as partition
from .trees import tree_allclose as tree_allclose
from .trees import tree_at as tree_at
from .trees import tree_check as tree_check
from .trees import tree_equal as tree_equal
from .trees import tree_flatten_one_level as tree_flatten_one_level
from .trees import ω as ω

__version__ = "0.1.0"

clear_caches.__module__ = __name__
