"""Each test that asks for `answers` runs once per route."""

import pytest

from tests.soundness._answers import MAIN_ROUTES, Answers


@pytest.fixture(params=MAIN_ROUTES, ids=lambda route: route.__name__)
def answers(request: pytest.FixtureRequest) -> Answers:
    return Answers(request.param)
