"""What some tests of this room need."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def optimised() -> Iterator[None]:
    """Programs of thousands of estimates run longer than XLA takes to optimise them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
