"""`make_mesh`: sizes, types of axes, and what is refused."""

import inspect

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from vernal.sharding import make_mesh

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def test_axes_have_the_given_order_and_are_explicit():
    mesh = make_mesh(data=4, model=2)
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert mesh.axis_names == ("data", "model")
    assert mesh.axis_types == (EXPLICIT, EXPLICIT)
    assert set(mesh.devices.flat) == set(jax.devices())


def test_automatic_axes_are_asked_for():
    assert make_mesh(data=4, model=2, automatic=True).axis_types == (AUTO, AUTO)
    assert make_mesh(data=4, model=2, automatic=["model"]).axis_types == (EXPLICIT, AUTO)
    assert make_mesh(data=8, automatic=[]).axis_types == (EXPLICIT,)


@pytest.mark.parametrize("sizes", [{"a": -1, "b": 2}, {"a": 4, "b": -1}, {"a": 4, "b": 2, "c": -1}])
def test_one_size_may_be_what_is_left(sizes):
    found = make_mesh(**sizes).shape
    assert np.prod(list(found.values())) == 8
    assert all(found[name] == size for name, size in sizes.items() if size != -1)


def test_some_of_the_devices_are_given():
    devices = jax.devices()[2:6]
    mesh = make_mesh(a=np.int64(2), b=-1, devices=devices)
    assert mesh.devices.shape == (2, 2)
    assert list(mesh.devices.flat) == devices


WRONG = [
    ({}, "cannot be made of 8 devices(.|\n)*got: no axis"),
    ({"a": 4}, "(?s)cannot be made of 8 devices.*product is 8.*got: a=4.*devices=jax.devices"),
    ({"a": 16}, "cannot be made of 8 devices(.|\n)*got: a=16"),
    ({"a": 0, "b": -1}, "cannot be made of 8 devices(.|\n)*got: a=0, b=-1"),
    ({"a": 0}, "cannot be made of 8 devices(.|\n)*positive sizes"),
    ({"a": -1, "b": -1}, "cannot be made of 8 devices(.|\n)*at most one -1"),
    ({"a": 3, "b": -1}, "cannot be made of 8 devices(.|\n)*got: a=3, b=-1"),
    ({"a": -2, "b": -4}, "cannot be made of 8 devices(.|\n)*got: a=-2, b=-4"),
    ({"a": 8, "automatic": ["b"]}, "(?s)`automatic` names an axis.*expected.*'a'.*got.*'b'"),
    ({"a": 8, "automatic": "a"}, "(?s)`automatic` names an axis.*a list"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_mesh_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        make_mesh(**arguments)


def test_a_size_is_an_integer():
    with pytest.raises(
        TypeError, match=r"(?s)the size of an axis must be an integer.*make_mesh\(a="
    ):
        inspect.unwrap(make_mesh)(a=2.0, b=4)
