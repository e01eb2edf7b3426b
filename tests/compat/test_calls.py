"""Every public name of Equinox is called in one process on Equinox, in another on Vernal: only what is listed differs.

`python -m tests.compat._calls` writes the list anew, and `python -m vernal.compat` prints the table that is made of it.
"""

import json

import pytest

from vernal.compat import equinox as compat
from vernal.compat._differences import DIFFERENCES, needs_reason, public_names
from vernal.compat._seen import SEEN

from ._calls.compare import KNOWN, differences, gather, kinds
from ._calls.registry import GENERATORS, is_heavy, load

# The first test of each half waits for two processes.
pytestmark = pytest.mark.timeout(900)

load()
LISTED = json.loads(KNOWN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def light():
    return gather("light")


@pytest.fixture(scope="module")
def heavy():
    return gather("heavy")


def check(found, name):
    assert all(seen["calls"] for seen in (found["equinox"][name], found["compat"][name]))
    assert differences(found, name) == LISTED.get(name, {})


@pytest.mark.parametrize("name", [name for name in public_names() if not is_heavy(name)])
def test_only_what_is_listed_differs(light, name):
    check(light, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in public_names() if is_heavy(name)])
def test_only_what_is_listed_differs_in_layers_loops_and_derivatives(heavy, name):
    check(heavy, name)


def test_the_calls_are_of_the_names_and_the_version_of_the_installed_equinox(light):
    assert light["version"] == compat.__version__
    assert sorted(GENERATORS) == light["names"] == sorted(public_names())


def test_the_kinds_of_differences_are_those_of_the_list():
    assert {name: kinds(differing) for name, differing in LISTED.items()} == SEEN


def test_every_difference_has_its_reason_and_every_reason_its_difference():
    assert [name for name in SEEN if needs_reason(name) and name not in DIFFERENCES] == []
    assert [name for name in DIFFERENCES if name not in SEEN] == []
