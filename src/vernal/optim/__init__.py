"""Optimisers and schedules as values, and the functions of a training step."""

from .._ground import publish
from ._accumulate import accumulate_gradients as accumulate_gradients
from ._from_optax import from_optax as from_optax
from ._optimizer import Optimizer as Optimizer
from ._schedule import Schedule as Schedule
from ._updates import apply_updates as apply_updates

publish(__name__, globals())
