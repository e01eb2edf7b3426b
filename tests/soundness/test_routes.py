"""The attacks that matter most, by every route by which a function can reach a program or a model."""

import pytest

from tests.soundness._answers import (
    ARGUMENT_ROUTES,
    FIELD_ROUTES,
    WRAPPED_ROUTES,
    Answers,
    in_jax_partial,
)
from tests.soundness._kinds import KINDS
from tests.soundness.test_substitution import exchange, set_and_reset

CHOSEN = ("dataclass", "nonlocal", "bound method", "callable object")
ROUTES = (*ARGUMENT_ROUTES, *FIELD_ROUTES, *WRAPPED_ROUTES)
# JAX itself compares what its `Partial` calls, and to Python `obj.method == obj.method`.
CASES = [
    pytest.param(route, KINDS[name], id=f"{route.__name__}-{name}")
    for route in ROUTES
    for name in CHOSEN
    if (route, name) != (in_jax_partial, "bound method")
]


@pytest.mark.parametrize(("route", "kind"), CASES)
@pytest.mark.parametrize("scenario", [exchange, set_and_reset])
@pytest.mark.sample(12)
def test_every_route_keeps_functions_apart(route, kind, scenario):
    scenario(kind, Answers(route))
