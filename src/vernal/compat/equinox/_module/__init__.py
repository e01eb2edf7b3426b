"""Names that libraries import from `equinox._module`, which is private in Equinox."""

from ...._ground import publish as _publish
from ....modules import AbstractClassVar as AbstractClassVar
from ....modules import AbstractVar as AbstractVar
from ....modules import Partial as Partial
from ....modules import Static as Static
from ....modules import field as field
from ....modules import module_update_wrapper as module_update_wrapper
from . import _module as _module
from ._module import Module as Module
from ._module import StrictConfig as StrictConfig
from ._module import static_field as static_field

_publish(__name__, globals())
