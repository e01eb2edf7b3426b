"""The names of `equinox.nn` 0.13.8."""

from ...._ground import publish as _publish
from ....nn import MLP as MLP
from ....nn import AvgPool1d as AvgPool1d
from ....nn import AvgPool2d as AvgPool2d
from ....nn import AvgPool3d as AvgPool3d
from ....nn import Conv as Conv
from ....nn import Conv1d as Conv1d
from ....nn import Conv2d as Conv2d
from ....nn import Conv3d as Conv3d
from ....nn import ConvTranspose as ConvTranspose
from ....nn import ConvTranspose1d as ConvTranspose1d
from ....nn import ConvTranspose2d as ConvTranspose2d
from ....nn import ConvTranspose3d as ConvTranspose3d
from ....nn import Dropout as Dropout
from ....nn import Embedding as Embedding
from ....nn import GRUCell as GRUCell
from ....nn import Identity as Identity
from ....nn import Lambda as Lambda
from ....nn import Linear as Linear
from ....nn import LSTMCell as LSTMCell
from ....nn import MaxPool1d as MaxPool1d
from ....nn import MaxPool2d as MaxPool2d
from ....nn import MaxPool3d as MaxPool3d
from ....nn import MultiheadAttention as MultiheadAttention
from ....nn import Pool as Pool
from ....nn import PReLU as PReLU
from ....nn import RotaryPositionalEmbedding as RotaryPositionalEmbedding
from ....nn import Sequential as Sequential
from ....nn import Shared as Shared
from ....nn import SpectralNorm as SpectralNorm
from ....nn import State as State
from ....nn import StatefulLayer as StatefulLayer
from ....nn import Variable as StateIndex  # noqa: F401 (Equinox's name)
from ....nn import WeightNorm as WeightNorm
from ....nn import delete_init_state as delete_init_state
from ....nn import inference_mode as inference_mode
from ....nn import make_with_state as make_with_state
from ._adaptive_pool import AdaptiveAvgPool1d as AdaptiveAvgPool1d
from ._adaptive_pool import AdaptiveAvgPool2d as AdaptiveAvgPool2d
from ._adaptive_pool import AdaptiveAvgPool3d as AdaptiveAvgPool3d
from ._adaptive_pool import AdaptiveMaxPool1d as AdaptiveMaxPool1d
from ._adaptive_pool import AdaptiveMaxPool2d as AdaptiveMaxPool2d
from ._adaptive_pool import AdaptiveMaxPool3d as AdaptiveMaxPool3d
from ._adaptive_pool import AdaptivePool as AdaptivePool
from ._batch_norm import BatchNorm as BatchNorm
from ._norms import GroupNorm as GroupNorm
from ._norms import LayerNorm as LayerNorm
from ._norms import RMSNorm as RMSNorm

_publish(__name__, globals())
