"""A module is an ordinary Python object."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from vernal import Module, field


class M(Module):
    "A documented class."

    w: jax.Array
    name: str = "m"
    hidden: Any = field(default=None, repr=False)

    def method(self):
        "A documented method."
        return self.w

    @property
    def width(self):
        return len(self.w)


def m():
    return M(jnp.ones(2))


def test_it_prints_like_a_dataclass():
    assert repr(m()) == "M(w=f32[2])" or repr(m()) == "M(w=f32[2], name='m')"
    assert str(m()) == repr(m())
    assert f"{m()}" == repr(m())
    assert "f32[2]" in repr(jax.tree.map(lambda x: x, m()))
    assert "True" in repr(jax.tree.map(lambda x: True, m()))


def test_it_prints_while_it_is_built_and_traced():
    texts = []

    class N(Module):
        x: Any
        y: Any

        def __init__(self):
            self.x = 1
            texts.append(repr(self))
            self.y = 2

    N()
    assert "x=1" in texts[0]
    jax.jit(lambda m: texts.append(repr(m)))(m())
    assert "f32[2]" in texts[1]


def test_attributes_are_found_and_missing_ones_are_not():
    module = m()
    assert getattr(module, "name", None) == "m"
    assert getattr(module, "other", 5) == 5
    assert hasattr(module, "width")
    assert not hasattr(module, "nothing")
    with pytest.raises(AttributeError, match="'M' object has no attribute 'nothing'"):
        _ = module.nothing
    assert {"w", "name", "method", "width"} <= set(dir(module))


def test_vars_hold_the_fields_and_two_marked_entries():
    module = m()
    jax.tree.leaves(module)
    assert {name for name in vars(module) if not name.startswith("_vernal")} == {
        "w",
        "name",
        "hidden",
    }


def test_it_is_true_callable_only_if_it_says_so_and_documented():
    assert m()
    assert not callable(m())
    assert M.__doc__ == "A documented class."
    assert M.method.__doc__ == m().method.__doc__ == "A documented method."
    assert M.__module__ == __name__
    assert isinstance(m(), Module)
    assert issubclass(M, Module)


def test_operators_are_the_users_own():
    class V(Module):
        x: jax.Array

        def __add__(self, other):
            return V(self.x + other.x)

        def __getitem__(self, i):
            return self.x[i]

        def __len__(self):
            return 0

    assert (V(1.0) + V(2.0)).x == 3
    assert V(jnp.arange(3))[1] == 1
    assert not V(1.0)
    assert len(jax.tree.leaves(V(1.0))) == 1


def test_a_user_may_define_equality_and_hash():
    class V(Module):
        x: Any

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

    assert V(1) == 2
    assert hash(V(1)) == 1


def test_getattr_hooks_of_the_user_do_not_disturb():
    class Proxy(Module):
        inner: Any

        def __getattr__(self, name):
            return getattr(self.inner, name)

    p = Proxy(m())
    assert p.name == "m"
    assert len(jax.tree.leaves(p)) == 1
    assert jax.jit(lambda p: p)(p).name == "m"
    assert repr(p)


def test_module_classes_work_with_isinstance_sets_and_sorting_by_key():
    items = sorted([M(jnp.ones(1), "b"), M(jnp.ones(1), "a")], key=lambda x: x.name)
    assert [x.name for x in items] == ["a", "b"]
    assert len({M, Module}) == 2
