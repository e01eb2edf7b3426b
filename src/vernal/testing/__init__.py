"""Checking: what tests of models need, for our own suite and for yours."""

from .._ground import publish
from ._keys import GetKey as GetKey

publish(__name__, globals())
