"""The ways in which a function reaches a compiled program or a model, and the rule that every
answer is held to.

A *route* takes `(f, x)` and returns what the library says `f(x)` is. `Answers` compares it with
plain Python. Two answers are right: what `f(x)` is now, and what this very object has answered
before at this shape and dtype, because a compiled program is chosen by the identity of a function
and not by its state, as in `jax.jit`. An answer that belongs to another function, or to a state of
this one in which it was never called with such an `x`, is wrong.
"""

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

import vernal

X, Y, Z = jnp.ones(2), jnp.ones(3), jnp.ones(4)
ONE = jnp.ones(())

Route = Callable[[Any, Any], Any]


class Holder(vernal.Module):
    """A model with a function in a field."""

    w: jax.Array
    f: Any

    def __call__(self, x):
        return self.f(x) * self.w


class StaticHolder(vernal.Module):
    """A model with a function in a static field."""

    w: jax.Array
    f: Any = vernal.field(static=True)


JAX_JIT = threading.RLock()


def jax_jit(f: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` for structures that are compared in Python, by one thread at a time: see
    CONTRIBUTING.md on threads."""
    jitted = jax.jit(f)

    def call(*args):
        with JAX_JIT:
            return jitted(*args)

    return call


def number_of(k: Any) -> float:
    """A number that tells 1, 1.0 and True, and 0.0 and -0.0, apart."""
    return math.copysign(abs(k) + len(type(k).__name__), k)


def argument() -> Route:
    return vernal.filter_jit(lambda f, x: f(x))


def keyword() -> Route:
    step = vernal.filter_jit(lambda f, x: f(x))
    return lambda f, x: step(x=x, f=f)


def in_containers() -> Route:
    step = vernal.filter_jit(lambda held, x: held["a"][0][1](x))
    return lambda f, x: step({"a": [(1.0, f)]}, x)


def given() -> Route:
    return lambda f, x: vernal.filter_jit(f)(x)


def in_partial() -> Route:
    step = vernal.filter_jit(lambda f, x: f(x))
    return lambda f, x: step(functools.partial(f), x)


def in_jax_partial() -> Route:
    step = vernal.filter_jit(lambda f, x: f(x))
    return lambda f, x: step(jtu.Partial(f), x)


def in_vernal_partial() -> Route:
    step = vernal.filter_jit(lambda f, x: f(x))
    return lambda f, x: step(vernal.Partial(f), x)


def in_vernal_partial_of_jax_jit() -> Route:
    step = jax_jit(lambda f, x: f(x))
    return lambda f, x: step(vernal.Partial(f), x)


def in_vernal_static() -> Route:
    step = jax_jit(lambda static, x: static.value(x))
    return lambda f, x: step(vernal.Static(f), x)


def in_filter_jit() -> Route:
    step = vernal.filter_jit(lambda f, x: f(x))
    return lambda f, x: step(vernal.filter_jit(f), x)


def in_filter_vmap() -> Route:
    step = vernal.filter_jit(lambda f, x: f(x))
    return lambda f, x: step(vernal.filter_vmap(f), x)


def in_filter_checkpoint() -> Route:
    step = vernal.filter_jit(lambda f, x: f(x))
    return lambda f, x: step(vernal.filter_checkpoint(f), x)


def in_filter_grad() -> Route:
    # f is linear: the derivative of sum(f(x) * x) / 2 is f(x) where f(x) = k * x.
    step = vernal.filter_jit(lambda f, x: f(x))
    return lambda f, x: step(vernal.filter_grad(lambda x: jnp.sum(f(x) * x) / 2), x)


def field() -> Route:
    step = vernal.filter_jit(lambda model, x: model(x))
    return lambda f, x: step(Holder(ONE, f), x)


def field_of_jax_jit() -> Route:
    step = jax_jit(lambda model, x: model(x))
    return lambda f, x: step(Holder(ONE, f), x)


def static_field() -> Route:
    step = jax_jit(lambda model, x: model.f(x) * model.w)
    return lambda f, x: step(StaticHolder(ONE, f), x)


def list_in_field() -> Route:
    step = jax_jit(lambda model, x: model.f[1]["f"](x) * model.w)
    return lambda f, x: step(Holder(ONE, [ONE, {"f": f}]), x)


def tuple_in_field() -> Route:
    step = vernal.filter_jit(lambda model, x: model.f[0][0](x) * model.w)
    return lambda f, x: step(Holder(ONE, ((f, "text"), 1)), x)


def module_in_field() -> Route:
    step = jax_jit(lambda model, x: model(x))
    return lambda f, x: step(Holder(ONE, Holder(ONE, f)), x)


def module_given() -> Route:
    return lambda f, x: vernal.filter_jit(Holder(ONE, f))(x)


def module_given_to_jax_jit() -> Route:
    return lambda f, x: jax_jit(Holder(ONE, f))(x)


def method_given() -> Route:
    step = vernal.filter_jit(lambda f, x: f(x))
    return lambda f, x: step(Holder(ONE, f).__call__, x)


def filter_grad_of_field() -> Route:
    step = vernal.filter_jit(vernal.filter_value_and_grad(lambda model, x: jnp.sum(model(x))))
    return lambda f, x: step(Holder(ONE, f), x)[0] * x / x.size


def _kept(pass_on: Callable[[Any], Any]) -> Route:
    # Every model stays alive, as in a program that compares several.
    models: list[Any] = []

    def call(f: Any, x: Any) -> Any:
        models.append(Holder(ONE, f))
        models.append(pass_on(models[-1]))
        return models[-1](x)

    return call


def tree_map() -> Route:
    return _kept(lambda model: jax.tree.map(lambda leaf: leaf, model))


def unflattened() -> Route:
    return _kept(lambda model: jax.tree.unflatten(jax.tree.structure(model), [ONE]))


def tree_at() -> Route:
    return _kept(lambda model: vernal.tree_at(lambda m: m.w, model, jnp.ones(())))


def partition() -> Route:
    return _kept(lambda model: vernal.combine(*vernal.partition(model, vernal.is_array)))


def result() -> Route:
    return _kept(vernal.filter_jit(lambda model: model))


def result_of_jax_jit() -> Route:
    return _kept(jax_jit(lambda model: model))


# A function that holds an array is refused in a field, and may be an argument.
ARGUMENT_ROUTES = (argument, in_containers, given, in_partial)
FIELD_ROUTES = (
    field,
    field_of_jax_jit,
    static_field,
    list_in_field,
    tuple_in_field,
    module_in_field,
    module_given,
    module_given_to_jax_jit,
    method_given,
    filter_grad_of_field,
    tree_map,
    unflattened,
    tree_at,
    partition,
    result,
    result_of_jax_jit,
)
WRAPPED_ROUTES = (
    keyword,
    in_jax_partial,
    in_vernal_partial,
    in_vernal_partial_of_jax_jit,
    in_vernal_static,
    in_filter_jit,
    in_filter_vmap,
    in_filter_checkpoint,
    in_filter_grad,
)
MAIN_ROUTES = (argument, field, field_of_jax_jit, tree_map)


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=True)


class Answers:
    """Asks one route, and holds its answers to the rule at the top of this file."""

    def __init__(self, route: Callable[[], Route]):
        self.name = route.__name__
        self.call = route()
        self.given: dict[Any, list[Any]] = {}
        self.alive: list[Any] = []

    def check(self, f: Any, x: Any = X, parts: Any = None) -> None:
        """Fails if the answer for `f` is not its own.

        Args:
            f: a pure function.
            x: what it is called with.
            parts: for a partial or a bound method of a module: what it is made of. Two with the same
                parts are one function.
        """
        now = np.asarray(f(x))
        key = (id(f) if parts is None else parts, x.shape, x.dtype)
        self.alive.append(f)
        earlier = self.given.setdefault(key, [])
        got = np.asarray(self.call(f, x))
        if not any(_same(got, right) for right in (now, *earlier)):
            raise AssertionError(
                f"route `{self.name}`: this answer belongs to another function, or to a state in which "
                f"this one was never called with such an argument.\n"
                f"  the library says   {got!r}\n"
                f"  plain Python says  {now!r}\n"
                f"  its own earlier answers for this shape and dtype: {earlier!r}"
            )
        earlier.append(got)
