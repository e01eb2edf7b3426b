"""Where a module keeps its attributes, and the shortest ways to them.

`Module` gives `module.__dict__` a meaning of its own (see `_lazy.py`). The library itself reads
and writes the dictionary beneath it, through the two functions here.
"""

from collections.abc import Callable
from typing import Any, ClassVar


class Attributes:
    """The base of `Module` that holds its attributes."""

    # What a compiled call remembers of a module (see `_lazy.py`). Here it makes no field.
    _vernal_flat: ClassVar[Any] = None


_descriptor: Any = Attributes.__dict__["__dict__"]

# In C: no Python runs, and nothing is filled in.
attributes_of: Callable[[Any], dict[str, Any]] = _descriptor.__get__
set_attributes: Callable[[Any, dict[str, Any]], None] = _descriptor.__set__
