"""When one function may stand for another: the same object, the same parts, or library code over plain values."""

import copy
import enum
import functools
import pickle
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vernal._ground import frozen, same, settled_packages, static_key

SOURCE = """
import functools, jax, jax.numpy as jnp
def make(*captured, default=None, **kw):
    a, b, c = (*captured, None, None, None)[:3]
    def inner(x, y=default, *, z=kw.get("z")):
        return (a, b, c, x, y, z)
    return inner
def counter():
    n = 0
    def inner():
        nonlocal n
        n += 1
        return n
    return inner
def recursive():
    def inner(x):
        return inner(x)
    return inner
def not_yet():
    def inner():
        return later
    if False:
        later = 1
    return inner
def nested(value):
    def outer(x):
        return deep(x)
    def deep(x):
        return value
    return outer
def with_attribute(value):
    def inner():
        return inner2.setting
    inner2 = inner
    inner.setting = value
    return inner
def plain():
    return lambda x: x + 1
class Thing:
    pass
"""


class Pair(NamedTuple):
    x: object
    y: object


class Colour(enum.Enum):
    RED = 1


class Changing(enum.Enum):
    LIST = [1]


@pytest.fixture
def library(monkeypatch):
    module = types.ModuleType("settled_for_tests")
    monkeypatch.setitem(sys.modules, "settled_for_tests", module)
    exec(compile(SOURCE, "settled_for_tests.py", "exec"), module.__dict__)
    settled_packages.add("settled_for_tests")
    yield module
    settled_packages.discard("settled_for_tests")


ARRAY = jnp.ones(2)
PLAIN = [
    (1,),
    (1.5, "a", b"b"),
    (True, None, 1j),
    ((1, (2.0,)), frozenset({1})),
    (jnp.float32, np.dtype("int8"), np.float32(1)),
    (Pair(1, ("a",)), Colour.RED),
    (jnp.tanh, np.add, len),
    (ARRAY,),
    (float("nan"),),
]
CHANGEABLE = [
    [1],
    {"a": 1},
    {1},
    bytearray(b"a"),
    types.SimpleNamespace(a=1),
    lambda x: x,
    object(),
    np.ones(2),
    ([1],),
    Pair([1], 1),
    Changing.LIST,
    (lambda: 0,),
]


@pytest.mark.parametrize("captured", PLAIN, ids=range(len(PLAIN)))
def test_library_functions_over_plain_values_are_the_same(library, captured):
    one, two = library.make(*captured), library.make(*captured)
    assert one is not two
    assert same(one, two)
    assert static_key(one) == static_key(two)
    assert hash(static_key(one)) == hash(static_key(two))
    assert same(library.make(default=captured), library.make(default=captured))
    assert same(library.make(z=captured), library.make(z=captured))
    assert same(library.nested(captured), library.nested(captured))


@pytest.mark.parametrize("value", CHANGEABLE, ids=lambda v: type(v).__name__)
def test_library_functions_over_what_can_change_are_only_themselves(library, value):
    for make in (
        lambda: library.make(value),
        lambda: library.make(default=value),
        lambda: library.make(z=value),
        lambda: library.nested((value,)),
        lambda: library.with_attribute(value),
    ):
        assert not same(make(), make())
        one = make()
        assert same(one, one)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ("a", "b"),
        ((1,), (True,)),
        (jnp.float32, jnp.float16),
        (ARRAY, jnp.ones(2)),
        (jnp.tanh, jnp.sinh),
    ],
    ids=range(8),
)
def test_other_values_are_other_functions(library, a, b):
    assert not same(library.make(a), library.make(b))
    assert not same(library.make(default=a), library.make(default=b))
    assert not same(library.make(z=a), library.make(z=b))
    assert not same(library.nested(a), library.nested(b))


@pytest.mark.parametrize("make", ["counter", "recursive", "not_yet"])
def test_functions_that_may_assign_what_they_capture_are_only_themselves(library, make):
    make = getattr(library, make)
    assert not same(make(), make())


def test_the_same_code_in_another_module_or_of_a_user_is_another_function(library):
    assert same(library.plain(), library.plain())
    settled_packages.discard("settled_for_tests")
    assert not same(library.plain(), library.plain())
    settled_packages.add("settled_for_tests")
    namespace = {"__name__": "settled_for_tests"}
    exec(compile(SOURCE, "elsewhere.py", "exec"), namespace)
    assert not same(namespace["plain"](), namespace["plain"]())


def test_what_a_wrapper_says_of_itself_does_not_count():
    def make(k):
        @functools.wraps(optax.sgd)
        def wrapper(x):
            return k

        return wrapper

    assert make(1).__module__.startswith("optax")
    assert not same(make(1), make(1))


def test_an_array_that_is_gone_is_equal_to_no_other(library):
    key = static_key(library.make(jnp.ones(2)))
    assert key != static_key(library.make(jnp.ones(2)))
    assert key != key[0]
    assert key == key


def test_a_key_of_a_library_function_does_not_keep_it_alive(library):
    import gc
    import weakref

    array = jnp.ones(3)
    fn = library.make(array)
    key = static_key(fn)
    refs = weakref.ref(fn), weakref.ref(array)
    del fn, array
    gc.collect()
    assert refs[0]() is None
    assert refs[1]() is None
    assert key is not None


def test_four_fresh_optimisers_are_one_value():
    keys = {static_key(tuple(optax.adam(1e-3))) for _ in range(4)}
    assert len(keys) == 1
    assert static_key(tuple(optax.adam(1e-3))) != static_key(tuple(optax.adam(2e-3)))


def test_a_partial_in_structure_cannot_be_changed():
    partial = functools.partial(max, 1, key=abs)
    kept = frozen((1, (partial,)))[1][0]
    assert isinstance(kept, functools.partial)
    assert kept(2, -3) == partial(2, -3) == -3
    assert static_key(kept) == static_key(partial)
    with pytest.raises(TypeError, match="does not support item assignment"):
        kept.keywords["key"] = None
    partial.keywords["key"] = lambda x: -x
    assert kept(2, -3) == -3
    assert static_key(kept) != static_key(partial)
    assert pickle.loads(pickle.dumps(kept))(2, -3) == -3
    assert copy.deepcopy(kept)(2, -3) == -3
    assert functools.partial(kept, 5)(2, -3) == 5
    assert frozen(kept) is kept
    plain = (1, ("a",))
    assert frozen(plain) is plain


def test_a_partial_with_attributes_is_itself():
    one, two = functools.partial(max, 1), functools.partial(max, 1)
    assert same(one, two)
    one.note = two.note = "a"
    assert not same(one, two)
    assert frozen(one) is one


def test_jitted_and_cached_functions_are_themselves():
    assert same(jax.nn.relu, jax.nn.relu)
    assert not same(jax.jit(abs), jax.jit(abs))
    assert not same(functools.cache(abs), functools.cache(abs))


def test_a_file_of_the_users_named_like_a_standard_module_is_not_settled(tmp_path, monkeypatch):
    module = types.ModuleType("profile")
    module.__file__ = str(tmp_path / "profile.py")
    monkeypatch.setitem(sys.modules, "profile", module)
    exec(compile(SOURCE, module.__file__, "exec"), module.__dict__)
    assert not same(module.plain(), module.plain())
