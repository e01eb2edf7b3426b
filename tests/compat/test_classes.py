"""Classes of programs written for Equinox: what is found in them, and what they may be made of."""

import abc
import dataclasses
import doctest
import functools
import inspect
import sys
import types
import typing
from unittest import mock

import equinox
import equinox._module._module as their_module
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.compat import _install
from vernal.compat import equinox as compat

from ._same import same_as_equinox

T = typing.TypeVar("T")


def checked(eqx):
    """A base class that wraps methods of its subclasses, as those of flowjax do."""

    class Bijection(eqx.Module):
        shape: eqx.AbstractVar[tuple[int, ...]]

        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            for name in ("forward", "__call__"):
                if name in cls.__dict__ and not getattr(cls.__dict__[name], "_checked", False):
                    setattr(cls, name, with_shape(cls.__dict__[name]))

        @abc.abstractmethod
        def forward(self, x): ...

    def with_shape(method):
        assert inspect.isfunction(method) and callable(method)

        @functools.wraps(method)
        def wrapped(self, x):
            x = jnp.asarray(x)
            if x.shape != self.shape:
                raise ValueError(f"expected {self.shape}")
            return method(self, x)

        wrapped._checked = True
        return wrapped

    class Affine(Bijection):
        scale: jax.Array
        shape: tuple[int, ...] = ()

        def forward(self, x):
            """Scales."""
            return self.scale * x

        def __call__(self, x):
            return self.forward(x) + 1

    class Chain(Bijection):
        parts: list
        shape: tuple[int, ...] = ()

        def forward(self, x):
            for part in self.parts:
                x = part.forward(x)
            return x

    return Affine, Chain


@same_as_equinox
def test_a_base_class_wraps_the_methods_of_its_subclasses(eqx):
    Affine, Chain = checked(eqx)
    chain = Chain([Affine(jnp.float32(2)), Affine(jnp.float32(3))])
    gradient = eqx.filter_grad(lambda c: c.forward(jnp.float32(1)))(chain)
    forward = eqx.filter_jit(chain.parts[0].forward)(jnp.float32(5))
    return chain.forward(1.0), chain.parts[0](1.0), gradient, forward, type(chain.forward).__name__


def test_a_wrapped_method_of_a_native_class():
    Affine, _ = checked(vernal)
    affine = Affine(jnp.float32(2))
    assert affine(1.0) == 3.0 and jax.jit(affine.forward)(jnp.float32(1)) == 2.0
    with pytest.raises(ValueError, match="expected"):
        affine.forward(jnp.ones(2, jnp.float32))


@same_as_equinox
def test_a_function_in_the_dictionary_of_a_class(eqx):
    class Model(eqx.Module):
        def method(self, x):
            """Its words."""
            return x

        def __call__(self, x):
            return x

    method, call = Model.__dict__["method"], Model.__dict__["__call__"]
    members = [name for name, _ in inspect.getmembers(Model, inspect.isfunction) if name[0] != "_"]
    return (
        [inspect.isfunction(f) for f in (method, call, vars(Model)["method"], Model.method)],
        [f(1, 2) for f in (method, call, Model.method)],
        [str(inspect.signature(f)) for f in (method, call)],
        [method.__name__, method.__doc__, method.__qualname__, inspect.getsource(method)],
        members,
        method == Model.method,
        {method: 1}[Model.__dict__["method"]],
    )


@same_as_equinox
def test_a_base_class_may_annotate_the_methods_of_its_subclasses(eqx):
    class Base(eqx.Module):
        def __init_subclass__(cls, **options):
            super().__init_subclass__(**options)
            method = cls.__dict__["__call__"]
            method.__doc__ = Base.__call__.__doc__
            method.__annotations__ = {"x": "what it is"}
            method.__name__ = "called"
            method.mark = 1
            del method.mark
            method.mark = 2

        def __call__(self, x):
            """Its words."""

    class Model(Base):
        def __call__(self, x):
            return 3

    found = [Model.__call__, Model.__dict__["__call__"], Model().__call__]
    names = ("__doc__", "__annotations__", "__name__", "mark")
    return Model()(1), [[getattr(f, name) for name in names] for f in found]


@same_as_equinox
def test_methods_may_be_assigned_and_patched(eqx):
    class Model(eqx.Module):
        x: object

        def method(self):
            return self.x

    def twice(self):
        return 2 * self.x

    Model.twice = twice
    with mock.patch.object(Model, "method", lambda self: 7):
        patched = Model(3).method()
    model = Model(jnp.ones(2))
    return patched, Model(3).method(), Model(3).twice(), type(model.twice).__name__, model.twice


@same_as_equinox
def test_every_example_of_a_class_is_found(eqx):
    module = types.ModuleType("found")
    module.eqx = eqx
    source = """
class Model(eqx.Module):
    ">>> 1"
    def method(self):
        ">>> 2"
    @property
    def attribute(self):
        ">>> 3"
    @eqx.filter_jit
    def compiled(self):
        ">>> 4"
    @staticmethod
    def static():
        ">>> 5"
"""
    exec(source, module.__dict__)
    return sorted(t.name for t in doctest.DocTestFinder().find(module, "found") if t.examples)


@same_as_equinox
def test_generic_classes_are_generic(eqx):
    def is_generic(cls):
        try:
            return bool(cls[int])
        except TypeError:
            return False

    nn, internal = eqx.nn, eqx.internal
    theirs = (
        *(nn.SpectralNorm, nn.WeightNorm, nn.StateIndex, nn.Linear, eqx.Partial, eqx.Module),
        *(internal.Static, internal.AbstractProgressMeter, internal.MaybeBuffer),
    )

    class Meter(internal.AbstractProgressMeter[jax.Array]):
        def init(self):
            return jnp.zeros(())

        def step(self, state, progress):
            return state + progress

        def close(self, state):
            pass

    meter = Meter()
    partial = eqx.Partial[int](lambda x, y: x + y, 1)
    return [is_generic(cls) for cls in theirs], meter.step(meter.init(), 1.0), partial(2)


@same_as_equinox
def test_an_instance_knows_what_it_was_parametrised_with(eqx):
    class Box(eqx.Module, typing.Generic[T]):
        x: object

    box = Box[int](1.0)
    return box.__orig_class__ == Box[int], jax.tree.map(lambda x: 2 * x, box).x, box.x


@same_as_equinox
def test_a_field_may_stand_for_an_abstract_class_variable(eqx):
    class Base(eqx.Module):
        order: eqx.AbstractClassVar[int]

    class Given(Base):
        order: int

    class Default(Base):
        order: int = 4

    return Given(3).order, Default().order


def test_natively_a_class_variable_has_a_value_on_the_class():
    class Base(vernal.Module):
        order: vernal.AbstractClassVar[int]

    class Given(Base):
        order: int

    with pytest.raises(TypeError, match="abstract class attributes: order"):
        Given(3)


@same_as_equinox
def test_static_fields_are_overridden_by_the_class(eqx):
    class Base(eqx.Module):
        x: int = eqx.field(static=True)

        def __init__(self):
            pass

    class Value(Base):
        x = 5

    class Computed(Base):
        @property
        def x(self):
            return 7

    copies = [jax.tree.map(lambda y: y, cls()) for cls in (Value, Computed)]
    return Value().x, Computed().x, [copy.x for copy in copies], list(Value.__dataclass_fields__)


@same_as_equinox
def test_an_array_in_a_static_field_is_warned_of(eqx):
    class Model(eqx.Module):
        table: object = eqx.field(static=True)
        y: jax.Array

    model = Model(np.arange(2.0, dtype="float32"), jnp.zeros(2))
    step = eqx.filter_jit(lambda m: m.y + m.table)
    last, _ = jax.lax.scan(
        lambda m, _: (eqx.tree_at(lambda m: m.y, m, step(m)), None), model, None, 3
    )
    return last.y, step(model), step(model), jax.tree.leaves(model)


def test_natively_an_array_in_a_static_field_is_refused():
    class Model(vernal.Module):
        table: object = vernal.field(static=True)

    with pytest.raises(ValueError, match="table"):
        Model(np.arange(2.0))


@same_as_equinox
def test_equal_dtypes_are_one_structure(eqx):
    class Zeros(eqx.Module):
        dtype: object = eqx.field(static=True)

    traced = []

    @eqx.filter_jit
    def run(made, dtype):
        traced.append(dtype)
        return jnp.zeros(2, dtype)

    dtypes = np.dtype("float32"), jnp.float32, np.float32
    out = [run(Zeros(dtype), dtype) for dtype in dtypes]
    # `np.float32` is a value of its own: called, it computes another thing. (Equinox traces once or twice.)
    assert len(traced) == 2 or eqx is not compat
    return out, Zeros(dtypes[0]) == Zeros(dtypes[1])


def test_other_types_are_no_dtypes():
    class Real(np.float32):
        pass

    traced = []

    @vernal.filter_jit
    def run(kind):
        traced.append(kind)
        return jnp.zeros(())

    for kind in (np.float32, Real, np.floating, float):
        run(kind)
    assert len(traced) == 4


def test_private_names_that_programs_import():
    modules = _install._MODULES
    ours = modules["equinox._module._module"]
    assert modules["equinox._module"].Module is compat.Module
    assert modules["equinox._module"].Static is compat.internal.Static

    def facts(eqx, module):
        class Abstract(eqx.Module):
            x: eqx.AbstractVar[int]

        class Declared(eqx.Module, is_abstract=True):
            pass

        class Method(eqx.Module):
            @abc.abstractmethod
            def method(self): ...

        class Concrete(Abstract, Declared):
            x: int

        classes = Abstract, Declared, Method, Concrete, eqx.Module
        return [module.is_abstract_module(cls) for cls in classes], type(eqx.Module).__name__

    assert facts(compat, ours) == facts(equinox, their_module)
    assert type(compat.Module) is ours._ModuleMeta
    assert isinstance(compat.nn.Linear, ours._ModuleMeta)
    assert not isinstance(int, ours._ModuleMeta)
    assert "equinox._module" in sys.modules


@pytest.mark.parametrize("room", ["compat", "equinox"])
def test_a_metaclass_that_calls_init_itself(room):
    # As quax does, for speed.
    eqx = {"compat": compat, "equinox": equinox}[room]
    private = {"compat": _install._MODULES["equinox._module._module"], "equinox": their_module}[
        room
    ]

    class Meta(type(eqx.Module)):
        def __call__(cls, *args):
            module = cls.__new__(cls, *args)
            private._currently_initialising.add(module)
            cls.__init__(module, *args)
            private._currently_initialising.remove(module)
            if not hasattr(module, "x"):
                raise TypeError("not initialised")
            for field in dataclasses.fields(cls):
                if "converter" in field.metadata:
                    value = field.metadata["converter"](getattr(module, field.name))
                    object.__setattr__(module, field.name, value)
            return module

    class Value(eqx.Module, metaclass=Meta):
        x: jax.Array = eqx.field(converter=lambda x: 2 * jnp.asarray(x))
        name: str = eqx.field(static=True, default="a")

    class Upper(Value):
        name: str = eqx.field(static=True, converter=str.upper, default="a")

    class Custom(Value):
        def __init__(self, x):
            if x is not None:
                self.x = x

    for cls in (Value, Custom):
        value = cls(1.0)
        assert jax.tree.leaves(value) == [2.0] and value.name == "a"
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.x = 3.0
        assert jax.tree.map(lambda x: x + 1, value).x == 3.0
        assert eqx.filter_jit(lambda v: v)(value).x == 2.0
    with pytest.raises(TypeError, match="not initialised"):
        Custom(None)
    assert jax.tree.structure(Upper(1.0)) == jax.tree.structure(Upper(1.0, "A"))
    upper = Upper(1.0, "b")
    assert upper.name == eqx.tree_at(lambda u: u.x, upper, 1.0).name == "B"
    assert jax.tree.structure(upper) == jax.tree.structure(Upper(2.0, "B"))
    assert jax.tree.structure(upper) != jax.tree.structure(Upper(2.0, "c"))


def test_a_static_dict_whose_keys_have_no_order():
    # What Equinox would look at through JAX, which sorts; a library that goes around it relies on that.
    class Unit:
        pass

    class Quantity(compat.Module):
        value: jax.Array
        powers: dict = compat.field(static=True)

    powers = {Unit(): 1, Unit(): -1}
    quantity = jax.jit(lambda q: jax.tree.map(lambda x: 2 * x, q))(Quantity(jnp.ones(1), powers))
    assert quantity.value == 2 and quantity.powers == powers
    with pytest.warns(UserWarning, match="powers"):
        Quantity(jnp.ones(1), {Unit(): jnp.ones(1), Unit(): 2})


@same_as_equinox
def test_static_dicts_are_equal_in_any_order(eqx):
    class Quantity(eqx.Module):
        value: jax.Array
        powers: object = eqx.field(static=True)

    def quantity(powers):
        return Quantity(jnp.ones(2), powers)

    one, other = quantity({"m": 1, "s": -2}), quantity({"s": -2, "m": 1})
    apart = [quantity({"m": 1, "s": 2}), quantity({"m": 1}), quantity({"m": 1, "kg": -2})]
    return (
        jax.tree.map(jnp.add, one, other).value,
        jax.lax.scan(lambda carry, _: (other, None), one, length=2)[0].value,
        jax.lax.cond(jnp.array(True), lambda: one, lambda: other).value,
        [eqx.tree_equal(one, x) for x in (other, *apart)],
        jax.tree.structure(quantity(({"m": 1, "s": -2}, "a"))).num_leaves,
    )
