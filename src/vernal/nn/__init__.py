"""Layers of neural networks."""

from .._ground import publish
from ._linear import Identity as Identity
from ._linear import Linear as Linear
from ._mlp import MLP as MLP

publish(__name__, globals())
