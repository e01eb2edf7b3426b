"""No array hides in structure: there it would be a constant, never trained, updated or saved."""

import collections
import dataclasses
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from tests.soundness._answers import ONE, Holder, StaticHolder, X, Y

W = jnp.full((), 3.0)


def _free(w, x):
    return w * x


def _closure(w: Any) -> Any:
    return lambda x: w * x


def _default_closure(f: Any) -> Any:
    return lambda x, f=f: f(x)


def _decorated(w: Any) -> Any:
    @functools.wraps(jnp.tanh)
    def f(x):
        return w * x

    return f


def _recursive(w: Any) -> Any:
    def f(x, n=1):
        return f(x, n - 1) if n else w * x

    return f


def _cell_later(w: Any) -> Any:
    def f(x):
        return held * x

    held = w
    return f


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Hashed by identity, and called."""

    w: Any

    def __call__(self, x):
        return self.w * x


class Plain:
    """Neither called nor flattened."""

    def __init__(self, w):
        self.w = w


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w


class SlottedToo(Slotted):
    """With a `__dict__` besides."""


# Each makes from an array a function that holds it.
CALLABLES: dict[str, Callable[[Any], Any]] = {
    "closure": _closure,
    "default": lambda w: lambda x, w=w: w * x,
    "keyword default": lambda w: lambda x, *, w=w: w * x,
    "wraps": _decorated,
    "recursion": _recursive,
    "cell assigned later": _cell_later,
    "partial": lambda w: functools.partial(_free, w),
    "partial, keyword": lambda w: functools.partial(lambda x, w: w * x, w=w),
    "static method object": lambda w: staticmethod(_closure(w)),
    "method caller": lambda w: operator.methodcaller("__mul__", w),
    "method caller, keyword": lambda w: operator.methodcaller("dot", b=w),
    "partial of a closure": lambda w: functools.partial(_closure(w)),
    "partial of a partial": lambda w: functools.partial(functools.partial(_free), w),
    "closure over a partial": lambda w: (lambda p: lambda x: p(x))(functools.partial(_free, w)),
    "closure over a closure": lambda w: (lambda f: lambda x: f(x))(_closure(w)),
    "closure over a default": lambda w: (lambda f: lambda x: f(x))(lambda x, w=w: w * x),
    "default that is a closure": lambda w: _default_closure(_closure(w)),
    "closure over a list": lambda w: (lambda held: lambda x: held[0] * x)([w]),
    "closure over a dict": lambda w: (lambda held: lambda x: held["w"] * x)({"w": w}),
    "closure over a tuple of lists": lambda w: (lambda held: lambda x: held[0][0] * x)(([w],)),
    "closure over a deque": lambda w: (lambda held: lambda x: held[0] * x)(collections.deque([w])),
    "closure over a namespace": lambda w: (lambda held: lambda x: held.w * x)(
        types.SimpleNamespace(w=w)
    ),
    "closure over a mapping proxy": lambda w: (lambda held: lambda x: held["w"] * x)(
        types.MappingProxyType({"w": w})
    ),
    "closure over a module": lambda w: (lambda model: lambda x: model.w * x)(Holder(w, None)),
    "partial over a namespace": lambda w: functools.partial(
        lambda held, x: held.w * x, types.SimpleNamespace(w=w)
    ),
    "partial over a closure over a deque": lambda w: functools.partial(
        (lambda held: lambda k, x: k * held[0] * x)(collections.deque([w])), 1.0
    ),
    "method bound to a module": lambda w: types.MethodType(
        lambda self, x: self.w * x, Holder(w, None)
    ),
    "jax.jit of a closure": lambda w: jax.jit(_closure(w)),
    "jax.vmap of a closure": lambda w: jax.vmap(_closure(w)),
    "jax.grad of a closure": lambda w: jax.grad(_closure(w)),
}

# Each makes from an array a value that holds it and is not a function.
VALUES: dict[str, Callable[[Any], Any]] = {
    "deque": lambda w: collections.deque([w]),
    "frozenset of functions": lambda w: frozenset({_closure(w)}),
    "frozenset of models": lambda w: frozenset({Holder(w, None)}),
    "namespace": lambda w: types.SimpleNamespace(w=w),
    "namespace in a namespace": lambda w: types.SimpleNamespace(a=types.SimpleNamespace(w=w)),
    "mapping proxy": lambda w: types.MappingProxyType({"w": w}),
    "mapping proxy of a list": lambda w: types.MappingProxyType({"w": [w]}),
    "deque of a namespace": lambda w: collections.deque([types.SimpleNamespace(w=w)]),
    "set of closures": lambda w: {_closure(w)},
    "plain object": Plain,
    "tuple of a plain object": lambda w: (Plain(w), 1),
    "closure over a plain object": lambda w: (lambda held: lambda x: held.w * x)(Plain(w)),
    "list in an object": lambda w: Plain([w]),
    "module in an object": lambda w: Plain(vernal.Partial(_free, w)),
    "closure in an object": lambda w: Plain(lambda x: w * x),
    "object in an object": lambda w: Plain(Plain({"w": w})),
    "object with slots": Slotted,
    "object with slots and a dict": SlottedToo,
    "closure over an object with slots": lambda w: (lambda held: lambda x: held.w * x)(Slotted(w)),
}

ARRAYS: dict[str, Callable[[], Any]] = {
    "jax": lambda: W,
    "numpy": lambda: np.full((), 3.0, np.float32),
    "numpy vector": lambda: np.full(2, 3.0, np.float32),
    "key": lambda: jax.random.key(0),
}


@pytest.mark.parametrize("cls", [Holder, StaticHolder])
@pytest.mark.parametrize("hide", (CALLABLES | VALUES).values(), ids=CALLABLES | VALUES)
def test_a_hidden_array_is_refused_in_a_field(hide, cls):
    with pytest.raises((TypeError, ValueError), match=rf"(?s)\.f\b.*{cls.__name__}"):
        cls(ONE, hide(W))


@pytest.mark.parametrize("make", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("name", ["closure", "default", "partial", "closure over a namespace"])
def test_arrays_of_every_kind_are_found(name, make):
    with pytest.raises((TypeError, ValueError), match=r"(?s)\.f\b.*Holder"):
        Holder(ONE, CALLABLES[name](make()))


@pytest.mark.parametrize(
    "inside",
    [lambda f: [f], lambda f: {"a": (f, 1)}, lambda f: (ONE, [jnp.tanh, f])],
    ids=["list", "dict of tuples", "mixed"],
)
@pytest.mark.parametrize("name", ["closure", "default", "keyword default", "partial"])
def test_a_hidden_array_is_refused_inside_containers(name, inside):
    with pytest.raises((TypeError, ValueError), match=r"(?s)\.f\b.*Holder"):
        Holder(ONE, inside(CALLABLES[name](W)))


@pytest.mark.parametrize("put", [
    lambda model, f: vernal.tree_at(lambda m: m.f, model, f),
    lambda model, f: dataclasses.replace(model, f=f),
], ids=["tree_at", "replace"])  # fmt: skip
@pytest.mark.parametrize("name", ["closure", "default", "partial"])
def test_a_hidden_array_is_refused_in_a_changed_copy(name, put):
    with pytest.raises((TypeError, ValueError), match="arrays|array"):
        put(Holder(ONE, jnp.tanh), CALLABLES[name](W))


def test_a_hidden_tracer_is_refused_or_never_leaks():
    """A closure over a tracer in a field would carry it out of its transformation."""

    def loss(w):
        return Holder(w, lambda x: w * x)(X).sum()

    with pytest.raises((TypeError, ValueError), match=r"(?s)\.f\b.*Holder"):
        jax.grad(loss)(W)


@pytest.mark.parametrize(
    "f",
    [
        jnp.tanh, jax.nn.gelu, functools.partial(jax.nn.gelu, approximate=True), lambda x: x,
        lambda x, k=2.0: k * x, jax.jit(jnp.tanh), jax.vmap(jnp.tanh), operator.neg, str.upper,
        jax.nn.initializers.normal(0.1), jnp.sin, np.sin, jax.lax.add, functools.partial(max, 1), type,
    ],
)  # fmt: skip
def test_a_function_without_arrays_is_accepted(f):
    kept = Holder(ONE, f).f
    if getattr(f, "keywords", None):
        # Its keywords could be changed, so the field has one that cannot.
        assert isinstance(kept, functools.partial) and kept.keywords == f.keywords
        assert (kept.func, kept.args) == (f.func, f.args)
    else:
        assert kept is f


def test_an_object_without_arrays_of_jax_is_accepted():
    for thing in (Plain(2.0), Plain("a"), Plain(np.ones(2)), Plain):
        assert Holder(ONE, thing).f is thing


# A function that reads a global array sees the array of the call: a name, not a value.
GLOBAL_ARRAY = jnp.ones(())


def test_a_function_that_names_a_global_array_is_accepted():
    f = lambda x: x * GLOBAL_ARRAY  # noqa: E731 (it is compared)
    assert Holder(ONE, f).f is f


class _InItsModule:
    """An object that leads to the variables of its module, as what runs code does."""

    def __init__(self):
        self.variables = globals()

    def __call__(self, x):
        return x


def test_the_variables_of_a_module_are_not_what_an_object_holds():
    thing = _InItsModule()
    assert Holder(ONE, thing).f is thing
    closure = vernal.transforms.closure_to_pytree(_closure(W))
    assert Holder(ONE, closure).f is closure
    assert vernal.filter_jit(lambda x: thing)(X) is thing


@pytest.mark.parametrize("hide", CALLABLES.values(), ids=CALLABLES)
@pytest.mark.sample(6)
def test_a_compiled_function_takes_a_callable_with_arrays(hide):
    """As an argument it is a function like others: right now, and at another shape."""
    step = vernal.filter_jit(lambda f, x: f(x))
    for number in (3.0, 4.0, 3.0):
        f = hide(jnp.full((), number))
        for x in (X[0], X[0]) if hide is CALLABLES["jax.grad of a closure"] else (X, Y):
            got, right = step(f, x), f(x)
            assert jnp.array_equal(got, right), f"{got} for {right}"


def test_a_callable_object_given_to_a_compiled_function():
    step = vernal.filter_jit(lambda f, x: f(x))
    for number in (3.0, 4.0):
        assert step(Box(jnp.full((), number)), X)[0] == number


def test_the_derivative_of_a_partial_is_not_lost():
    def total(f):
        return jnp.sum(f(X))

    grads = vernal.filter_jit(vernal.filter_grad(total))(vernal.Partial(_free, W))
    assert [float(leaf) for leaf in jax.tree.leaves(grads)] == [2.0]


@pytest.mark.parametrize("name", ["dot", "__add__"])
def test_the_methods_of_a_numpy_array_hold_it(name):
    with pytest.raises(ValueError, match=r"(?s)would be constants.*\.f of .*Holder"):
        Holder(ONE, getattr(np.eye(2), name))
    with pytest.raises(ValueError, match=r"(?s)would be constants.*\.f of .*Holder"):
        Holder(ONE, slice(np.eye(2)))
