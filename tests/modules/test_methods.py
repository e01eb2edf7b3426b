"""Methods of a module: callable trees that can cross any transformation."""

import functools
import inspect
import types
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

import vernal
from vernal import Module, filter_jit
from vernal.modules import BoundMethod


class M(Module):
    w: jax.Array
    name: str = "m"

    def scale(self, x: jax.Array, by: float = 1.0) -> jax.Array:
        "Scales."
        return self.w * x * by

    def cond(self, carry):
        return jnp.sum(carry) < jnp.sum(self.w) * 100

    def body(self, carry):
        return carry + self.w

    def step(self, carry, x):
        return carry + self.w * x, carry

    def __call__(self, x):
        return self.scale(x)

    @classmethod
    def make(cls):
        return cls(jnp.ones(2))

    @staticmethod
    def helper(x):
        return x + 1

    @property
    def total(self):
        return jnp.sum(self.w)

    @functools.cached_property
    def cached(self):
        return jnp.sum(self.w)


def m():
    return M(jnp.array([1.0, 2.0]))


def test_a_method_is_a_pytree_of_its_module():
    module = m()
    method = module.scale
    assert type(method) is BoundMethod
    assert jax.tree.leaves(method) == jax.tree.leaves(module)
    assert [jtu.keystr(p) for p, _ in jtu.tree_leaves_with_path(method)] == [".__self__.w"]
    doubled = jax.tree.map(lambda x: 2 * x, method)
    assert (doubled(1.0) == 2 * module.w).all()
    assert doubled.__func__ is method.__func__


def test_it_looks_like_the_function_it_is():
    method = m().scale
    assert method.__name__ == "scale"
    assert method.__doc__ == "Scales."
    assert method.__qualname__ == "M.scale"
    assert method.__annotations__["by"] is float
    assert list(inspect.signature(method).parameters) == ["x", "by"]
    assert method.__func__ is M.scale
    assert isinstance(method.__wrapped__, types.MethodType)
    assert (method.__wrapped__(1.0) == method(1.0)).all()
    assert "bound method M.scale of M(" in repr(method)
    assert inspect.isfunction(M.scale)
    with pytest.raises(AttributeError, match="not_there"):
        _ = method.not_there


def test_methods_are_equal_when_function_and_module_are():
    one, two = m(), m()
    assert one.scale == one.scale
    assert one.scale is not one.scale
    assert hash(one.scale) == hash(one.scale)
    assert one.scale == two.scale
    assert one.scale != one.body
    assert one.scale != M(jnp.zeros(2)).scale
    assert one.scale != one.__call__
    assert one.scale != 1


def test_a_call_is_a_method_like_any_other():
    module = m()
    assert type(module.__call__) is BoundMethod
    assert jax.tree.leaves(module.__call__) == jax.tree.leaves(module)
    assert module.__call__ == m().__call__
    assert hash(module.__call__) == hash(module.__call__)


class Scales(Module):
    weights: list

    def __call__(self, x):
        return self.weights[0] * x


class ScalesAgain(Scales):
    def __call__(self, x):
        return filter_jit(super().__call__)(x)


@pytest.mark.parametrize("route", [
    filter_jit,
    lambda f: filter_jit(vernal.filter_vmap(f, in_axes=None, axis_size=1)),
    lambda f: functools.partial(filter_jit(lambda f, x: f(x)), f),
    lambda f: filter_jit(vernal.Partial(f)),
], ids=["function", "mapped", "argument", "Partial"])  # fmt: skip
@pytest.mark.parametrize("cls", [Scales, ScalesAgain])
def test_a_call_that_is_compiled_sees_the_arrays_of_its_module(cls, route):
    module = cls([jnp.ones(())])
    f = route(module.__call__)
    assert f(2.0) == 2.0
    module.weights[0] = jnp.array(3.0)
    assert f(2.0) == 6.0


def test_calls_of_modules_that_differ_in_arrays_alone_are_one_program():
    step = filter_jit(lambda f, x: f(x))
    assert [float(step(Scales([jnp.array(k)]).__call__, 2.0)) for k in (1.0, 2.0)] == [2.0, 4.0]
    assert step.trace_count == 1


def test_class_methods_static_methods_and_properties_are_untouched():
    assert M.make().w.shape == (2,)
    assert m().make().w.shape == (2,)
    assert M.helper(1) == m().helper(1) == 2
    assert type(m().helper) is types.FunctionType
    assert m().total == 3
    module = m()
    assert module.cached is module.cached


def test_super_reaches_the_methods_of_the_parent():
    class Sub(M):
        def scale(self, x, by=1.0):
            return super().scale(x, by=by) + 1

    sub = Sub(jnp.ones(2))
    assert (sub.scale(2.0) == 3).all()
    assert (super(Sub, sub).scale(2.0) == 2).all()
    assert (M.scale(sub, 2.0) == 2).all()


def test_a_method_goes_through_every_plain_transformation():
    module = m()
    x = jnp.ones(2)
    assert jnp.allclose(jax.jit(module.scale)(x), module.w)
    assert jax.jit(lambda f, x: f(x))(module.scale, x).shape == (2,)
    assert jax.vmap(module.scale)(jnp.ones((3, 2))).shape == (3, 2)
    assert jnp.allclose(jax.grad(lambda x: jnp.sum(module.scale(x)))(x), module.w)
    assert jax.checkpoint(module.scale)(x).shape == (2,)
    final, ys = jax.lax.scan(module.step, jnp.zeros(2), jnp.arange(3.0))
    assert jnp.allclose(final, module.w * 3)
    assert ys.shape == (3, 2)
    out = jax.lax.while_loop(module.cond, module.body, jnp.zeros(2))
    assert jnp.sum(out) >= 300
    assert jax.eval_shape(module.scale, x).shape == (2,)
    assert jax.lax.cond(True, module.scale, module.body, x).shape == (2,)
    assert jax.lax.map(module.scale, jnp.ones((3, 2))).shape == (3, 2)


def test_loops_over_methods_work_under_transformations_of_the_module():
    @jax.jit
    @jax.grad
    def loss(module):
        final, _ = jax.lax.scan(module.step, jnp.zeros(2), jnp.arange(3.0))
        return jnp.sum(final)

    assert jnp.allclose(loss(m()).w, 3.0)

    def limit(module):
        return jax.lax.while_loop(module.cond, module.body, jnp.zeros(2))

    stacked = jax.vmap(M)(jnp.ones((3, 2)))
    assert jax.vmap(limit)(stacked).shape == (3, 2)


def test_a_loop_over_a_method_is_traced_once_while_the_first_one_lives():
    traces = []

    class N(Module):
        w: jax.Array

        def step(self, carry, x):
            traces.append(1)
            return carry + self.w, None

    module = N(jnp.ones(()))
    # JAX forgets what it traced when the function that it was given dies.
    step = module.step
    for function in (step, module.step, module.step):
        jax.lax.scan(function, 0.0, None, length=2)
    assert len(traces) == 1


def test_a_method_stored_on_another_class_is_not_bound_again():
    class Other(Module):
        borrowed = m().scale

    assert (Other().borrowed(1.0) == m().w).all()


def test_lambdas_and_late_functions_bind_like_methods():
    class N(Module):
        x: Any
        twice = lambda self: 2 * self.x  # noqa: E731 (a method)

    assert N(2).twice() == 4
    N.late = lambda self: 3 * self.x
    assert N(2).late() == 6


def test_compiled_methods():
    class N(Module):
        w: jax.Array

        @filter_jit
        def f(self, x, n=1):
            "Doc."
            return self.w * x * n

        @filter_jit
        def __call__(self, x):
            return self.f(x)

        @jax.jit
        def plain(self, x):
            return self.w + x

    module = N(jnp.ones(2))
    assert type(module.f) is BoundMethod
    assert module.f.__name__ == "f"
    assert module.f.__doc__ == "Doc."
    assert list(inspect.signature(module.f).parameters) == ["x", "n"]
    assert module.f == module.f
    assert hash(module.f) == hash(module.f)
    for _ in range(2):
        assert (module.f(2.0, n=3) == 6).all()
        assert (module.f(x=2.0, n=3) == 6).all()
        assert (module(2.0) == 2).all()
        assert (module.plain(2.0) == 3).all()
    assert N.f.trace_count == 2
    assert N.__call__.trace_count == 1
    assert N.f.lower(module, 1.0).compile()(N(jnp.zeros(2)), 1.0).shape == (2,)
    assert len(jax.tree.leaves(module.f)) == 1
    final, _ = jax.lax.scan(lambda c, _: (module.f(c), None), jnp.ones(2), None, length=2)
    assert final.shape == (2,)


def test_async_and_generator_methods_stay_what_they_are():
    class N(Module):
        x: Any

        def items(self):
            yield from range(self.x)

    assert list(N(3).items()) == [0, 1, 2]
