"""JAX's transformations for functions of arbitrary Python objects."""

from .._ground import publish
from ._boundary import Rest as Rest
from ._boundary import split as split
from ._jit import filter_jit as filter_jit
from ._lowered import Compiled as Compiled
from ._lowered import Lowered as Lowered
from ._traced_shapes import TracedShapeError as TracedShapeError

publish(__name__, globals())
