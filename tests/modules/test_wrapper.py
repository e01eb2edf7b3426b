"""`module_update_wrapper`."""

import functools
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from vernal import Module, module_update_wrapper, tree_at


class Twice(Module):
    fn: Any
    scale: jax.Array

    @property
    def __wrapped__(self):
        return self.fn

    def __call__(self, *args, **kwargs):
        return 2 * self.scale * self.fn(*args, **kwargs)


def add(x: float, y: float = 1.0) -> float:
    "Adds."
    return x + y


def twice():
    return module_update_wrapper(Twice(add, 1.0))


def test_it_takes_name_doc_and_signature():
    t = twice()
    assert (t.__name__, t.__qualname__, t.__doc__, t.__module__) == (
        "add",
        "add",
        "Adds.",
        __name__,
    )
    assert t.__annotations__ == add.__annotations__
    assert list(inspect.signature(t).parameters) == ["x", "y"]
    assert t(1.0) == 4
    assert inspect.unwrap(t) is add


def test_the_original_is_left_alone():
    plain = Twice(add, 1.0)
    module_update_wrapper(plain)
    assert not hasattr(plain, "__name__")
    assert Twice.__name__ == "Twice"


def test_another_source_may_be_given():
    def other():
        "Other."

    t = module_update_wrapper(Twice(add, 1.0), other)
    assert (t.__name__, t.__doc__) == ("other", "Other.")


def test_the_names_are_structure_and_stay():
    t = twice()
    assert len(jax.tree.leaves(t)) == 1
    for again in (
        jax.tree.map(lambda x: x, t),
        jax.jit(lambda t: t)(t),
        tree_at(lambda t: t.scale, t, 2.0),
        pickle.loads(pickle.dumps(t)),
    ):
        assert (again.__name__, again.__doc__) == ("add", "Adds.")
        assert jax.tree.structure(again) == jax.tree.structure(t)
    assert jax.tree.structure(twice()) == jax.tree.structure(t)
    assert tree_at(lambda t: t.scale, t, 2.0)(1.0) == 8


def test_wrapping_what_has_no_name_leaves_it_out():
    t = module_update_wrapper(Twice(functools.partial(add, 1.0), 1.0))
    assert not hasattr(t, "__name__")
    assert t() == 4
    t = module_update_wrapper(Twice(Twice(jnp.sin, 1.0), 1.0))
    assert not hasattr(t, "__name__")


def test_a_class_without_the_property_is_refused():
    class Bare(Module):
        fn: Any

    with pytest.raises(
        TypeError, match=r"module_update_wrapper needs a class with a property[\s\S]*`__wrapped__`"
    ):
        module_update_wrapper(Bare(add))
