"""Names of layers elsewhere."""

import operator
import re

import jax
import optax
import pytest

import vernal
from vernal import nn
from vernal.nn._other_names import _INSTEAD


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ReLU", "write jax.nn.relu"),
        ("relu", "write jax.nn.relu"),
        ("LeakyReLU", "write jax.nn.leaky_relu"),
        ("leaky_relu", "write jax.nn.leaky_relu"),
        ("BatchNorm2d", "write nn.BatchNorm(channels, num_spatial_dims=2)"),
        ("Dropout2d", "write nn.Dropout(p, together=2)"),
        ("ModuleList", "write a list or a tuple in a field"),
        ("Module", "write vernal.Module"),
        ("StateIndex", "write nn.Variable"),
    ],
)
def test_the_name_of_a_layer_elsewhere_says_what_is_written_here(name, instead):
    with pytest.raises(
        AttributeError, match=f"module 'vernal.nn' has no attribute '{name}': {re.escape(instead)}"
    ):
        getattr(nn, name)


def test_any_other_name_is_only_missing():
    assert not hasattr(nn, "Linea") and not hasattr(nn, "__all__")
    with pytest.raises(AttributeError, match="module 'vernal.nn' has no attribute 'Linea'$"):
        operator.attrgetter("Linea")(nn)


def test_what_it_says_exists():
    modules = {"jax.nn": jax.nn, "nn": nn, "optax": optax, "vernal": vernal}
    for name, instead in _INSTEAD.items():
        assert name not in vars(nn)
        if found := re.match(r"(jax\.nn|nn|optax|vernal)\.(\w+)", instead):
            assert hasattr(modules[found[1]], found[2]), instead
