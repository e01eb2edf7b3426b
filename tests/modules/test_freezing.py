"""Modules do not change once they are built."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from vernal import Module


class M(Module):
    x: Any
    y: Any = 0

    def method(self):
        return self.x


FINISHED = {
    "built": lambda: M(jnp.ones(1)),
    "mapped": lambda: jax.tree.map(lambda x: x, M(jnp.ones(1))),
    "jitted": lambda: jax.jit(lambda m: m)(M(jnp.ones(1))),
}


@pytest.mark.parametrize("make", FINISHED.values(), ids=FINISHED)
@pytest.mark.parametrize("name", ["x", "y", "undeclared", "method", "__class__"])
def test_assigning_after_construction_is_refused(make, name):
    with pytest.raises(
        dataclasses.FrozenInstanceError,
        match=rf"cannot assign `{name}`: modules are immutable[\s\S]*tree_at.*vernal\.nn\.Variable",
    ):
        setattr(make(), name, 1)


@pytest.mark.parametrize("make", FINISHED.values(), ids=FINISHED)
@pytest.mark.parametrize("name", ["x", "undeclared"])
def test_deleting_is_refused(make, name):
    with pytest.raises(
        dataclasses.FrozenInstanceError, match=f"cannot delete `{name}`: modules are immutable"
    ):
        delattr(make(), name)


def test_the_message_says_what_to_write_instead():
    with pytest.raises(
        AttributeError, match=r"vernal\.tree_at\(lambda m: m\.x, model, new_value\)"
    ):
        M(1).x = 2


def test_undeclared_names_are_refused_inside_init_too():
    class N(Module):
        x: Any

        def __init__(self):
            self.weight = 1

    with pytest.raises(
        dataclasses.FrozenInstanceError, match=r"`weight` is not a field of `.*N`[\s\S]*fields: x"
    ):
        N()


def test_a_class_without_fields_says_so():
    class N(Module):
        def __init__(self):
            self.x = 1

    with pytest.raises(dataclasses.FrozenInstanceError, match=r"declared fields: \(none\)"):
        N()


def test_deleting_inside_init_is_refused():
    class N(Module):
        x: Any

        def __init__(self):
            self.x = 1
            del self.x

    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete `x`"):
        N()


def test_assigning_again_inside_init_is_allowed():
    class N(Module):
        x: Any

        def __init__(self):
            self.x = 1
            self.x += 1

    assert N().x == 2


def test_an_augmented_assignment_from_outside_is_refused():
    m = M(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign `x`"):
        m.x += 1
    assert m.x == 1
