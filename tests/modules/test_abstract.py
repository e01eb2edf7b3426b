"""`AbstractVar`, `AbstractClassVar`, abstract methods and classes."""

import abc
import sys
import types
from typing import Any, ClassVar

import pytest

import vernal
from vernal import AbstractClassVar, AbstractVar, Module


class Base(Module):
    x: AbstractVar[int]


def test_an_abstract_attribute_must_be_provided():
    assert Base.__abstractvars__ == frozenset({"x"})
    assert Base.__abstractclassvars__ == frozenset()
    with pytest.raises(
        TypeError, match="Can't instantiate abstract class Base with abstract attributes: x"
    ):
        Base()


def by_field():
    class M(Base):
        x: int

    return M(1)


def by_default():
    class M(Base):
        x: int = 1

    return M()


def by_value():
    class M(Base):
        x = 1

    return M()


def by_property():
    class M(Base):
        @property
        def x(self):
            return 1

    return M()


def by_grandchild():
    class Middle(Base):
        y: AbstractVar[int]

    class M(Middle):
        y: int
        x: int = 1

    assert Middle.__abstractvars__ == {"x", "y"}
    return M(2)


def by_mixin():
    class Mixin:
        x = 1

    class M(Mixin, Base):
        pass

    return M()


@pytest.mark.parametrize(
    "make", [by_field, by_default, by_value, by_property, by_grandchild, by_mixin]
)
def test_every_way_of_providing_it(make):
    m = make()
    assert m.x == 1
    assert type(m).__abstractvars__ == frozenset()


def test_an_abstract_annotation_makes_no_field():
    class M(Base):
        y: int
        x: int

    import inspect

    assert list(inspect.signature(M).parameters) == ["y", "x"]


def test_class_variables_need_a_value_on_the_class():
    class B(Module):
        order: AbstractClassVar[int]

    assert B.__abstractclassvars__ == frozenset({"order"})
    with pytest.raises(
        TypeError,
        match="Can't instantiate abstract class .*B with abstract class attributes: order",
    ):
        B()

    class OnlyField(B):
        order: int

    with pytest.raises(TypeError, match="abstract class attributes: order"):
        OnlyField(1)

    class Given(B):
        order: ClassVar[int] = 2

    class GivenAsText(B):
        order: "ClassVar[int]" = 2

    assert Given().order == GivenAsText().order == 2

    class AsDefault(B):
        order: int = 3

    assert AsDefault().order == 3


def test_a_class_variable_stays_one_when_redeclared_weaker():
    class A(Module):
        x: AbstractClassVar[int]

    class B(A):
        x: AbstractVar[int]

    assert B.__abstractclassvars__ == {"x"}
    assert B.__abstractvars__ == frozenset()

    class C(B):
        x = 1

    assert C().x == 1


def test_making_something_abstract_again():
    class Concrete(Base):
        x: int = 1

    class Again(Concrete):
        x: AbstractVar[int]

    with pytest.raises(TypeError, match="abstract attributes: x"):
        Again()


@pytest.mark.parametrize("kind", ["AbstractVar", "AbstractClassVar"])
@pytest.mark.parametrize("as_text", [False, True])
def test_an_unsubscripted_annotation_is_refused(kind, as_text):
    annotation = f"vernal.{kind} " if as_text else getattr(vernal, kind)
    with pytest.raises(
        TypeError, match=rf"unsubscripted annotation[\s\S]*M\.x\n[\s\S]*{kind}\[Any\]"
    ):
        type(Module)("M", (Module,), {"__annotations__": {"x": annotation}})


@pytest.mark.parametrize(
    "annotation", [AbstractVar[int], AbstractClassVar[int], "AbstractVar[int]"]
)
def test_an_abstract_attribute_with_a_value_is_refused(annotation):
    with pytest.raises(TypeError, match=r"an abstract attribute cannot have a value[\s\S]*M\.x"):
        type(Module)("M", (Module,), {"__annotations__": {"x": annotation}, "x": 1})


def test_postponed_annotations_work():
    module = types.ModuleType("postponed")
    sys.modules["postponed"] = module
    try:
        exec(
            "from __future__ import annotations\n"
            "import vernal\nfrom vernal import *\nfrom vernal import AbstractVar, AbstractClassVar, Module\n"
            "from typing import ClassVar\n"
            "class A(Module):\n    x: AbstractVar[int]\n    y: vernal.AbstractClassVar[str]\n"
            "class B(A):\n    x: int\n    y: ClassVar[str] = 'y'\n    z: ClassVar[list] = []\n",
            vars(module),
        )
        assert module.A.__abstractvars__ == {"x"}
        assert module.A.__abstractclassvars__ == {"y"}
        b = module.B(1)
        assert (b.x, b.y, b.z) == (1, "y", [])
    finally:
        del sys.modules["postponed"]


def test_the_abstract_annotations_print_themselves():
    assert repr(AbstractVar[int]) == "AbstractVar[<class 'int'>]"
    assert repr(AbstractClassVar[str]) == "AbstractClassVar[<class 'str'>]"


def test_abstract_methods_and_properties():
    class A(Module):
        @abc.abstractmethod
        def f(self):
            return "from A"

        @property
        @abc.abstractmethod
        def p(self): ...

    with pytest.raises(TypeError, match="abstract"):
        A()

    class B(A):
        def f(self):
            return super().f() + " and B"

    with pytest.raises(TypeError, match="abstract"):
        B()

    class C(B):
        p = 1

    assert C().f() == "from A and B"


def test_a_class_may_be_declared_abstract():
    class A(Module, is_abstract=True):
        x: Any = 1

    with pytest.raises(
        TypeError,
        match=r"abstract class .*A with abstract class \(declared with is_abstract=True\)",
    ):
        A()

    class B(A):
        pass

    assert B().x == 1


def test_the_refusal_comes_before_init_runs():
    class A(Module):
        x: AbstractVar[int]

        def __init__(self):
            raise AssertionError

    with pytest.raises(TypeError, match="abstract attributes: x"):
        A()
