"""Defects of Equinox 0.13.8, and what happens here instead."""

import dataclasses
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import Module, field, filter_jit, tree_at

T = TypeVar("T")


class Box(Module, Generic[T]):
    x: Any
    y: Any = 0


def test_extra_attributes_do_not_change_the_treedef():
    # Equinox: G[int](1) and G(1) have different treedefs, so tree_map over both fails; after a round
    # trip the instance has lost the attribute and has grown `__doc__`, `__name__`, ... equal to a sentinel.
    plain, extra = Box(jnp.ones(1)), Box[int](jnp.ones(1))
    object.__setattr__(extra, "note", "mine")
    assert extra.note == "mine"
    assert jax.tree.structure(plain) == jax.tree.structure(extra)
    jax.tree.map(jnp.add, plain, extra)
    again = jax.tree.map(lambda x: x, extra)
    assert not hasattr(again, "note")
    assert not hasattr(again, "__name__")
    assert again.__doc__ == Box.__doc__
    assert jax.tree.structure(again) == jax.tree.structure(plain)


def test_a_call_of_a_compiled_function_does_not_wait_for_its_result():
    # Equinox: every call of filter_jit blocks until the computation has finished.
    @filter_jit
    def f(x):
        # Much more work than there is between a call and the next line, and of a kind (products of
        # matrices) that JAX does not run inside the call itself.
        return jax.lax.fori_loop(0, 300, lambda i, x: jnp.tanh(x @ x), x), "static"

    x = jnp.ones((500, 500))
    jax.block_until_ready(f(x))
    out, static = f(x)
    assert not out.is_ready()
    assert static == "static"
    assert jax.block_until_ready(out).is_ready()


def test_duplicate_targets_are_refused():
    # Equinox: tree_at(lambda t: (t[0], t[0]), [1, 2], (5, 6)) silently gives [6, 2].
    with pytest.raises(ValueError, match="the same node is picked twice"):
        tree_at(lambda t: (t[0], t[0]), [1, 2], (5, 6))


def test_fields_cannot_be_deleted():
    # Equinox: `del module.field` works, and the module cannot be flattened any more.
    box = Box(jnp.ones(1))
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete `x`"):
        del box.x
    assert len(jax.tree.leaves(box)) == 1


def test_arrays_of_objects_are_not_arrays():
    # Equinox: is_array_like and friends say yes to np.array([None]), which fails inside JAX.
    for array in (np.array([None]), np.array(["text"]), np.array([object()])):
        assert not vernal.is_array(array)
        assert not vernal.is_array_like(array)
        with pytest.raises(
            ValueError, match=r"can change in place[\s\S]*\.x of [\s\S]*a tuple of Python"
        ):
            Box(array)


def test_an_array_in_a_static_field_is_refused_at_once_and_by_name():
    # Equinox: a warning, then the second call of a compiled function fails comparing arrays, naming no field.
    class M(Module):
        table: Any = field(static=True)

    with pytest.raises(ValueError, match=r"an array cannot be static[\s\S]*\.table of "):
        M(np.ones(3))


def test_a_jitted_function_in_a_field_is_structure_and_one_with_arrays_is_refused():
    # Equinox: warns (twice on some paths) about any jax-transformed callable with arrays, and trains nothing.
    assert jax.tree.leaves(Box(jax.jit(jnp.sin))) == []
    with pytest.raises(ValueError, match="arrays inside this function would be constants"):
        Box(jax.jit(Box(jnp.ones(1)).__repr__))


def test_misspelt_class_options_are_refused():
    # Equinox: `force_abstract=True` is swallowed and has no effect.
    with pytest.raises(TypeError, match="takes no keyword arguments"):

        class M(Module, force_abstract=True):
            pass


def test_strictness_is_enforced():
    # Equinox: `strict=True` does nothing.
    class A(Module, strict=True, is_abstract=True):
        def f(self):
            return 1

    with pytest.raises(TypeError, match="`f` is already implemented"):

        class B(A):
            def f(self):
                return 2


def test_modules_with_arrays_can_be_hashed():
    # Equinox: hash(module) raises, so jax.jit(module), lax.scan(cell, ...) and lax.switch over methods fail.
    assert {Box(jnp.ones(1)): "value"}


def test_stringified_abstract_annotations_work():
    # Equinox: `"AbstractVar[int]"` raises NotImplementedError.
    cls = type(Module)("A", (Module,), {"__annotations__": {"x": "AbstractVar[int]"}})
    assert cls.__abstractvars__ == {"x"}


def test_the_wrapper_of_a_function_has_no_leaves():
    # Equinox: tree_leaves(filter_jit(g)) == ['g'], so that plain jax.jit refuses it as an argument.
    assert jax.tree.leaves(filter_jit(jnp.sin)) == []
    assert jax.jit(lambda f, x: f(x))(filter_jit(jnp.sin), 0.0) == 0


def test_numpy_and_jax_arrays_share_a_program():
    count = []
    f = filter_jit(lambda m: count.append(1))
    f(Box(np.ones(2, np.float32)))
    f(Box(jnp.ones(2)))
    assert len(count) == 1


def test_methods_do_not_build_modules():
    # Equinox: reading `module.method` constructs a module, some twenty microseconds each time.
    built = []

    class M(Module):
        def __init__(self):
            built.append(1)

        def method(self):
            return self

    m = M()
    for _ in range(3):
        assert not isinstance(m.method, Module)
    assert built == [1]
