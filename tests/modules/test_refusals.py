"""What a module refuses at construction, and the words it does it with."""

import collections
import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import Module, Partial, field, tree_at
from vernal.show import short


class Holder(Module):
    x: Any


class Fixed(Module):
    x: Any = field(static=True)


class Layer(Module):
    w: jax.Array

    def __call__(self, x):
        return self.w * x

    def method(self, x):
        return self.w + x


LAYER = Layer(jnp.ones(2))

STATIC_ARRAYS = {
    "jax": (lambda: jnp.ones(2), r"\.x"),
    "numpy": (lambda: np.ones(2), r"\.x"),
    "scalar": (lambda: jnp.float32(1), r"\.x"),
    "key": (lambda: jax.random.key(0), r"\.x"),
    "in a list": (lambda: ["a", jnp.ones(2)], r"\.x\[1\]"),
    "in a dict": (lambda: {"k": (1, np.ones(2))}, r"\.x\['k'\]\[1\]"),
    "in a module": (lambda: LAYER, r"\.x.w"),
    "in a method": (lambda: LAYER.method, r"\.x.__self__.w"),
}


@pytest.mark.parametrize(("make", "where"), STATIC_ARRAYS.values(), ids=STATIC_ARRAYS)
def test_an_array_in_a_static_field(make, where):
    with pytest.raises(
        ValueError,
        match=rf"an array cannot be static[\s\S]*{where} of [\s\S]*without `static=True`",
    ):
        Fixed(make())


def test_a_tracer_in_a_static_field():
    with pytest.raises(ValueError, match="an array cannot be static"):
        jax.jit(lambda x: Fixed(x) and x)(1.0)


@pytest.mark.parametrize(
    "value", [np.float32(1), np.bool_(True), None, "a", (1, 2), jnp.tanh, np.dtype("f4")]
)
def test_hashable_values_and_numpy_scalars_may_be_static(value):
    m = Fixed(value)
    assert jax.tree.leaves(m) == []
    assert jax.jit(lambda m: m)(m).x is value or jax.jit(lambda m: m)(m).x == value


def test_a_method_of_the_module_itself():
    class M(Module):
        x: Any

        def __init__(self, wrap):
            self.x = wrap(self.forward)

        def forward(self):
            pass

    Holder(LAYER.method)  # a stranger's method first: it must not make methods innocent
    with pytest.raises(
        ValueError,
        match=r"Cannot assign methods in __init__[\s\S]*\.x of [\s\S]*self\.x = self\.forward",
    ):
        M(lambda method: method)
    for wrap in (lambda m: [m], lambda m: {"k": (m,)}):
        with pytest.raises(ValueError, match="Cannot assign methods in __init__"):
            M(wrap)


def test_a_magic_method_of_the_module_itself():
    class M(Module):
        x: Any

        def __init__(self):
            self.x = self.__call__

        def __call__(self):
            pass

    with pytest.raises(ValueError, match="Cannot assign methods in __init__"):
        M()


CYCLES = {
    "itself": (lambda self: self, r"\.child of "),
    "in a list": (lambda self: [1, self], r"\.child\[1\] of "),
    "in a dict": (lambda self: {"k": {"l": self}}, r"\.child\['k'\]\['l'\] of "),
    "in a tuple": (lambda self: (jnp.ones(1), (self,)), r"\.child\[1\]\[0\] of "),
    "through a child": (lambda self: Holder(self), r"\.child\.x of "),
    "through two": (lambda self: Holder([Holder(self)]), r"\.child\.x\[0\]\.x of "),
    "through a method": (lambda self: Holder(self.method), r"\.child\.x\.__self__ of "),
    "through a partial": (lambda self: Partial(jnp.add, self), r"\.child\.args\[0\] of "),
}


@pytest.mark.parametrize(("wrap", "where"), CYCLES.values(), ids=CYCLES)
@pytest.mark.parametrize("times", [1, 2])
def test_a_cycle_of_modules(wrap, where, times):
    class Node(Module):
        child: Any

        def __init__(self, wrap=None):
            self.child = None if wrap is None else wrap(self)

        def method(self):
            pass

    Holder(Node())  # the class has been a child somewhere before
    for _ in range(times):
        with pytest.raises(
            ValueError,
            match=rf"a module cannot contain itself: a cycle is not a tree[\s\S]*{where}",
        ):
            Node(wrap)


def test_a_container_that_contains_itself():
    loop: list = [1]
    loop.append(loop)
    with pytest.raises(ValueError, match=r"a module cannot contain itself[\s\S]*\.x\[1\] of "):
        Holder(loop)
    d: dict = {}
    d["k"] = [d]
    with pytest.raises(
        ValueError, match=r"a module cannot contain itself[\s\S]*\.x\['k'\]\[0\] of "
    ):
        Holder(d)


def test_lending_oneself_during_init_is_no_cycle():
    class M(Module):
        w: Any
        out: Any

        def __init__(self):
            self.w = jnp.ones(2)
            helper = Holder(self)
            self.out = Partial(lambda m: helper.x.w + m.w, self)()

    assert (M().out == 2).all()


def test_the_same_object_twice_is_no_cycle():
    shared = [jnp.ones(1), jnp.tanh]
    assert len(jax.tree.leaves(Holder([shared, shared, LAYER, LAYER]))) == 4


HIDDEN = {
    "jit": lambda: jax.jit(LAYER),
    "vmap": lambda: jax.vmap(LAYER),
    "grad": lambda: jax.grad(LAYER),
    "checkpoint": lambda: jax.checkpoint(LAYER),
    "vmap of a method": lambda: jax.vmap(LAYER.method),
    "twice": lambda: jax.jit(jax.vmap(LAYER)),
    "closure": lambda: (lambda w: lambda x: w * x)(jnp.ones(2)),
    "closure in a closure": lambda: (lambda f: lambda x: f(x))(
        (lambda w: lambda x: w * x)(jnp.ones(2))
    ),
    "default": lambda: lambda x, w=LAYER.w: w * x,
    "keyword default": lambda: lambda x, *, w=LAYER.w: w * x,
    "filter_vmap of a closure": lambda: vernal.filter_vmap(
        (lambda w: lambda x: w * x)(jnp.ones(2))
    ),
    "vernal.Partial of a closure": lambda: Partial((lambda w: lambda x: w * x)(jnp.ones(2))),
    "partial of an array": lambda: functools.partial(jnp.add, jnp.ones(2)),
    "partial keyword": lambda: functools.partial(jnp.sum, where=jnp.ones(2, bool)),
    "partial of a module": lambda: functools.partial(LAYER),
    "partial of a vmap": lambda: functools.partial(jax.vmap(LAYER)),
    "python's own method": lambda: types.MethodType(type(LAYER).__call__, LAYER),
    "wraps": lambda: functools.wraps(LAYER)(lambda x: x),
}


@pytest.mark.parametrize("make", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize("nest", [lambda f: f, lambda f: [LAYER, f], lambda f: (1, {"k": f})])
def test_arrays_hidden_in_a_function(make, nest):
    with pytest.raises(
        ValueError,
        match=r"arrays inside this function would be constants[\s\S]*\.x[\s\S]*vernal\.Partial",
    ):
        Holder(nest(make()))


@pytest.mark.parametrize(
    "value",
    [
        jax.jit(jnp.sin),
        jax.vmap(jnp.sin),
        functools.partial(jnp.sum, axis=0),
        jax.jit(vernal.Static(jnp.sin).__repr__),
    ],
)
def test_functions_without_arrays_may_be_wrapped_as_one_likes(value):
    assert jax.tree.leaves(Holder(value)) == []


def test_a_method_of_another_module_is_a_child():
    m = Holder(LAYER.method)
    assert len(jax.tree.leaves(m)) == 1
    assert (jax.jit(lambda m, x: m.x(x))(m, 1.0) == 2).all()


class MyList(list):
    pass


class MyDict(dict):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any


@dataclasses.dataclass(unsafe_hash=True)
class UnsafeHash:
    a: Any


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = 1


@pytest.mark.parametrize(
    "value",
    [
        MyList([jnp.ones(2)]),
        MyDict(a=[LAYER]),
        Plain(jnp.ones(2)),
        Plain(1, {"k": np.ones(2)}),
        [LAYER, Plain(LAYER)],
    ],
    ids=lambda v: type(v).__name__,
)
def test_arrays_hidden_in_an_object_that_jax_does_not_know(value):
    with pytest.raises(
        ValueError,
        match=r"arrays inside this object would be constants: `(Plain|MyList|MyDict)` is not a registered pytree",
    ):
        Holder(value)


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        ({1}, "a frozenset"),
        (bytearray(b"a"), "bytes"),
        (collections.deque([1]), "a tuple"),
        (MyList(["a"]), "a frozen dataclass"),
        (MyDict(k=1), "a frozen dataclass"),
        (Plain(1), "a frozen dataclass"),
        (UnsafeHash(1), "a frozen dataclass"),
        (np.array(["a"]), "a tuple of Python values"),
    ],
    ids=lambda v: type(v).__name__,
)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [1, v], lambda v: (1, {"k": v})])
def test_what_can_change_in_place_is_no_structure(value, instead, wrap):
    with pytest.raises(ValueError, match=rf"this value can change[\s\S]*\.x[\s\S]*{instead}"):
        Holder(wrap(value))
    with pytest.raises(ValueError, match=rf"this value can change[\s\S]*\.x[\s\S]*{instead}"):
        Fixed(value)
    with pytest.raises(ValueError, match=rf"this value can change[\s\S]*\.x[\s\S]*{instead}"):
        tree_at(lambda m: m.x, Holder("a"), wrap(value))


def test_a_container_in_a_static_field_is_refused():
    for value in ([1], {"a": 1}):
        with pytest.raises(ValueError, match=r"\.x[\s\S]*the field without `static=True`"):
            Fixed(value)


def test_frozen_objects_are_structure():
    m = Holder((Frozen(1), frozenset({1})))
    assert jax.tree.leaves(m) == []
    assert jax.jit(lambda m: m)(m).x[0] == Frozen(1)


@pytest.mark.parametrize(
    "default", [[], {}, set(), np.ones(2), jnp.ones(2), bytearray()], ids=short
)
@pytest.mark.parametrize("as_field", [False, True])
def test_a_mutable_default(default, as_field):
    with pytest.raises(
        ValueError, match=r"mutable default .* for a field[\s\S]*\.x\n[\s\S]*default_factory"
    ):

        class M(Module):
            x: Any = field(default=default) if as_field else default


def test_immutable_defaults_and_factories_are_fine():
    class M(Module):
        a: Any = (1, 2)
        b: Any = LAYER
        c: Any = field(default_factory=list)

    assert M().b is LAYER
    assert M().c is not M().c


def test_an_unknown_layout():
    with pytest.raises(
        ValueError, match=r"unknown class option[\s\S]*layout='tree'[\s\S]*'arrays'"
    ):

        class M(Module, layout="tree"):
            pass


def test_virtual_subclasses():
    with pytest.raises(
        ValueError, match=r"modules cannot have virtual subclasses[\s\S]*Holder\.register\(int\)"
    ):
        Holder.register(int)


def test_the_fields_layout_allows_what_equinox_allows():
    class M(Module, layout="fields"):
        x: Any

    m = M(jax.vmap(LAYER))
    assert jax.tree.leaves(m) == [m.x]
