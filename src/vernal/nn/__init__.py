"""Layers of neural networks."""

from .._ground import publish
from ._activation import PReLU as PReLU
from ._adaptive_pool import AdaptiveAvgPool1d as AdaptiveAvgPool1d
from ._adaptive_pool import AdaptiveAvgPool2d as AdaptiveAvgPool2d
from ._adaptive_pool import AdaptiveAvgPool3d as AdaptiveAvgPool3d
from ._adaptive_pool import AdaptiveMaxPool1d as AdaptiveMaxPool1d
from ._adaptive_pool import AdaptiveMaxPool2d as AdaptiveMaxPool2d
from ._adaptive_pool import AdaptiveMaxPool3d as AdaptiveMaxPool3d
from ._adaptive_pool import AdaptivePool as AdaptivePool
from ._cells import GRUCell as GRUCell
from ._cells import LSTMCell as LSTMCell
from ._conv import Conv as Conv
from ._conv import Conv1d as Conv1d
from ._conv import Conv2d as Conv2d
from ._conv import Conv3d as Conv3d
from ._conv_transpose import ConvTranspose as ConvTranspose
from ._conv_transpose import ConvTranspose1d as ConvTranspose1d
from ._conv_transpose import ConvTranspose2d as ConvTranspose2d
from ._conv_transpose import ConvTranspose3d as ConvTranspose3d
from ._dropout import Dropout as Dropout
from ._embedding import Embedding as Embedding
from ._inference import inference_mode as inference_mode
from ._linear import Identity as Identity
from ._linear import Linear as Linear
from ._mlp import MLP as MLP
from ._normalisation import GroupNorm as GroupNorm
from ._normalisation import LayerNorm as LayerNorm
from ._normalisation import RMSNorm as RMSNorm
from ._pool import AvgPool1d as AvgPool1d
from ._pool import AvgPool2d as AvgPool2d
from ._pool import AvgPool3d as AvgPool3d
from ._pool import MaxPool1d as MaxPool1d
from ._pool import MaxPool2d as MaxPool2d
from ._pool import MaxPool3d as MaxPool3d
from ._pool import Pool as Pool
from ._recurrent import GRU as GRU
from ._recurrent import LSTM as LSTM
from ._rotary import RotaryPositionalEmbedding as RotaryPositionalEmbedding
from ._sequential import Lambda as Lambda
from ._sequential import Sequential as Sequential
from ._shared import Shared as Shared
from ._weight_norm import WeightNorm as WeightNorm

publish(__name__, globals())
