"""Functions whose answer depends on something that can change: one kind per way to reach it.

Each kind makes a state, makes any number of functions over that state (all of them `k * x`, with
k = 1.0 at first), and changes k in place.
"""

import array
import collections
import contextvars
import dataclasses
import functools
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Kind(NamedTuple):
    """How to make a state, a function over it, and how to change it in place."""

    new: Callable[[], Any]
    make: Callable[[Any], Any]
    change: Callable[[Any, float], Any]


@dataclasses.dataclass
class Mutable:
    k: float = 1.0


@dataclasses.dataclass
class Nested:
    inner: list = dataclasses.field(default_factory=lambda: [{"a": Mutable()}])


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str = "same"
    k: float = dataclasses.field(default=1.0, compare=False)


class PlainSubclass(Frozen):
    """Compares by the fields of its base alone."""


class Plain:
    def __init__(self):
        self.k = 1.0

    def times(self, x):
        return x * self.k

    @property
    def doubled(self):
        return 2 * self.k

    def __call__(self, x):
        return x * self.k

    def scale(self, factor, x):
        return x * (self.k * factor)

    half = functools.partialmethod(scale, 0.5)


class Slotted:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 1.0


class EqualToAll:
    """Says that it equals every other of its class."""

    def __init__(self):
        self.k = 1.0

    def __eq__(self, other):
        return type(other) is EqualToAll

    def __hash__(self):
        return 7


class Over:
    """A callable that holds the state."""

    def __init__(self, state):
        self.state = state

    def __call__(self, x):
        return x * self.state.k


class Node:
    def __init__(self):
        self.me = self
        self.k = 1.0


def _free(state, x):
    return x * state.k


def _set_k(state: Any, k: float) -> None:
    object.__setattr__(state, "k", k)


def _set_class_k(cls: Any, k: float) -> None:
    cls.k = k


def _set_item(key: Any) -> Callable[[Any, float], None]:
    return lambda state, k: state.__setitem__(key, k)


def _long_list() -> list[float]:
    return [1.0] * 1001


def _cell() -> Any:
    k = 1.0

    def put(value):
        nonlocal k
        k = value

    return (lambda: lambda x: x * k), put


def _late_cell() -> Any:
    # The variable is assigned after the functions over it exist.
    def put(value):
        nonlocal k
        k = value

    def make():
        return lambda x: x * k

    k = 1.0
    return make, put


def _namespace(name: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": name, "K": 1.0}
    exec("make = lambda: lambda x: x * K", space)
    return space


def _fresh_class(**extra: Any) -> type:
    return type("K", (), {"k": 1.0, "times": classmethod(lambda cls, x: x * cls.k), **extra})


def _fresh_module() -> types.ModuleType:
    module = types.ModuleType("settings_of_a_test")
    vars(module)["k"] = 1.0
    return module


def _carrier() -> Any:
    def carrier():
        return None

    carrier.__dict__["k"] = 1.0
    return carrier


def _dispatcher() -> Any:
    return functools.singledispatch(lambda value: 1.0)


def _set_default(state: Any, k: float) -> None:
    state.__defaults__ = (k,)


def _with_default() -> Any:
    def number(k=1.0):
        return k

    return number


def _with_keyword_default() -> Any:
    def number(*, k=1.0):
        return k

    return number


def _wrapped_like(library: Any) -> Callable[[Any], Any]:
    def make(state):
        @functools.wraps(library)
        def f(x):
            return x * state.k

        return f

    return make


def _disguised(state: Any) -> Any:
    def f(x):
        return x * state.k

    f.__module__, f.__name__, f.__qualname__ = "jax.nn", "relu", "relu"
    return f


def _recursive(state: Any) -> Any:
    def f(x, n=2):
        return f(x, n - 1) if n else x * state.k

    return f


def _cached(state: Any) -> Any:
    read = functools.lru_cache(lambda: state.k)
    return lambda x: x * read()


def _fresh_callable_class(state: Any) -> Any:
    return type("F", (), {"__call__": lambda self, x: x * state.k})()


def _with_own_eq(state: Any) -> Any:
    # Two callables that say they are equal: each is a function of its own, captured by a lambda.
    cls = type("F", (EqualToAll,), {"__call__": lambda self, x: x * state.k})
    f = cls()
    return lambda x: f(x)


def _generator(state: Any) -> Any:
    def ks():
        while True:
            yield state.k

    numbers = ks()
    return lambda x: x * next(numbers)


def _weak(state: Any) -> Any:
    reference = weakref.ref(state)
    return lambda x: x * reference().k


def _default_argument(state: Any) -> Any:
    return lambda x, state=state: x * state.k


def _keyword_default_argument(state: Any) -> Any:
    return lambda x, *, state=state: x * state.k


def _lambda(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda state: lambda x: x * read(state)


def _method_in_a_lambda(state: Any) -> Any:
    g = state.times
    return lambda x: g(x)


def _getter_of_a_dict(state: Any) -> Any:
    get = state.get
    return lambda x: x * get("k")


def _pulled_in(state: Any) -> Any:
    # A library function (of the standard library) over a user's: an iterator is a state of its own.
    return lambda x: x * next(itertools.repeat(state)).k


KINDS: dict[str, Kind] = {
    "dataclass": Kind(Mutable, lambda s: lambda x: x * s.k, _set_k),
    "dataclass read by another function": Kind(Mutable, _lambda(lambda s: s.k), _set_k),
    "namespace": Kind(lambda: types.SimpleNamespace(k=1.0), lambda s: lambda x: x * s.k, _set_k),
    "plain object": Kind(Plain, lambda s: lambda x: x * s.k, _set_k),
    "slots": Kind(Slotted, lambda s: lambda x: x * s.k, _set_k),
    "property": Kind(Plain, lambda s: lambda x: x * s.doubled, _set_k),
    "object with __eq__": Kind(EqualToAll, lambda s: lambda x: x * s.k, _set_k),
    "compare=False": Kind(Frozen, lambda s: lambda x: x * s.k, _set_k),
    "plain subclass of a dataclass": Kind(PlainSubclass, lambda s: lambda x: x * s.k, _set_k),
    "an object that holds itself": Kind(Node, lambda s: lambda x: x * s.me.me.k, _set_k),
    "list": Kind(lambda: [1.0], lambda s: lambda x: x * s[0], _set_item(0)),
    "1,001 items": Kind(_long_list, lambda s: lambda x: x * s[1000], _set_item(1000)),
    "dict": Kind(lambda: {"k": 1.0}, lambda s: lambda x: x * s["k"], _set_item("k")),
    "default dict": Kind(
        lambda: collections.defaultdict(lambda: 1.0), lambda s: lambda x: x * s["k"], _set_item("k")
    ),
    "deque": Kind(lambda: collections.deque([1.0]), lambda s: lambda x: x * s[0], _set_item(0)),
    "bytearray": Kind(
        lambda: bytearray([1]),
        lambda s: lambda x: x * float(s[0]),
        lambda s, k: s.__setitem__(0, int(k)),
    ),
    "array of the standard library": Kind(
        lambda: array.array("d", [1.0]), lambda s: lambda x: x * s[0], _set_item(0)
    ),
    "mapping proxy": Kind(
        lambda: {"k": 1.0},
        lambda s: (lambda proxy: lambda x: x * proxy["k"])(types.MappingProxyType(s)),
        _set_item("k"),
    ),
    "set": Kind(
        lambda: {1.0},
        lambda s: lambda x: x * max(s),
        lambda s, k: (s.clear(), s.add(k)),
    ),
    "deep inside": Kind(
        Nested,
        lambda s: lambda x: x * s.inner[0]["a"].k,
        lambda s, k: _set_k(s.inner[0]["a"], k),
    ),
    "nonlocal": Kind(_cell, lambda s: s[0](), lambda s, k: s[1](k)),
    "a cell that is assigned later": Kind(_late_cell, lambda s: s[0](), lambda s, k: s[1](k)),
    "context variable": Kind(
        lambda: contextvars.ContextVar("k", default=1.0),
        lambda s: lambda x: x * s.get(),
        lambda s, k: s.set(k),
    ),
    "default argument": Kind(Mutable, _default_argument, _set_k),
    "keyword default": Kind(Mutable, _keyword_default_argument, _set_k),
    "function attribute": Kind(_carrier, lambda s: lambda x: x * s.k, _set_k),
    "__defaults__": Kind(_with_default, lambda s: lambda x: x * s(), _set_default),
    "__kwdefaults__": Kind(
        _with_keyword_default,
        lambda s: lambda x: x * s(),
        lambda s, k: setattr(s, "__kwdefaults__", {"k": k}),
    ),
    "singledispatch": Kind(
        _dispatcher,
        lambda s: lambda x: x * s(2),
        lambda s, k: s.register(int, lambda value: k),
    ),
    "lru_cache": Kind(Mutable, _cached, _set_k),
    "generator": Kind(Mutable, _generator, _set_k),
    "iterator": Kind(Mutable, _pulled_in, _set_k),
    "weak reference": Kind(Mutable, _weak, _set_k),
    "recursion": Kind(Mutable, _recursive, _set_k),
    "bound method": Kind(Plain, lambda s: s.times, _set_k),
    "types.MethodType": Kind(Plain, lambda s: types.MethodType(_free, s), _set_k),
    "partialmethod": Kind(Plain, lambda s: s.half, _set_k),
    "partial of a bound method": Kind(Plain, lambda s: functools.partial(s.times), _set_k),
    "partial of a partial of a bound method": Kind(
        Plain, lambda s: functools.partial(functools.partial(s.scale, 2.0)), _set_k
    ),
    "lambda over a bound method": Kind(Plain, _method_in_a_lambda, _set_k),
    "partial of an object": Kind(Plain, lambda s: functools.partial(_free, s), _set_k),
    "partial of a partial of an object": Kind(
        Plain, lambda s: functools.partial(functools.partial(_free, s)), _set_k
    ),
    "partial of a closure": Kind(
        Mutable, lambda s: functools.partial(lambda k, x: x * s.k * k, 2.0), _set_k
    ),
    "method of a dict": Kind(lambda: {"k": 1.0}, _getter_of_a_dict, _set_item("k")),
    "callable object": Kind(Mutable, Over, _set_k),
    "callable object of a fresh class": Kind(Mutable, _fresh_callable_class, _set_k),
    "callable with __eq__ in a lambda": Kind(Mutable, _with_own_eq, _set_k),
    "class": Kind(_fresh_class, lambda s: lambda x: x * s.k, _set_class_k),
    "instance that reads its class": Kind(
        _fresh_class, lambda s: (lambda one: lambda x: x * one.k)(s()), _set_class_k
    ),
    "classmethod": Kind(_fresh_class, lambda s: s.times, _set_class_k),
    "module": Kind(_fresh_module, lambda s: lambda x: x * s.k, _set_k),
    "getattr of a module": Kind(_fresh_module, lambda s: lambda x: x * getattr(s, "k"), _set_k),  # noqa: B009 (the attack)
    "global of a namespace": Kind(
        lambda: _namespace("some_program"), lambda s: s["make"](), _set_item("K")
    ),
    "namespace called optax": Kind(
        lambda: _namespace("optax"), lambda s: s["make"](), _set_item("K")
    ),
    "namespace called jax.nn": Kind(
        lambda: _namespace("jax.nn"), lambda s: s["make"](), _set_item("K")
    ),
    "wraps of a library function": Kind(Mutable, _wrapped_like(jax.nn.relu), _set_k),
    "wraps of a builtin": Kind(Mutable, _wrapped_like(abs), _set_k),
    "names of a library function": Kind(Mutable, _disguised, _set_k),
}
