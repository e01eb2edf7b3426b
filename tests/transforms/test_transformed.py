"""What every transformed function has in common."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from vernal import Module, filter_jit, tree_at
from vernal.modules import BoundMethod
from vernal.transforms._transformed import Transformed, check_callable, wrap


class Bare(Transformed):
    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


def add(x, y=1):
    "Adds."
    return x + y


def test_the_base_is_abstract():
    with pytest.raises(TypeError, match="abstract class Transformed"):
        Transformed(add)


def test_what_is_wrapped_is_seen_from_outside():
    bare = wrap(Bare(add))
    assert bare.__wrapped__ is add
    assert (bare.__name__, bare.__doc__) == ("add", "Adds.")
    assert list(inspect.signature(bare).parameters) == ["x", "y"]
    assert bare(1) == 2


def test_it_binds_as_a_method_does():
    class Owner(Module):
        w: Any
        f = wrap(Bare(add))

    owner = Owner(jnp.ones(1))
    assert Owner.f is vars(Owner)["f"]
    assert type(owner.f) is BoundMethod
    assert owner.f.__self__ is owner
    assert owner.f.__func__ is Owner.f
    assert len(jax.tree.leaves(owner.f)) == 1


def test_what_cannot_be_called_is_refused():
    with pytest.raises(
        TypeError,
        match=r"my_transform needs a function[\s\S]*my_transform\(f\)\(x\) rather than my_transform\(f\(x\)\)",
    ):
        check_callable(3, "my_transform")
    check_callable(add, "my_transform")


def test_it_may_wrap_what_hides_arrays():
    hidden = jax.vmap(lambda x: x, in_axes=0)
    assert filter_jit(jax.jit(hidden))(jnp.ones(2)).shape == (2,)

    class Layer(Module):
        w: Any

        def __call__(self, x):
            return self.w * x

    assert filter_jit(jax.vmap(Layer(jnp.ones(()))))(jnp.ones(2)).shape == (2,)


def test_surgery_reaches_the_wrapped_module():
    class Layer(Module):
        w: Any

        def __call__(self, x):
            return self.w * x

    f = filter_jit(Layer(jnp.ones(2)))
    g = tree_at(lambda f: f.fn.w, f, jnp.zeros(2))
    assert (f(1.0) == 1).all()
    assert (g(1.0) == 0).all()
