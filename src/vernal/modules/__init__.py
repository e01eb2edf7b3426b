"""Classes that are pytrees."""

from .._ground import publish
from ._abstract import AbstractClassVar as AbstractClassVar
from ._abstract import AbstractVar as AbstractVar
from ._building import end_construction
from ._calls import note_of_place
from ._fields import field as field
from ._frozen import freeze as freeze
from ._frozen import frozen_leaves, is_frozen, is_partly_frozen
from ._frozen import params as params
from ._frozen import trainable as trainable
from ._frozen import unfreeze as unfreeze
from ._hooks import hooked
from ._lazy import Flat, lazily, remember_flat
from ._marks import buffer_leaves
from ._methods import BoundMethod
from ._module import Module as Module
from ._module import ModuleMeta as ModuleMeta
from ._module import module_classes
from ._module import module_update_wrapper as module_update_wrapper
from ._pack import Packed as Packed
from ._pack import pack as pack
from ._partial import Partial as Partial
from ._static import Static as Static

Module._vernal_root = True  # pyright: ignore[reportAttributeAccessIssue] (read by the strictness rule)
publish(__name__, globals())
