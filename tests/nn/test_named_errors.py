"""Every layer is named by the error of a wrong input."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import vernal
from tests.nn.test_table import ROWS
from vernal import nn

# They hand on whatever comes.
TAKE_ANYTHING = ["Identity", "Sequential of nothing"]


class Six(vernal.Module):
    layers: list[Any]

    def __call__(self, x, *, key=None):
        for layer in self.layers:
            x = layer(x, key=key)
        return x


def six(name):
    """Layers of which the fourth is that of a row."""
    layers = [nn.Identity() for _ in range(6)]
    layers[3] = ROWS[name].make(jax.random.key(1))
    return layers


def called(model, x):
    return model(x, key=jax.random.key(0))


@jax.jit
def called_in_a_program(model, x):
    return jax.value_and_grad(lambda model: called(model, x).sum())(model)


def notes(call, *args):
    """Where the error was raised that the call ends in; None if it ends well."""
    try:
        call(*args)
    except Exception as error:
        return [note for note in error.__notes__ if note.startswith("Raised in ")]
    return None


@pytest.mark.parametrize("name", [name for name in ROWS if name not in TAKE_ANYTHING])
@pytest.mark.sample(6)
def test_the_fourth_of_six_layers_is_named(name):
    layers = six(name)
    # Layers that take any shape refuse what is not an array.
    for wrong in (jnp.ones((1, 11, 13)), jnp.ones(17, bool), object()):
        found = notes(called, Six(layers), wrong)
        if found is not None:
            break
    all_found = [(found, "Six"), (notes(called, nn.Sequential(layers), wrong), "Sequential")]
    if isinstance(wrong, jax.Array):
        compiled = notes(called_in_a_program, nn.Sequential(layers), wrong)
        all_found.append((compiled, "Sequential"))
    for (note,), model in all_found:
        assert note.startswith("Raised in model.layers[3]")
        assert f"({model} > {type(layers[3]).__name__}" in note


@pytest.mark.parametrize("name", TAKE_ANYTHING)
def test_layers_that_take_anything_leave_the_error_to_the_next_one(name):
    layers = six(name)
    anything = object()
    assert called(nn.Sequential(layers), anything) is anything
    layers[4] = nn.Linear(3, 3, key=jax.random.key(0))
    (note,) = notes(called, nn.Sequential(layers), jnp.ones(2))
    assert note == "Raised in model.layers[4] (Sequential > Linear)"


@pytest.mark.parametrize(
    "around",
    [
        lambda layers, key: nn.Stack(lambda _: nn.Sequential(layers), 2, key=key),
        lambda layers, key: nn.cast(nn.Sequential(layers), nn.Policy()),
        lambda layers, key: vernal.filter_checkpoint(nn.Sequential(layers)),
    ],
    ids=["Stack", "cast", "checkpoint"],
)
def test_the_path_leads_through_what_rebuilds_its_layers(around):
    one, two = jax.random.split(jax.random.key(0))
    layers = [nn.Linear(3, 3, key=one), nn.Dropout(0.5), nn.Linear(2, 3, key=two)]
    model = nn.Sequential([nn.Identity(), around(layers, one)])
    for call in (model, lambda x, **_: vernal.debug.summary(model, x)):
        (note,) = notes(called, call, jnp.ones(3))
        path = note.split()[2]
        frozen = vernal.freeze(model, path)
        is_frozen = [type(x).__name__ for x in _linears(frozen) if vernal.modules.is_frozen(x)]
        assert is_frozen == ["Linear"] and vernal.modules.is_frozen(_linears(frozen)[1])


def _linears(model):
    return [x for x in jax.tree.leaves(model, is_leaf=_is_linear) if _is_linear(x)]


def _is_linear(x):
    return isinstance(x, nn.Linear)


def test_the_path_of_an_error_can_be_pasted():
    keys = jax.random.split(jax.random.key(0))
    inner = nn.Sequential([nn.Identity(), nn.Linear(3, 2, key=keys[0])])
    model = nn.Sequential([nn.Linear(2, 2, key=keys[1]), inner])
    with pytest.raises(ValueError, match="Linear") as caught:
        model(jnp.ones(2))
    path = caught.value.__notes__[0].split()[2]
    assert path == "model.layers[1].layers[1]"
    wrong = model.layers[1].layers[1]
    assert vernal.freeze(model, path) == vernal.freeze(model, lambda m: m.layers[1].layers[1])
    assert vernal.tree_at(path, model, nn.Identity()).layers[1].layers[1] == nn.Identity()
    zeros = nn.initialise(model, {path: jax.nn.initializers.zeros}, keys[0])
    assert not zeros.layers[1].layers[1].weight.any() and wrong.weight.any()
