"""Layers of neural networks."""

import sys as _sys
import typing as _typing

from .._ground import publish
from ._activation import PReLU as PReLU
from ._adaptive_pool import AdaptiveAvgPool1d as AdaptiveAvgPool1d
from ._adaptive_pool import AdaptiveAvgPool2d as AdaptiveAvgPool2d
from ._adaptive_pool import AdaptiveAvgPool3d as AdaptiveAvgPool3d
from ._adaptive_pool import AdaptiveMaxPool1d as AdaptiveMaxPool1d
from ._adaptive_pool import AdaptiveMaxPool2d as AdaptiveMaxPool2d
from ._adaptive_pool import AdaptiveMaxPool3d as AdaptiveMaxPool3d
from ._adaptive_pool import AdaptivePool as AdaptivePool
from ._apply import apply as apply
from ._attention import attention as attention
from ._batch_norm import BatchNorm as BatchNorm
from ._cast import Cast as Cast
from ._cast import Policy as Policy
from ._cast import cast as cast
from ._cells import GRUCell as GRUCell
from ._cells import LSTMCell as LSTMCell
from ._cells import RNNCell as RNNCell
from ._conv import Conv as Conv
from ._conv import Conv1d as Conv1d
from ._conv import Conv2d as Conv2d
from ._conv import Conv3d as Conv3d
from ._conv_transpose import ConvTranspose as ConvTranspose
from ._conv_transpose import ConvTranspose1d as ConvTranspose1d
from ._conv_transpose import ConvTranspose2d as ConvTranspose2d
from ._conv_transpose import ConvTranspose3d as ConvTranspose3d
from ._dropout import Dropout as Dropout
from ._dropout import DropPath as DropPath
from ._embedding import Embedding as Embedding
from ._inference import inference_mode as inference_mode
from ._initialise import initialise as initialise
from ._instance_norm import InstanceNorm as InstanceNorm
from ._interpolate import Upsample as Upsample
from ._interpolate import interpolate as interpolate
from ._keys import keys as keys
from ._kv_cache import KVCache as KVCache
from ._linear import Identity as Identity
from ._linear import Linear as Linear
from ._mlp import MLP as MLP
from ._multihead import MultiheadAttention as MultiheadAttention
from ._normalisation import GroupNorm as GroupNorm
from ._normalisation import LayerNorm as LayerNorm
from ._normalisation import RMSNorm as RMSNorm
from ._other_names import instead_of as _instead_of
from ._parametrised import Parametrised as Parametrised
from ._parametrised import Shared as Shared
from ._parametrised import resolve as resolve
from ._pipeline import pipeline as pipeline
from ._pixel_shuffle import PixelShuffle as PixelShuffle
from ._pixel_shuffle import PixelUnshuffle as PixelUnshuffle
from ._pool import AvgPool1d as AvgPool1d
from ._pool import AvgPool2d as AvgPool2d
from ._pool import AvgPool3d as AvgPool3d
from ._pool import MaxPool1d as MaxPool1d
from ._pool import MaxPool2d as MaxPool2d
from ._pool import MaxPool3d as MaxPool3d
from ._pool import Pool as Pool
from ._random import key_field as key_field
from ._random import use_key as use_key
from ._recurrent import GRU as GRU
from ._recurrent import LSTM as LSTM
from ._recurrent import RNN as RNN
from ._ring_attention import ring_attention as ring_attention
from ._rotary import RotaryPositionalEmbedding as RotaryPositionalEmbedding
from ._sequential import Lambda as Lambda
from ._sequential import Sequential as Sequential
from ._spectral_norm import SpectralNorm as SpectralNorm
from ._stack import Stack as Stack
from ._state import State as State
from ._state import StatefulLayer as StatefulLayer
from ._variable import Variable as Variable
from ._weight_norm import WeightNorm as WeightNorm
from ._with_state import delete_init_state as delete_init_state
from ._with_state import make_with_state as make_with_state

publish(__name__, globals())

if not _typing.TYPE_CHECKING:
    # Hidden from type checkers, which would otherwise believe that every attribute exists.

    def __getattr__(name: str) -> _typing.NoReturn:
        message = f"module {__name__!r} has no attribute {name!r}"
        if instead := _instead_of(name):
            message += f": write {instead}"
        raise AttributeError(message, name=name, obj=_sys.modules[__name__])
