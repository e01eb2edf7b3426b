"""Every public name of Equinox 0.13.8 is there."""

import types

import equinox
import equinox.internal
import pytest

from vernal.compat import equinox as compat


def names(module):
    return {
        name
        for name, value in vars(module).items()
        if name[0] != "_" and not isinstance(value, types.ModuleType)
    }


@pytest.mark.parametrize(
    ("theirs", "ours", "count"),
    [
        (equinox, compat, 52),
        (equinox.nn, compat.nn, 47),
        (equinox.debug, compat.debug, 7),
        (equinox.internal, compat.internal, 70),
    ],
    ids=["equinox", "nn", "debug", "internal"],
)
def test_all_names_are_there(theirs, ours, count):
    assert len(names(theirs)) == count
    assert names(ours) == names(theirs)
