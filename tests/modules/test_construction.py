"""How a module comes to be: `__init__`, defaults, order of effects, inheritance."""

import abc
import dataclasses
import functools
import inspect
import warnings
from dataclasses import InitVar
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import pytest

import vernal
from vernal import Module, field

T = TypeVar("T")


def test_fields_make_an_init_in_their_order():
    class M(Module):
        a: Any
        b: Any = 2
        c: Any = field(kw_only=True, default=3)

    m = M(1)
    assert (m.a, m.b, m.c) == (1, 2, 3)
    m = M(4, 5, c=6)
    assert (m.a, m.b, m.c) == (4, 5, 6)
    assert str(inspect.signature(M)).startswith("(a: Any, b: Any = 2, *, c: Any = 3)")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        M()
    with pytest.raises(TypeError, match="takes from 2 to 3 positional arguments"):
        M(1, 2, 3)


def test_the_order_of_effects():
    order = []

    class Base(Module):
        x: Any

        def __check_init__(self):
            order.append("check base")

    class Sub(Base):
        y: Any = field(converter=lambda y: order.append("convert") or y, default=0)

        def __init__(self, x):
            order.append("init")
            self.x = x
            self.x = x + 1

        def __check_init__(self):
            order.append("check sub")
            with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign `x`"):
                self.x = 5

    assert Sub(1).x == 2
    assert order == ["init", "convert", "check sub", "check base"]


def test_checks_run_once_each_most_derived_first_also_with_several_bases():
    order = []

    class A(Module):
        def __check_init__(self):
            order.append("A")

    class B(A):
        def __check_init__(self):
            order.append("B")

    class C(A):
        pass

    class D(C, B):
        def __check_init__(self):
            order.append("D")

    D()
    assert order == ["D", "B", "A"]


def test_checks_of_a_plain_mixin_run_too():
    class Mixin:
        def __check_init__(self):
            raise ValueError("mixin says no")

    class M(Mixin, Module):
        x: Any

    with pytest.raises(ValueError, match="mixin says no"):
        M(1)


def test_a_failing_check_or_converter_leaves_the_class_usable():
    def positive(x):
        if x < 0:
            raise ValueError("negative")
        return x

    class M(Module):
        x: Any = field(converter=positive)

        def __check_init__(self):
            if self.x == 0:
                raise ValueError("zero")

    for bad, text in [(-1, "negative"), (0, "zero")]:
        with pytest.raises(ValueError, match=text):
            M(bad)
    assert M(1).x == 1


def test_post_init_may_set_fields_and_takes_init_vars():
    class M(Module):
        size: InitVar[int]
        x: Any = field(init=False)
        note: InitVar[str] = "n"

        def __post_init__(self, size, note):
            self.x = jnp.zeros(size)
            assert note == "n"

    m = M(3)
    assert m.x.shape == (3,)
    assert [f.name for f in dataclasses.fields(m)] == ["x"]


def test_a_field_that_is_not_in_init_must_be_set():
    class M(Module):
        x: Any = field(init=False)

    with pytest.raises(TypeError, match="Field `x` was not initialized"):
        M()


def test_a_field_left_out_by_a_custom_init_is_named():
    class M(Module):
        x: Any
        weight: Any

        def __init__(self):
            self.x = 1

    with pytest.raises(TypeError, match=r"Field `weight` was not initialized\n.*\.weight of .*M"):
        M()


def test_an_inherited_custom_init_wins():
    class A(Module):
        x: Any

        def __init__(self, x):
            "Doubles."
            self.x = 2 * x

    class B(A):
        y: Any = 7

    b = B(1)
    assert (b.x, b.y) == (2, 7)
    assert B.__init__.__doc__ == "Doubles."
    assert list(inspect.signature(B).parameters) == ["x"]


def test_a_custom_init_of_a_plain_base_earlier_in_the_mro_wins():
    class Plain:
        def __init__(self, x):
            self.x = x + 1

    class M(Plain, Module):
        x: Any

    assert M(1).x == 2


def test_super_init_works_with_generated_and_custom():
    class A(Module):
        x: Any

    class B(A):
        y: Any

        def __init__(self, y):
            super().__init__(x=10)
            self.y = y

    class C(B):
        z: Any

        def __init__(self):
            super().__init__(1)
            self.z = self.x + self.y

    c = C()
    assert (c.x, c.y, c.z) == (10, 1, 11)


def test_init_and_post_init_together_are_warned_about():
    with pytest.warns(UserWarning, match=r"Both defines both `__init__` and `__post_init__`"):

        class Both(Module):
            x: Any

            def __init__(self):
                self.x = 1

            def __post_init__(self):
                raise AssertionError

    assert Both().x == 1


def test_an_inherited_init_keeps_the_parents_post_init_untouched():
    class A(Module):
        x: Any

        def __init__(self):
            self.x = 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")

        class B(A):
            y: Any = 0

    assert B().y == 0


def default_function(x):
    return ("default", x)


def test_defaults_on_the_class_become_the_instances_whatever_they_are():
    class M(Module):
        a: Any = 1
        act: Any = jax.nn.relu
        jitted: Any = jnp.tanh
        fn: Any = default_function
        none: Any = None
        sub: Any = vernal.Static("x")

        def __init__(self):
            pass

    m = M()
    assert vars(m)["a"] == 1
    assert m.act is jax.nn.relu
    assert m.jitted is jnp.tanh
    assert m.fn is default_function
    assert m.fn(1) == ("default", 1)
    assert m.none is None
    assert jax.tree.structure(m) == jax.tree.structure(M())
    assert jax.tree.map(lambda x: x, m).fn(2) == ("default", 2)


def test_function_defaults_with_a_generated_init_are_values_not_methods():
    class M(Module):
        fn: Any = default_function
        act: Any = jnp.tanh

    assert M().fn is default_function
    assert M.fn is default_function
    assert M().act is jnp.tanh


def test_a_property_may_stand_for_a_field():
    class A(Module):
        x: vernal.AbstractVar[int]

        def double(self):
            return 2 * self.x

    class B(A):
        y: Any

        @property
        def x(self):
            return self.y + 1

    assert B(1).double() == 4

    class C(Module):
        x: Any
        y: Any

        def __init__(self):
            self.y = jnp.ones(2)

    class D(C):
        @property
        def x(self):
            return "property"

    d = D()
    assert d.x == "property"
    assert len(jax.tree.leaves(d)) == 1
    assert jax.tree.map(lambda x: x, d).x == "property"
    assert jax.jit(lambda m: m)(d).x == "property"


def test_a_subclass_may_redeclare_a_field():
    class A(Module):
        x: Any
        y: Any = 1

    class B(A):
        x: Any = field(static=True, default="s")

    assert B().x == "s"
    assert [f.name for f in dataclasses.fields(B)] == ["x", "y"]


def test_generic_parameters_do_not_change_the_treedef():
    class G(Module, Generic[T]):
        x: T

        def get(self) -> T:
            return self.x

    plain, parametrised = G(jnp.ones(2)), G[jax.Array](jnp.ones(2))
    assert jax.tree.structure(plain) == jax.tree.structure(parametrised)
    assert parametrised.__orig_class__ == G[jax.Array] and not hasattr(plain, "__orig_class__")
    jax.tree.map(jnp.add, plain, parametrised)
    assert (jax.tree.map(lambda x: x, parametrised).get() == 1).all()

    class H(G[int]):
        y: Any = 0

    assert H(1).y == 0


def test_plain_mixins_with_and_without_slots():
    class Plain:
        attribute = "a"

        def twice(self):
            return 2 * self.x

        @functools.cached_property
        def cached(self):
            return object()

    class Slotted:
        __slots__ = ()

        def thrice(self):
            return 3 * self.x

    class M(Module, Plain, Slotted):
        x: Any

    m = M(jnp.ones(2))
    assert (m.twice() == 2).all()
    assert (m.thrice() == 3).all()
    assert m.attribute == "a"
    before = jax.tree.structure(m)
    assert m.cached is m.cached
    assert jax.tree.structure(m) == before
    assert jax.tree.structure(jax.tree.map(lambda x: x, m)) == before


def test_a_module_fits_a_protocol():
    @runtime_checkable
    class Predicts(Protocol):
        def predict(self, x: Any) -> Any: ...

    class M(Module):
        def predict(self, x: Any) -> Any:
            return x

    assert isinstance(M(), Predicts)
    assert issubclass(M, Predicts)


def test_class_variables_are_no_fields_and_may_be_mutable():
    class M(Module):
        registry: ClassVar[list] = []
        text: "ClassVar[dict]" = {}
        bare: ClassVar = []
        x: Any

    assert [f.name for f in dataclasses.fields(M)] == ["x"]
    assert M(1).registry is M.registry


def test_keyword_only_marker_works():
    class M(Module):
        a: Any
        _: dataclasses.KW_ONLY
        b: Any = 1

    assert M(1, b=2).b == 2
    with pytest.raises(TypeError, match="positional argument"):
        M(1, 2)


def test_class_keywords_go_to_init_subclass():
    class A(Module):
        def __init_subclass__(cls, tag=None, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.tag = tag

    class B(A, tag="b"):
        pass

    assert B.tag == "b"
    with pytest.raises(TypeError, match="takes no keyword arguments"):

        class C(Module, unknown=1):
            pass


def test_a_new_that_returns_something_else_is_left_alone():
    class M(Module):
        x: Any = 0

        def __new__(cls, x=0):
            return "text" if x == 1 else super().__new__(cls)

    assert M(1) == "text"
    assert M(0).x == 0


def test_a_module_may_be_used_by_its_own_init():
    class M(Module):
        w: Any
        total: Any

        def __init__(self):
            self.w = jnp.ones(3)
            self.total = self.sum()

        def sum(self):
            return jnp.sum(self.w)

    assert M().total == 3


def test_a_module_may_be_flattened_and_compiled_in_its_own_init():
    class M(Module):
        w: Any
        out: Any

        def __init__(self):
            self.w = jnp.ones(3)
            self.out = jax.jit(lambda m: m.w * 2)(self)
            assert len(jax.tree.leaves(self)) == 2

    assert (M().out == 2).all()
    assert len(jax.tree.leaves(M())) == 2


def test_construction_inside_transformations():
    class M(Module):
        w: jax.Array
        name: str = "n"

    stacked = jax.vmap(M)(jnp.ones((3, 2)))
    assert stacked.w.shape == (3, 2)
    assert stacked.name == "n"
    assert jax.eval_shape(M, jnp.ones(2)).w.shape == (2,)
    assert jax.jit(M)(jnp.ones(2)).w.shape == (2,)
    assert jax.grad(lambda w: jnp.sum(M(w).w ** 2))(jnp.ones(2)).shape == (2,)


def test_nested_classes_and_namedtuple_fields():
    class Pair(NamedTuple):
        a: Any
        f: Any

    class Inner(Module):
        w: Any

    class Outer(Module):
        pair: Pair
        inner: Inner

    m = Outer(Pair(jnp.ones(1), jnp.tanh), Inner(jnp.zeros(2)))
    assert len(jax.tree.leaves(m)) == 2
    out = jax.jit(lambda m: m)(m)
    assert type(out.pair) is Pair
    assert out.pair.f is jnp.tanh


def test_an_abstract_base_of_the_standard_library_mixes():
    class Sized(abc.ABC):
        @abc.abstractmethod
        def size(self): ...

    class M(Module, Sized):
        x: Any

        def size(self):
            return 1

    assert M(1).size() == 1
    with pytest.raises(TypeError, match="abstract"):
        type(Module)("N", (Module, Sized), {})()


@pytest.mark.parametrize("layout", ["arrays", "fields"])
def test_a_module_that_was_made_without_init_keeps_its_static_fields(layout):
    class Polynomial(vernal.Module, layout=layout):
        coefficients: jax.Array
        axis: int = vernal.field(static=True)

        @classmethod
        def fast(cls, coefficients, axis):
            self = object.__new__(cls)
            object.__setattr__(self, "coefficients", coefficients)
            object.__setattr__(self, "axis", axis)
            return self

        @vernal.filter_jit
        def __call__(self, x):
            assert self.axis == 0
            return jnp.polyval(self.coefficients, x)

    made, fast = Polynomial(jnp.arange(3.0), 0), Polynomial.fast(jnp.arange(3.0), 0)
    assert len(jax.tree.leaves(fast)) == 1
    assert jax.jit(lambda p: p)(fast).axis == 0
    assert fast(jnp.array(2.0)) == made(jnp.array(2.0))
    assert jax.tree.map(lambda x: x + 1, fast) == Polynomial(jnp.arange(3.0) + 1, 0)
