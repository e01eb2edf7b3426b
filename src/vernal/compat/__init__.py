"""Vernal under Equinox's names, for libraries that import `equinox`."""

from .._ground import publish
from ._install import install as install
from ._install import uninstall as uninstall

publish(__name__, globals())
