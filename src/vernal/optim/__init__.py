"""Optimisers as values, and taking a step."""

from .._ground import publish
from ._optimizer import Optimizer as Optimizer
from ._updates import apply_updates as apply_updates

publish(__name__, globals())
