"""Rules with logical names: the same model on two meshes by two dictionaries."""

import inspect

import jax
import pytest
from jax import P

from vernal import nn
from vernal.sharding import logical_to_mesh, make_mesh, place

RULES = {
    "layers.0.weight": P("mlp", "embed"),
    "layers.0.bias": P("mlp"),
    "layers.1.weight": P("embed", "mlp"),
    "layers.1.bias": P("embed"),
}


@pytest.mark.parametrize(
    ("sizes", "axes", "first"),
    [
        (dict(data=4, model=2), {"mlp": "model", "embed": None}, P("model", None)),
        (dict(data=4, model=2), {"mlp": "model", "embed": "data"}, P("model", "data")),
        (dict(a=2, b=4), {"mlp": ("a", "b"), "embed": None, "heads": "a"}, P(("a", "b"), None)),
    ],
)
def test_one_dictionary_says_how_a_model_lies_on_a_mesh(sizes, axes, first):
    model = nn.MLP(4, 4, 16, 1, key=jax.random.key(0))
    placed = place(model, make_mesh(**sizes), logical_to_mesh(RULES, axes))
    assert placed.layers[0].weight.sharding.spec == first


def test_logical_names_together_are_cut_over_all_their_axes():
    rules = logical_to_mesh({"w": P(("heads", "size"))}, {"heads": "model", "size": "data"})
    assert rules == {"w": P(("model", "data"))}


def test_a_name_that_is_mapped_to_nothing_is_refused():
    with pytest.raises(ValueError, match=r"does not map(.|\n)*'embed': None"):
        logical_to_mesh(RULES, {"mlp": "model"})


def test_an_axis_of_the_mesh_twice_is_refused():
    with pytest.raises(ValueError, match="cut over the same axis of the mesh"):
        logical_to_mesh(RULES, {"mlp": "model", "embed": "model"})


def test_a_rule_that_is_no_spec_is_refused():
    with pytest.raises(TypeError, match="jax.P of logical names"):
        inspect.unwrap(logical_to_mesh)({"w": None}, {})
