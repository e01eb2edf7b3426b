"""Every public layer, loop, check and estimator under `filter_shard_map`, as `_same.py` says, beside the tables for
explicit and automatic axes; and that none of them is left out of the tables."""

import dataclasses
import re

import jax
import pytest

from tests.nn.test_table import public_layers
from tests.sharding._same import BATCH, check_apart
from tests.sharding.test_layers_on_a_mesh import CASES
from tests.sharding.test_operations_on_a_mesh import ESTIMATES, OPERATIONS, computation
from vernal import estimators, loops, nn, runtime

ROWS = CASES | dict.fromkeys([*OPERATIONS, *ESTIMATES], computation)

# Public names that compute nothing by themselves.
TYPES = {
    loops: {"Buffer", "MaybeBuffer"},
    runtime: {"Enumeration", "EnumerationItem", "RuntimeCheckError", "AbstractProgressMeter"}
    # Each device draws a bar of its own: `tests/runtime` runs them inside `shard_map`.
    | {"TextProgressMeter", "TqdmProgressMeter", "RichProgressMeter"},
    estimators: {"Budget", "DiagonalMethod", "Estimate", "GradientPairs", "Outcome", "Probes"}
    | {"SpectralDensity", "StoredPairs", "TraceMethod"},
}


@pytest.mark.parametrize("room", TYPES, ids=lambda room: room.__name__)
def test_every_public_name_has_a_row(room):
    named = {word for name in [*OPERATIONS, *ESTIMATES] for word in re.findall(r"\w+", name)}
    public = {
        name for name, x in vars(room).items() if getattr(x, "__module__", "") == room.__name__
    }
    assert public - named == TYPES[room]


def test_every_layer_has_a_row():
    assert {layer.__name__ for layer in public_layers()} <= {name.split()[0] for name in CASES}


# Layers that draw: every example has a key of its own, or they would not draw alike on one device and on several.
RANDOM = [
    *("Dropout", "Dropout of channels", "DropPath", "DropPath of examples"),
    *("LSTM", "Sequential", "Sequential of layers", "Stack"),
]
# Layers that keep statistics of the batch, which is spread over the devices: as they are made for that.
OF_THE_BATCH = {
    "BatchNorm of the batch": lambda k: nn.BatchNorm(4, "data", num_spatial_dims=1),
    "BatchNorm with a State": lambda k: nn.BatchNorm(4, "data", mode="ema", num_spatial_dims=0),
    "Stack with state": lambda k: nn.Stack(
        lambda k: nn.Sequential(
            [nn.Linear(4, 4, key=k), nn.BatchNorm(4, "data", num_spatial_dims=0)]
        ),
        3,
        key=k,
    ),
}
# The same for each example by itself: they would disagree on one device as well, were they not mapped by `vmap`.
OF_ONE_EXAMPLE = "BatchNorm"


def with_keys(layer, xs_and_keys):
    return jax.vmap(lambda x, key: layer(x, key=key))(*xs_and_keys)


def row(name):
    found = ROWS[name](name)
    if name in RANDOM:
        keys = jax.random.split(jax.random.key(2), BATCH)
        return dataclasses.replace(found, run=with_keys, xs=(found.xs, keys))
    if name in OF_THE_BATCH:
        over_all = jax.tree.structure(jax.eval_shape(OF_THE_BATCH[name], jax.random.key(0)))

        def apart(model, xs):
            return found.run(over_all.unflatten(jax.tree.leaves(model)), xs)

        return dataclasses.replace(found, apart=apart)
    return found


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [name for name in ROWS if name != OF_ONE_EXAMPLE])
def test_it_is_the_same_where_filter_shard_map_spreads_the_batch(name):
    check_apart(row(name))


@pytest.mark.parametrize("name", [OF_ONE_EXAMPLE, *OF_THE_BATCH])
@pytest.mark.sample(3)
def test_statistics_of_one_device_are_refused(name):
    # A `State` that is passed along is a result like others, about which JAX says so.
    ours = r"disagree about a state(.|\n)*give the layer this axis"
    said = r"out_specs which require replication" if name == "BatchNorm with a State" else ours
    with pytest.raises(ValueError, match=said):
        check_apart(ROWS[name](name))
