"""Vernal: models are plain immutable classes that are trees of arrays, and every JAX
transformation accepts them."""

import gc as _gc
import importlib as _importlib
import os as _os
import sys as _sys
import typing as _typing

# In the middle of this import Python would look for garbage among the 100,000 objects that JAX has just made. That
# takes half as long as the import itself.
_collecting = _gc.isenabled()
_gc.disable()
try:
    from . import harvest as harvest
    from . import loops as loops
    from . import modules as modules
    from . import optim as optim
    from . import primitives as primitives
    from . import runtime as runtime
    from . import show as show
    from . import transforms as transforms
    from . import trees as trees
    from ._ground import clear_caches as clear_caches
    from ._ground import hide_frames as _hide_frames
    from .loops import filter_cond as filter_cond
    from .loops import filter_switch as filter_switch
    from .modules import AbstractClassVar as AbstractClassVar
    from .modules import AbstractVar as AbstractVar
    from .modules import Module as Module
    from .modules import Packed as Packed
    from .modules import Partial as Partial
    from .modules import Static as Static
    from .modules import field as field
    from .modules import freeze as freeze
    from .modules import module_update_wrapper as module_update_wrapper
    from .modules import pack as pack
    from .modules import params as params
    from .modules import trainable as trainable
    from .modules import unfreeze as unfreeze
    from .optim import Optimizer as Optimizer
    from .optim import apply_updates as apply_updates
    from .runtime import Enumeration as Enumeration
    from .runtime import branched_error_if as branched_error_if
    from .runtime import error_if as error_if
    from .show import tree_pformat as tree_pformat
    from .show import tree_pprint as tree_pprint
    from .transforms import filter_checkpoint as filter_checkpoint
    from .transforms import filter_closure_convert as filter_closure_convert
    from .transforms import filter_custom_jvp as filter_custom_jvp
    from .transforms import filter_custom_vjp as filter_custom_vjp
    from .transforms import filter_debug_callback as filter_debug_callback
    from .transforms import filter_eval_shape as filter_eval_shape
    from .transforms import filter_grad as filter_grad
    from .transforms import filter_hessian as filter_hessian
    from .transforms import filter_io_callback as filter_io_callback
    from .transforms import filter_jacfwd as filter_jacfwd
    from .transforms import filter_jacrev as filter_jacrev
    from .transforms import filter_jit as filter_jit
    from .transforms import filter_jvp as filter_jvp
    from .transforms import filter_make_jaxpr as filter_make_jaxpr
    from .transforms import filter_pmap as filter_pmap
    from .transforms import filter_pure_callback as filter_pure_callback
    from .transforms import filter_shard as filter_shard
    from .transforms import filter_shard_map as filter_shard_map
    from .transforms import filter_value_and_grad as filter_value_and_grad
    from .transforms import filter_vjp as filter_vjp
    from .transforms import filter_vmap as filter_vmap
    from .transforms import if_array as if_array
    from .transforms import settled as settled
    from .trees import NoGradient as NoGradient
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
finally:
    if _gc.get_freeze_count() == 0:
        # What is new stays: Python need not look through it once more, now that it may.
        _gc.freeze()
        _gc.unfreeze()
    if _collecting:
        _gc.enable()

__version__ = "0.1.0"

clear_caches.__module__ = __name__

# Where JAX leaves its own frames out of a traceback, it leaves out these, too.
_hide_frames(_os.path.dirname(__file__))

# Rooms that not every program needs, and what is here of one of them: imported when they are first looked at.
_LATER = ("compat", "debug", "estimators", "linalg", "nn", "saving", "sharding", "testing")
_OF_SAVING = (
    "default_deserialise_filter_spec",
    "default_serialise_filter_spec",
    "load",
    "save",
    "tree_deserialise_leaves",
    "tree_serialise_leaves",
)

# Names that `import vernal as eqx` does not have.
_OF_EQUINOX = {
    "EquinoxRuntimeError": "vernal.runtime.RuntimeCheckError",
    "EquinoxTracetimeError": "vernal.runtime.RuntimeCheckError",
    "StrictConfig": "strict=True in the line of the class",
    "internal": "the name of the room, such as vernal.loops: `python -m vernal.compat` lists them",
    "static_field": "vernal.field(static=True)",
    "tree_inference": "vernal.nn.inference_mode",
}

if _typing.TYPE_CHECKING:
    from . import compat as compat
    from . import debug as debug
    from . import estimators as estimators
    from . import linalg as linalg
    from . import nn as nn
    from . import saving as saving
    from . import sharding as sharding
    from . import testing as testing
    from .saving import default_deserialise_filter_spec as default_deserialise_filter_spec
    from .saving import default_serialise_filter_spec as default_serialise_filter_spec
    from .saving import load as load
    from .saving import save as save
    from .saving import tree_deserialise_leaves as tree_deserialise_leaves
    from .saving import tree_serialise_leaves as tree_serialise_leaves
else:
    # Hidden from type checkers, which would otherwise believe that every attribute exists.

    def __getattr__(name: str) -> _typing.Any:
        if name in _LATER:
            return _importlib.import_module(f"{__name__}.{name}")
        if name in _OF_SAVING:
            return getattr(_importlib.import_module(f"{__name__}.saving"), name)
        message = f"module {__name__!r} has no attribute {name!r}"
        if f"filter_{name}" in globals():
            message += f": write `vernal.filter_{name}`"
        elif name in _OF_EQUINOX:
            message += f": write {_OF_EQUINOX[name]}"
        raise AttributeError(message, name=name, obj=_sys.modules[__name__])

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATER, *_OF_SAVING})

    # For `from vernal import *`, which would leave them out.
    __all__ = [name for name in __dir__() if not name.startswith("_")]
