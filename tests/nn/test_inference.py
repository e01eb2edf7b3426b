"""`inference_mode`: every attribute of that name, wherever it is and whatever it was."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import vernal
from vernal import nn
from vernal.nn import inference_mode
from vernal.trees import set_attributes


class Block(vernal.Module):
    inference: bool
    dropout: nn.Dropout
    others: Any
    weight: jax.Array


class Pair(NamedTuple):
    inference: bool
    dropout: nn.Dropout


def build(inference):
    def dropout():
        return nn.Dropout(0.5, inference)

    others = [dropout(), jax.nn.relu, {"inference": 7, "b": (dropout(), "text", None)}, ()]
    return Block(inference, dropout(), others, jnp.ones(3))


def test_all_of_them_are_set_and_nothing_else_changes():
    model = build(False)
    assert inference_mode(model) == build(True)
    assert inference_mode(build(True), value=False) == model
    assert model == build(False)
    assert jax.tree.structure(inference_mode(model)) == jax.tree.structure(build(True))


def test_what_holds_no_such_attribute_is_returned_as_it_is():
    tree = [jnp.ones(3), None, nn.LayerNorm(2), "text", jax.nn.relu]
    assert inference_mode(tree) is tree
    assert inference_mode(3) == 3


def test_containers_and_named_tuples_are_searched():
    found = inference_mode((Pair(False, nn.Dropout()), [nn.Dropout()]))
    assert found == (Pair(True, nn.Dropout(0.5, True)), [nn.Dropout(0.5, True)])


def test_modules_of_equinox_are_reached_too():
    assert inference_mode([eqx.nn.Dropout()])[0].inference is True


def test_it_works_inside_jit_and_on_a_trained_model(getkey):
    model = nn.Sequential([nn.Linear(3, 3, key=getkey()), nn.Dropout(0.5), jnp.tanh])
    x = jax.random.normal(getkey(), (3,))
    expected = jnp.tanh(model[0](x))
    assert jnp.allclose(jax.jit(lambda m, x: inference_mode(m)(x))(model, x), expected)
    assert jnp.allclose(inference_mode(jax.tree.map(lambda a: a, model))(x), expected)


def test_an_array_or_a_subtree_of_that_name_is_replaced_whole():
    class Odd(vernal.Module):
        inference: Any

    for old in (jnp.array(False), None, [1, 2], Odd(Odd(False)), "no"):
        assert inference_mode(Odd(old)).inference is True


def test_a_property_of_that_name_is_left_alone():
    class Derived(vernal.Module):
        dropout: nn.Dropout

        @property
        def inference(self):
            return self.dropout.inference

    assert inference_mode(Derived(nn.Dropout())).inference is True


def test_a_static_field_is_refused_rather_than_left_in_training():
    class Fixed(vernal.Module):
        inference: bool = vernal.field(static=True)

    with pytest.raises(TypeError, match=r"(?s)static field.*Fixed\.inference.*without static=True"):
        inference_mode([Fixed(False)])


def test_any_attribute_can_be_set_by_its_name():
    model = set_attributes(build(False), "p", 0.1)
    assert model.dropout.p == 0.1 and model.others[2]["b"][0].p == 0.1
    assert model.weight is not None
