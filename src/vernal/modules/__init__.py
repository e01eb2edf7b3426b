"""Classes that are pytrees."""

from .._ground import publish
from ._abstract import AbstractClassVar as AbstractClassVar
from ._abstract import AbstractVar as AbstractVar
from ._calls import note_of_place as note_of_place
from ._fields import field as field
from ._frozen import freeze as freeze
from ._frozen import frozen_leaves as frozen_leaves
from ._frozen import is_frozen as is_frozen
from ._frozen import is_partly_frozen as is_partly_frozen
from ._frozen import params as params
from ._frozen import trainable as trainable
from ._frozen import unfreeze as unfreeze
from ._hooks import hooked as hooked
from ._lazy import Flat as Flat
from ._lazy import lazily as lazily
from ._lazy import remember_flat as remember_flat
from ._marks import buffer_leaves as buffer_leaves
from ._methods import BoundMethod as BoundMethod
from ._module import Module as Module
from ._module import ModuleMeta as ModuleMeta
from ._module import module_classes as module_classes
from ._module import module_update_wrapper as module_update_wrapper
from ._pack import Packed as Packed
from ._pack import pack as pack
from ._partial import Partial as Partial
from ._static import Static as Static

Module._vernal_root = True  # pyright: ignore[reportAttributeAccessIssue] (read by the strictness rule)
publish(__name__, globals())
