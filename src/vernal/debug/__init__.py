"""Watching models: what they are made of, and what they cost."""

from .._ground import publish
from ._summary import summary as summary

publish(__name__, globals())
