"""The method of a trace that a user leaves to us. The table is in the docstring of `trace`."""

import jax.numpy as jnp

from ..linalg import Operator
from ._hutchinson import Hutchinson
from ._method import default_probes
from ._xnystrace import XNysTrace
from ._xtrace import XTrace

# The methods that can go on from a sketch.
Deflation = XNysTrace | XTrace

# With fewer, a basis costs more than it gains, and its error is estimated from too few leave-one-out estimates.
_LEAST_FREE, _LEAST = 6, 20
# Bytes of a sketch: its probes, products and basis.
_MOST_BYTES = 2**30


def choose(operator: Operator, matvecs: int) -> Hutchinson | Deflation:
    """The method for so many products.

    Args:
        operator: tags and size count.
        matvecs: how many products there may be.
    """
    free = operator.positive_semidefinite
    columns = matvecs if free else matvecs // 2
    row = operator.size * jnp.dtype(operator.dtype).itemsize
    if matvecs < (_LEAST_FREE if free else _LEAST) or columns * row > _MOST_BYTES:
        return Hutchinson()
    return XNysTrace() if free else XTrace()


def deflation(operator: Operator, matvecs: int) -> Deflation | None:
    """The method that watches the products of Hutchinson's; None if that is better alone.

    Args:
        operator: tags and size count.
        matvecs: how many products there may be.
    """
    method = choose(operator, matvecs)
    if isinstance(method, Hutchinson):
        return None
    # The probes must be Hutchinson's best. Rescaling what is left of them is right for normal ones only.
    return type(method)(probes=default_probes(operator), resphered=False)
