"""A pytest plugin: `python -m pytest -p vernal.compat.pytest` runs a test suite on Vernal."""

from ._install import install

install()
