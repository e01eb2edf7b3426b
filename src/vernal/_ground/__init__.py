"""The ground: knows Python and JAX, and nothing of Vernal."""

from ._by_name import by_name as by_name
from ._caches import clear_caches as clear_caches
from ._caches import register_cache as register_cache
from ._callables import callable_name as callable_name
from ._callables import signature_of as signature_of
from ._jax_private import flatten_none_is_leaf as flatten_none_is_leaf
from ._jax_private import trace_state_clean as trace_state_clean
from ._one_level import one_level as one_level
from ._one_level import one_level_with_keys as one_level_with_keys
from ._publish import publish as publish
from ._static import intern_key as intern_key
from ._static import same as same

publish(__name__, globals())
