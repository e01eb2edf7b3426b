"""Saving: trees of arrays in files, by name (safetensors) or in the order of their leaves
(Equinox's `.eqx`); and weights from elsewhere (PyTorch, Hugging Face)."""

from .._ground import publish
from ._checkpoints import Checkpoints as Checkpoints
from ._compilation_cache import compilation_cache as compilation_cache
from ._export import export as export
from ._export_loaded import ExportedFunction as ExportedFunction
from ._export_loaded import load_exported as load_exported
from ._named import load as load
from ._named import load_metadata as load_metadata
from ._named import save as save
from ._report import LoadReport as LoadReport
from ._stream import default_deserialise_filter_spec as default_deserialise_filter_spec
from ._stream import default_serialise_filter_spec as default_serialise_filter_spec
from ._stream import tree_deserialise_leaves as tree_deserialise_leaves
from ._stream import tree_serialise_leaves as tree_serialise_leaves
from ._torch import from_torch as from_torch
from ._torch import to_torch as to_torch
from ._torch_layers import attention_rules as attention_rules
from ._torch_layers import conv_transpose_rules as conv_transpose_rules
from ._torch_layers import gru_cell_rules as gru_cell_rules
from ._torch_layers import gru_rules as gru_rules
from ._torch_layers import lstm_cell_rules as lstm_cell_rules
from ._torch_layers import lstm_rules as lstm_rules
from ._torch_layers import rnn_cell_rules as rnn_cell_rules
from ._torch_layers import rnn_rules as rnn_rules
from ._torch_layers import spectral_norm_rules as spectral_norm_rules
from ._torch_layers import weight_norm_rules as weight_norm_rules
from ._torch_rules import Conversion as Conversion
from ._torch_rules import Tied as Tied

publish(__name__, globals())
