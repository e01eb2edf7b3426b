"""Helpers for tests of models, for our own test suite and for yours."""

from .._ground import publish
from ._keys import GetKey as GetKey

publish(__name__, globals())
