"""Where a module keeps its attributes, and the fastest access to them.

`Module` redefines `module.__dict__` (see `_lazy.py`). The library itself reads and writes the
dictionary beneath it, through the two functions here.
"""

from collections.abc import Callable
from typing import Any, ClassVar


class Attributes:
    """The base of `Module` that holds its attributes."""

    # The flat form that a compiled call caches (see `_lazy.py`). Declared here, it is not a field.
    _vernal_flat: ClassVar[Any] = None


_descriptor: Any = Attributes.__dict__["__dict__"]

# In C: no Python runs, and a lazy module stays lazy.
attributes_of: Callable[[Any], dict[str, Any]] = _descriptor.__get__
set_attributes: Callable[[Any, dict[str, Any]], None] = _descriptor.__set__
