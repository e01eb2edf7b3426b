"""The equations of a program, wherever they stand."""

from collections.abc import Iterator
from typing import Any

from ._jax_private import subjaxprs


def equations_in(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program and of the programs inside it.

    Args:
        jaxpr: the program.

    Yields:
        Each equation, once.
    """
    seen: set[int] = set()
    waiting = [getattr(jaxpr, "jaxpr", jaxpr)]
    while waiting:
        jaxpr = waiting.pop()
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        yield from jaxpr.eqns
        waiting += subjaxprs(jaxpr)
