"""The one door to private JAX. Every name below says why it is needed and what retires it."""

from collections.abc import Callable
from typing import Any

# Whether no trace is active, so that no tracer is alive that a cache could keep. Present in JAX 0.10.2
# to 0.12. Retired by: any JAX version that says so in public (jax.core had it until 0.10).
from jax._src.core import trace_state_clean as trace_state_clean

# The registry in which None is a leaf: flattening with it stays in C++, where `is_leaf=lambda x: x
# is None` calls Python at every node. Present in JAX 0.10.2 to 0.12. Retired by: any JAX version
# whose public tree_flatten can treat None as a leaf.
from jax._src.tree_util import none_leaf_registry

flatten_none_is_leaf: Callable[[Any], tuple[list[Any], Any]] = none_leaf_registry.flatten
