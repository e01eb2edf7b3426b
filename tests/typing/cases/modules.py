"""Modules as type checkers see them: dataclasses that cannot be assigned to."""

from typing import ClassVar, Generic, TypeVar, assert_type

import jax
import jax.numpy as jnp

import vernal


class Linear(vernal.Module):
    weight: jax.Array
    size: int = vernal.field(static=True)
    bias: jax.Array | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight @ x


weight = jnp.ones((2, 2))

# Construction is the generated `__init__`.
linear = Linear(weight, 2)
assert_type(linear, Linear)
assert_type(linear.weight, jax.Array)
assert_type(linear.size, int)
assert_type(linear.bias, jax.Array | None)
assert_type(linear(weight), jax.Array)
Linear(weight=weight, size=2, bias=None)
Linear(weight, "two")  # error: reportArgumentType | arg-type
Linear(weight)  # error: reportCallIssue | call-arg
Linear(weight, 2, None, 4)  # error: reportCallIssue | call-arg
Linear(weight, 2, colour="red")  # error: reportCallIssue | call-arg

# Attributes are known. (That instances are frozen is refused at run time only: a checker that knew of it would also
# refuse the assignments of a hand-written `__init__`, as below.)
linear.size = "two"  # error: reportAttributeAccessIssue | assignment
linear.unknown = 1  # error: reportAttributeAccessIssue | attr-defined
linear.unknown  # error: reportAttributeAccessIssue | attr-defined


# A hand-written `__init__` is what counts.
class Scaled(vernal.Module):
    factor: float
    inner: Linear

    def __init__(self, size: int, *, factor: float = 1.0) -> None:
        self.factor = factor
        self.inner = Linear(jnp.ones((size, size)), size)


Scaled(3)
Scaled(3, factor=2.0)
Scaled(3, 2.0)  # error: reportCallIssue | call-arg
Scaled("three")  # error: reportArgumentType | arg-type


# `field` knows defaults, factories and converters.
class Fields(vernal.Module):
    given: int
    default: int = vernal.field(default=1)
    factory: tuple[int, ...] = vernal.field(default_factory=tuple)
    static: str = vernal.field(static=True, default="name")
    keyword: bool = vernal.field(default=False, kw_only=True)
    computed: int = vernal.field(init=False)

    def __post_init__(self) -> None:
        pass


Fields(1)
Fields(1, 2, (3,), "four", keyword=True)
Fields(1, 2, (3,), "four", True)  # error: reportCallIssue | call-arg
Fields(1, computed=3)  # error: reportCallIssue | call-arg
Fields(1, static=5)  # error: reportArgumentType | arg-type
assert_type(Fields(1).factory, tuple[int, ...])


class Converted(vernal.Module):
    value: jax.Array = vernal.field(converter=jnp.asarray)


assert_type(Converted(weight).value, jax.Array)


# Fields are inherited, in order.
class Base(vernal.Module):
    first: int


class Derived(Base):
    second: str


assert_type(Derived(1, "two").first, int)
Derived("two", 1)  # error: reportArgumentType | arg-type
Derived(1)  # error: reportCallIssue | call-arg


# Abstract attributes are typed attributes. (Pyright knows a class variable by the name `ClassVar` alone, so it
# takes an `AbstractClassVar` for an attribute of instances.)
class Shape(vernal.Module):
    sides: vernal.AbstractVar[int]
    family: vernal.AbstractClassVar[str]


class Polygon(Shape):
    sides: int
    family: ClassVar[str] = "polygons"  # error: reportIncompatibleVariableOverride | -


def describe(shape: Shape) -> str:
    assert_type(shape.sides, int)
    assert_type(shape.family, str)
    return shape.family * shape.sides


describe(Polygon(3))
Polygon("three")  # error: reportArgumentType | arg-type


# Generics.
Item = TypeVar("Item")


class Box(vernal.Module, Generic[Item]):
    item: Item

    def open(self) -> Item:
        return self.item


assert_type(Box(1), Box[int])
assert_type(Box("x").open(), str)


# Methods keep their types when they are read from an instance.
assert_type(Box(1).open(), int)
linear.__call__("x")  # error: reportArgumentType | arg-type


# Every room is an attribute of the package.
assert_type(vernal.estimators.XTrace(), vernal.estimators.XTrace)
assert_type(vernal.testing.GetKey(0), vernal.testing.GetKey)
vernal.estimator  # error: reportAttributeAccessIssue | attr-defined
