"""Modules, their fields, and what is abstract in them."""

import abc
import copy
import dataclasses
import inspect
import pickle
import typing

import jax
import jax.numpy as jnp
import numpy as np

from .registry import calls

ONE = jnp.ones(2)


@calls("Module")
def module(Module, eqx):
    class Pair(Module):
        left: jax.Array
        right: object = 1
        name: str = eqx.field(static=True, default="text")

        def method(self, x):
            return self.left + x

        @property
        def both(self):
            return self.left, self.right

        @staticmethod
        def still(x):
            return x

        @classmethod
        def make(cls):
            return cls(ONE)

    class Child(Pair):
        more: float = 0.5

        def __call__(self, x):
            return super().method(x) * self.more

    class Written(Module):
        x: jax.Array
        y: int

        def __init__(self, x):
            self.x = x
            self.x = x + 1
            self.y = 3

        def __check_init__(self):
            if self.x.shape != (2,):
                raise ValueError("wrong shape")

    class Unset(Module):
        """Has defaults that its `__init__` leaves alone."""

        w: jax.Array
        part: object = eqx.nn.Linear(2, 2, key=jax.random.key(0))
        number: float = 3.0
        text: str = eqx.field(static=True, default="x")

        def __init__(self):
            self.w = ONE

        def __call__(self, x):
            return self.part(x) * self.w * self.number

    pair = Pair(ONE)
    yield lambda: jax.tree.leaves(Unset())
    yield lambda: Unset()(ONE)
    yield lambda: eqx.filter_jit(lambda m, x: (m, m(x)))(Unset(), ONE)
    yield lambda: eqx.filter_jit(lambda m: m)(Unset()).number
    yield lambda: jax.tree.map(lambda x: 2 * x, Unset())(ONE)
    yield lambda: (Unset().text, repr(Unset()), Unset() == Unset())
    yield lambda: eqx.filter_grad(lambda m: m(ONE).sum())(Unset()).w
    yield lambda: copy.deepcopy(Unset()).number
    yield lambda: len(jax.tree.leaves(eqx.tree_at(lambda m: m.w, Unset(), 2 * ONE)))
    yield lambda: eqx.tree_at(lambda m: m.w, Unset(), 2 * ONE)(ONE)
    yield lambda: pair
    yield lambda: Pair(left=1.0, right="a", name="b")
    yield Pair
    yield Pair, 1, 2, 3, 4
    yield lambda: Pair(ONE, wrong=1)
    yield lambda: Child(ONE)(2.0)
    yield lambda: Child(ONE, 2, "a", 3)
    yield lambda: Written(ONE)
    yield Written, jnp.ones(3)
    yield lambda: pair.method(1.0)
    yield lambda: pair.both
    yield lambda: (Pair.still(1), Pair.make())
    yield lambda: repr(pair)
    yield lambda: str(Child(jnp.ones((2, 3)), [1, None]))
    yield lambda: jax.tree.leaves(pair)
    yield lambda: jax.tree.leaves(Pair(ONE, ONE))
    yield lambda: jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(pair)[0][0])
    yield lambda: jax.tree.map(lambda x: x * 2, Pair(ONE, ONE))
    yield lambda: jax.tree.structure(Pair(ONE, ONE)) == jax.tree.structure(Pair(ONE, ONE))
    yield lambda: jax.tree.structure(Pair(ONE, ONE)) == jax.tree.structure(Pair(ONE, ONE, "a"))
    yield lambda: jax.jit(lambda p: p.left)(Pair(ONE, jnp.tanh))
    yield lambda: eqx.filter_jit(lambda p: p)(Pair(ONE, jnp.tanh))
    yield lambda: jax.vmap(lambda p: p.left * 2)(Pair(ONE, ONE))
    yield lambda: pair == Pair(ONE)
    yield lambda: pair == Pair(2 * ONE)
    yield lambda: Pair(1) == Pair(1)
    yield lambda: Pair(1) == Child(1)
    yield lambda: pair == 1
    yield lambda: pair != Pair(ONE)
    yield lambda: hash(Pair(1, 2)) == hash(Pair(1, 2))
    yield lambda: isinstance(hash(pair), int)
    yield lambda: isinstance(hash(Pair(np.ones(2))), int)
    yield lambda: setattr(pair, "left", 1)
    yield lambda: setattr(pair, "other", 1)
    yield lambda: delattr(Pair(1), "left")
    yield lambda: dataclasses.replace(pair, right=5)
    yield lambda: dataclasses.replace(pair, wrong=5)
    yield lambda: [f.name for f in dataclasses.fields(pair)]
    yield lambda: dataclasses.asdict(Pair(1, [2]))
    yield lambda: copy.copy(pair)
    yield lambda: copy.deepcopy(pair)
    yield lambda: pickle.loads(pickle.dumps(eqx.nn.Linear(2, 1, key=jax.random.key(0)))).weight
    yield lambda: str(inspect.signature(Pair)).replace("tests.compat._calls.", "")
    yield lambda: str(inspect.signature(Written))
    yield lambda: Pair.__match_args__
    yield lambda: pair.method == pair.method
    yield lambda: pair.method.__name__
    yield lambda: pair.method.__func__ is Pair.__dict__["method"]
    yield lambda: isinstance(pair.method, Module)
    yield lambda: len(jax.tree.leaves(pair.method))
    yield lambda: jax.jit(Pair(ONE, ONE).method)(1.0)
    yield lambda: isinstance(eqx.nn.PReLU(), Module)
    yield lambda: issubclass(Pair, Module)
    yield lambda: callable(pair)
    yield Module

    def class_of(body, bases=(Module,), **options):
        annotations = body.pop("annotations", {})
        return type(Module)(
            "Made",
            bases,
            {"__annotations__": annotations, "__module__": __name__, **body},
            **options,
        )

    yield lambda: class_of({"annotations": {"x": int}})(1)
    yield lambda: class_of({"annotations": {"x": list}, "x": []})
    yield lambda: class_of({"annotations": {"x": object}, "x": ONE})
    yield lambda: class_of({"annotations": {"x": object}, "x": eqx.nn.Identity()})()
    yield lambda: class_of({"annotations": {"x": int}, "__init__": lambda self: None})()
    yield lambda: class_of({"__init__": lambda self: setattr(self, "x", 1)})()
    yield lambda: class_of(
        {"annotations": {"x": int}, "__post_init__": lambda self: setattr(self, "x", 5)}
    )(1)
    yield lambda: class_of(
        {"annotations": {"x": int}, "__init__": lambda s: None, "__post_init__": lambda s: None}
    )
    yield lambda: class_of({"annotations": {"x": int}}, strict=True)(1)
    yield lambda: class_of({"annotations": {"x": int}}, strict=False)(1)
    yield lambda: class_of({"method": lambda self: 1}, (Pair,), strict=True)(ONE).method()
    yield lambda: class_of({"annotations": {"x": int}}, is_abstract=True)(1)
    yield lambda: class_of({"annotations": {"x": int}}, wrong=True)(1)
    yield lambda: class_of({"f": abc.abstractmethod(lambda self: 1)})()
    yield lambda: class_of(
        {"annotations": {"x": object}, "__init__": lambda s: setattr(s, "x", s.f), "f": len}
    )()
    yield lambda: class_of({"annotations": {"f": object}})(jax.jit(eqx.nn.PReLU())).f(-ONE)
    yield lambda: class_of({"annotations": {"x": object}})(eqx.nn.PReLU().__call__)
    yield lambda: class_of({"annotations": {"x": object}, "__slots__": ()})(1)

    T = typing.TypeVar("T")

    class Generic(Module, typing.Generic[T]):
        x: T

    yield lambda: Generic[int](1)
    yield lambda: Generic(1)
    yield lambda: jax.tree.map(lambda x: x + 1, Generic[int](ONE))
    yield lambda: jax.tree.structure(Generic[int](ONE)) == jax.tree.structure(Generic(ONE))


@calls("field")
def field(name, eqx):
    def model(value, annotation=object, **options):
        class Model(eqx.Module):
            x: annotation = name(**options)

        return Model() if value is None else Model(value)

    yield lambda: model(1)
    yield lambda: model(1, static=True)
    yield lambda: jax.tree.leaves(model(1, static=False))
    yield lambda: jax.tree.leaves(model(1, static=True))
    yield lambda: model(None, default=5)
    yield lambda: model(None, default_factory=list)
    yield lambda: model("3", converter=int)
    yield lambda: model(None, default="3", converter=int)
    yield lambda: model(1, converter=jnp.asarray, static=False)
    yield lambda: model("a", converter=int)
    yield lambda: model(1, init=False)
    yield lambda: model(ONE, static=True)
    yield lambda: model(np.ones(2), static=True)
    yield lambda: model([1], static=True)
    yield lambda: model(1, metadata={"a": 1})
    yield lambda: model(1, metadata={"static": True})
    yield lambda: model(1, repr=False)
    yield lambda: repr(model(1, repr=False))
    yield lambda: model(1, kw_only=True)
    yield lambda: model(1, wrong=1)
    yield lambda: model(None, default=1, default_factory=list)
    yield lambda: name().metadata == {}
    yield lambda: dict(name(static=True).metadata)
    yield lambda: name(1)
    yield lambda: isinstance(name(default=1), dataclasses.Field)
    yield lambda: model(None)


@calls("static_field")
def static_field(name, eqx):
    def make(value, **options):
        class Model(eqx.Module):
            x: object = name(**options)

        return Model(value)

    yield make, "a"
    yield lambda: jax.tree.leaves(make(1))
    yield lambda: make("a", default="b")
    yield lambda: make("a", converter=str.upper)
    yield lambda: name(static=True)
    yield lambda: name(1)


@calls("AbstractVar", "AbstractClassVar", "internal.AbstractVar", "internal.AbstractClassVar")
def abstract_variables(name, eqx):
    class Base(eqx.Module):
        x: name[int]

    class Attribute(Base):
        x: int

    class ClassVariable(Base):
        x: typing.ClassVar[int] = 3

    class Property(Base):
        @property
        def x(self):
            return 4

    class Default(Base):
        x: int = 5

    class Still(Base):
        y: int

    class Unannotated(Base):
        x = 6

    yield Base
    yield Attribute, 1
    yield lambda: ClassVariable().x
    yield lambda: Property().x
    yield lambda: Default().x
    yield Still, 1
    yield lambda: Unannotated().x
    yield lambda: [f.name for f in dataclasses.fields(Base)]
    yield lambda: sorted(getattr(Base, "__abstractvars__", ()))
    yield lambda: sorted(getattr(Base, "__abstractclassvars__", ()))
    yield lambda: type(eqx.Module)("Made", (eqx.Module,), {"__annotations__": {"x": name}})
    yield lambda: type(eqx.Module)(
        "Made", (eqx.Module,), {"__annotations__": {"x": name[int]}, "x": 1}
    )
    yield name
    yield lambda: name[int, str]


@calls("module_update_wrapper")
def module_update_wrapper(name, eqx):
    class Wrapping(eqx.Module):
        fn: object

        @property
        def __wrapped__(self):
            return self.fn

        def __call__(self, *args):
            return self.fn(*args)

    class Without(eqx.Module):
        fn: object

    def documented(x: int) -> int:
        """Words."""
        return x

    wrapped = name(Wrapping(documented))
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        yield lambda attribute=attribute: getattr(wrapped, attribute)
    yield lambda: wrapped(3)
    yield lambda: str(inspect.signature(wrapped))
    yield lambda: name(Wrapping(documented), lambda x: x).__name__
    yield name, Without(documented)
    yield name, 1
    yield name
    yield lambda: name(wrapper=Wrapping(documented), wrapped=documented).__doc__
    yield lambda: jax.tree.map(lambda x: x, wrapped).__name__


@calls("Partial")
def partial(name, eqx):
    def function(*args, **kwargs):
        return args, kwargs

    yield lambda: name(function, 1, a=2)(3, b=4)
    yield lambda: name(function, 1, a=2)(a=4)
    yield lambda: name(function)()
    yield lambda: name(function, 1, a=2).args
    yield lambda: name(function, 1, a=2).keywords
    yield lambda: name(function).func is function
    yield lambda: len(jax.tree.leaves(name(function, 1, a=ONE)))
    yield lambda: name(function, ONE) == name(function, ONE)
    yield lambda: name(function, 1) == name(function, 1)
    yield lambda: name(function, 1) == name(function, 2)
    yield lambda: name(name(function, 1), 2)(3)
    yield lambda: name(function, func=1)()
    yield name
    yield lambda: name(1)()
    yield lambda: jax.jit(name(jnp.add, ONE))(ONE)
    yield lambda: eqx.filter_jit(name(jnp.add, ONE))(ONE)
    yield lambda: isinstance(name(function), eqx.Module)
    yield lambda: repr(name(function, 1, a=2)).replace("partial.<locals>.", "")
    yield lambda: setattr(name(function), "args", ())


@calls("StrictConfig")
def strict_config(name, eqx):
    yield name
    yield lambda: name(force_abstact=True)
    yield lambda: name(force_abstract=True)
    yield lambda: name(allow_abstract_name=True)
    yield name, True

    def made(strict):
        class Made(eqx.Module, strict=strict):
            x: int

        return Made(1)

    yield lambda: made(name())
    yield lambda: made(name(force_abstact=True))


@calls("Enumeration", "internal.Enumeration")
def enumeration(name, eqx):
    class Result(name):
        fine = ""
        bad = "it is bad"

    class More(Result):
        worse = "it is worse"

    bad = Result.bad
    yield lambda: Result[bad]
    yield lambda: Result[More.worse]
    yield lambda: More[More.worse]
    yield lambda: (len(Result), len(More))
    yield lambda: bad == Result.bad
    yield lambda: bad != Result.fine
    yield lambda: bad == 1
    yield lambda: bad == More.bad
    yield lambda: Result[More.promote(bad)] if False else More[More.promote(bad)]
    yield lambda: Result.promote(bad)
    yield lambda: Result[Result.where(True, bad, Result.fine)]
    yield lambda: Result[Result.where(jnp.array(False), bad, Result.fine)]
    yield lambda: Result.where(jnp.array([False, True]), bad, Result.fine)
    yield lambda: Result.where(True, bad, 1)
    yield lambda: eqx.filter_jit(lambda p: Result.where(p, bad, Result.fine) == bad)(
        jnp.array(True)
    )
    yield lambda: jax.jit(lambda x: x == bad)(bad)
    yield lambda: jax.tree.leaves(bad)
    yield lambda: bad in Result
    yield lambda: bad in More
    yield lambda: isinstance(bad, Result)
    yield lambda: repr(bad).split(".")[-1]
    yield lambda: bad.is_traced()
    yield lambda: jax.jit(lambda x: x.is_traced())(bad)
    yield lambda: bad.error_if(ONE, False)
    yield lambda: bad.error_if(ONE, jnp.array(True))
    yield lambda: bad.error_if(ONE, True)
    yield lambda: jax.vmap(lambda p: Result.where(p, bad, Result.fine))(jnp.array([True, False]))
    yield Result
    yield lambda: list(Result)
    yield lambda: hash(bad)
    yield lambda: Result["bad"]
    yield lambda: Result[0]
    yield lambda: Result.missing
    yield lambda: setattr(Result, "bad", 1)
    yield lambda: type(name)("Made", (name,), {"where": "a"})
    yield lambda: type(name)("Made", (Result,), {"bad": "another"})
    yield lambda: type(name)("Made", (name,), {"a": 1})
    yield lambda: bad._value
