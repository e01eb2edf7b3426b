"""The methods of a PyTorch module: a model has none of them, and says what to write."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import vernal
from vernal import nn
from vernal.modules._torch_names import INSTEAD


class Plain(vernal.Module):
    w: jax.Array


class Train(vernal.Module):
    """A class that has fields, a property and a method of such names."""

    train: jax.Array
    to: Any = None

    @property
    def half(self):
        return self.train / 2

    def eval(self):
        return self.train


@pytest.mark.parametrize("name", INSTEAD)
def test_each_name_says_what_to_write(name):
    model = Plain(jnp.ones(2))
    with pytest.raises(
        AttributeError, match=rf"'Plain' object has no attribute '{name}': write \S"
    ) as caught:
        getattr(model, name)
    assert (caught.value.name, caught.value.obj) == (name, model)
    with pytest.raises(
        AttributeError, match=f"type object 'Plain' has no attribute '{name}': write"
    ):
        getattr(Plain, name)
    assert not hasattr(model, name)
    assert name not in dir(model)


def test_what_a_class_has_of_such_a_name_is_used():
    model = Train(jnp.ones(2))
    step = vernal.filter_jit(
        lambda model: vernal.tree_at("train", model, model.train + model.eval())
    )
    for new in (step(step(model)), copy.deepcopy(step(step(model)))):
        assert new.train.tolist() == [4.0, 4.0]
        assert new.half.tolist() == [2.0, 2.0]
        assert new.to is None
        assert {"train", "half", "eval", "to"} <= set(dir(new))
    assert step.trace_count == 1
    assert pickle.loads(pickle.dumps(Plain(jnp.ones(2)))).w.shape == (2,)


def test_a_field_of_such_a_name_has_no_default():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'train'"):
        Train()  # pyright: ignore[reportCallIssue]


def test_other_missing_attributes_are_python_s_error():
    with pytest.raises(AttributeError, match="^'Plain' object has no attribute 'weight'$"):
        Plain(jnp.ones(2)).weight  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_layers_say_it_too():
    with pytest.raises(AttributeError, match=r"vernal\.nn\.inference_mode\(model\)"):
        nn.Linear(2, 2, key=jax.random.key(0)).eval()  # pyright: ignore[reportAttributeAccessIssue]
