"""Saving: trees of arrays in files, by name (safetensors) or in the order of their leaves
(Equinox's `.eqx`)."""

from .._ground import publish
from ._named import LoadReport as LoadReport
from ._named import load as load
from ._named import load_metadata as load_metadata
from ._named import save as save
from ._stream import default_deserialise_filter_spec as default_deserialise_filter_spec
from ._stream import default_serialise_filter_spec as default_serialise_filter_spec
from ._stream import tree_deserialise_leaves as tree_deserialise_leaves
from ._stream import tree_serialise_leaves as tree_serialise_leaves

publish(__name__, globals())
