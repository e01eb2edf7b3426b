"""Functions equal by value: when two functions have one token, and that nothing is kept alive."""

import collections
import dataclasses
import enum
import functools
import gc
import itertools
import operator
import threading
import types
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal._ground import function_token, intern_key, same
from vernal._ground._functions import _remembered, _tokens

SCALE = 1.0
LOG: list[int] = []
SETTINGS = types.ModuleType("settings")


class Settings:
    scale = 1.0


@pytest.fixture
def put(monkeypatch):
    """Binds a global variable of this module for one test."""
    return functools.partial(monkeypatch.setitem, globals())


def kind_name(value: Any) -> str:
    return type(value).__name__


def capture(value: Any):
    return lambda x: (x, value)


def default(value: Any):
    return lambda x, y=value: (x, y)


def keyword(value: Any):
    return lambda x, *, y=value: (x, y)


def attribute(value: Any):
    f = lambda x: x  # noqa: E731 (it is to have no name)
    f.value = value
    return f


def partial(value: Any):
    return functools.partial(capture(0), value)


def partial_of(value: Any):
    return functools.partial(capture(value), x=1)


def nested(value: Any):
    inner = capture(value)
    return lambda x: inner(x)


def recursive(value: Any):
    def even(n):
        return value if n == 0 else odd(n - 1)

    def odd(n):
        return value if n == 1 else even(n - 1)

    return even


def jitted(value: Any):
    return jax.jit(capture(value))


def custom(value: Any):
    f = jax.custom_jvp(lambda x: x)
    f.defjvp(capture(value))
    return f


def custom_reverse(value: Any):
    f = jax.custom_vjp(lambda x: x)
    f.defvjp(capture(0), capture(value))
    return f


def batched(value: Any):
    return jax.vmap(capture(value))


def derivative(value: Any):
    return jax.grad(capture(value))


def cached(value: Any):
    return functools.cache(capture(value))


def wrapped(value: Any):
    return functools.wraps(capture(value))(lambda *args: args)


def method(value: Any):
    return Bound(value).call


def inside(value: Any):
    return capture([{"a": (value,)}])


MAKERS = [
    capture,
    default,
    keyword,
    attribute,
    partial,
    partial_of,
    nested,
    recursive,
    jitted,
    custom,
    custom_reverse,
    batched,
    derivative,
    cached,
    wrapped,
    method,
    inside,
]


class Pair(NamedTuple):
    a: Any
    b: Any = 0


@dataclasses.dataclass
class Bound:
    value: Any

    def call(self, x):
        return x, self.value


class ByName:
    def __init__(self, name: str):
        self.name = name

    def __eq__(self, other: Any) -> bool:
        return type(other) is ByName and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class Slotted:
    """Compares by value and cannot be referred to weakly."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return type(other) is Slotted and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)


class Plain:
    def __init__(self, value: Any):
        self.value = value


class Color(enum.Enum):
    RED = 1


class SubFloat(float):
    pass


class BadHash:
    def __eq__(self, other: Any) -> bool:
        return True

    def __hash__(self) -> int:
        raise RuntimeError("no hash")


class BadEq:
    def __eq__(self, other: Any) -> bool:
        raise RuntimeError("no equality")

    def __hash__(self) -> int:
        return 1


def one_token(a: Any, b: Any) -> bool:
    result = function_token(a) is function_token(b)
    assert same(a, b) == same(b, a) == result
    assert (intern_key(a) == intern_key(b)) == result
    return result


# --- never a wrong hit ---

NAN = float("nan")
DIFFERENT = {
    "value": (1, 2),
    "int_float": (1, 1.0),
    "int_bool": (1, True),
    "float_bool": (1.0, True),
    "zeros": (0.0, -0.0),
    "complex_zeros": (0j, complex(0.0, -0.0)),
    "nan": (NAN, 0.0),
    "subclass": (1.0, SubFloat(1.0)),
    "numpy_scalar": (np.float32(1), np.float64(1)),
    "numpy_zero": (np.float32(0.0), np.float32(-0.0)),
    "array": (np.array([1, 2]), np.array([1, 3])),
    "array_dtype": (np.array([1]), np.array([1.0])),
    "array_shape": (np.zeros(4), np.zeros((2, 2))),
    "array_of_objects": (np.array([1, "a"], object), np.array([True, "a"], object)),
    "jax_array": (jnp.ones(2), jnp.ones(2)),
    "key": (jax.random.key(0), jax.random.key(0)),
    "tuple_list": ((1,), [1]),
    "list": ([1, 2], [1, 3]),
    "list_deep": ([[1]], [[1.0]]),
    "set": ({1}, {True}),
    "dict_value": ({"a": 1}, {"a": 1.0}),
    "dict_key": ({1: 0}, {True: 0}),
    "dict_order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "named": (Pair(1), (1, 0)),
    "class": (int, float),
    "function": (len, abs),
    "module": (functools, itertools),
    "dtype": (jnp.dtype("float32"), jnp.dtype("float16")),
    "range": (range(3), range(4)),
    "slice": (slice(0.0), slice(-0.0)),
    "dataclass": (Bound(1), Bound(1.0)),
    "own_rule": (ByName("a"), ByName("b")),
    "own_rule_strong": (Slotted(1), Slotted(2)),
    "plain_objects": (Plain(1), Plain(1)),
    "generators": ((i for i in ()), (i for i in ())),
    "iterators": (iter([1]), iter([1])),
    "random": (np.random.default_rng(0), np.random.default_rng(0)),
    "bound_builtin": ([].append, [].append),
    "partial": (functools.partial(len, 1), functools.partial(len, True)),
    "getter": (operator.itemgetter(1), operator.itemgetter(True)),
    "namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=1.0)),
    "pytree": (jax.tree_util.Partial(len, 1), jax.tree_util.Partial(len, True)),
    "pytree_static": (jax.tree_util.Partial(len), jax.tree_util.Partial(abs)),
    "bad_hash": (BadHash(), BadHash()),
    "bad_eq": (BadEq(), BadEq()),
    "sentinel": (object(), object()),
}


@pytest.mark.parametrize("make", MAKERS)
def test_another_value_is_another_function_wherever_it_is_held(make):
    values = [1, 1.0, True, 2, -0.0, 0.0, (), [], None, "1", jnp.ones(2), jnp.ones(2)]
    functions = [make(value) for value in values]
    for a, b in itertools.combinations(functions, 2):
        assert not one_token(a, b)


@pytest.mark.parametrize(("a", "b"), DIFFERENT.values(), ids=DIFFERENT)
def test_values_that_differ_make_functions_that_differ(a, b):
    assert not one_token(capture(a), capture(b))
    assert not one_token(inside(a), inside(b))


def test_other_code_is_another_function():
    assert not one_token(lambda x: x + 1, lambda x: x + 2)
    assert not one_token(lambda x: x + 1, lambda x: x + 1.0)


def test_another_binding_of_a_global_variable_makes_another_function(put):
    def make():
        return lambda x: x * SCALE

    before = make()
    token = function_token(before)
    assert one_token(before, make())
    put("SCALE", 2.0)
    assert not one_token(before, make())
    put("SCALE", 1)
    assert not one_token(before, make())
    put("SCALE", 1.0)
    assert function_token(make()) is token


def helper(x):
    return x * SCALE


def helper_of_helper(x):
    return helper(x)


def test_another_binding_is_seen_through_the_functions_that_are_called(put):
    before = capture(helper_of_helper)
    assert one_token(before, capture(helper_of_helper))
    put("SCALE", 2.0)
    assert not one_token(before, capture(helper_of_helper))


def test_another_attribute_of_a_module_or_class_makes_another_function(monkeypatch):
    def make():
        return lambda x: x * SETTINGS.scale * Settings.scale

    SETTINGS.scale = 1.0
    before = make()
    assert one_token(before, make())
    with monkeypatch.context() as patch:
        patch.setattr(Settings, "scale", 2.0)
        assert not one_token(before, make())
    SETTINGS.scale = 2.0
    assert not one_token(before, make())


def in_module(name: str, source: str = "f = lambda x: x + y", **names: Any) -> Any:
    module = types.ModuleType(name)
    vars(module).update(names)
    exec(compile(source, "<the same file>", "exec"), vars(module))
    return module


def test_the_same_code_in_another_module_is_another_function(monkeypatch):
    a, b = in_module("a", y=1), in_module("b", y=1)
    assert a.f.__code__ == b.f.__code__
    assert not one_token(a.f, b.f)
    for module in (a, b):
        monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
        module.f.__qualname__ = "another"
    again = types.FunctionType(a.f.__code__, vars(a))
    assert one_token(again, types.FunctionType(a.f.__code__, vars(a)))
    assert not one_token(again, types.FunctionType(b.f.__code__, vars(b)))


def test_namespaces_that_are_no_modules_are_told_apart_even_if_one_is_gone():
    def make(namespace):
        exec("def maker():\n    return lambda x: x + y", namespace)
        return namespace["maker"]()

    spaces = [{"y": 1, "__name__": "nowhere"} for _ in range(2)]
    a, again, b = make(spaces[0]), make(spaces[0]), make(spaces[1])
    assert one_token(a, again)
    assert not one_token(a, b)
    tokens = {function_token(make({"y": 1, "__name__": "nowhere"})) for _ in range(20)}
    assert len(tokens) == 20


def assignable(value: Any):
    def f(x):
        return x * value

    def assign(new):
        nonlocal value
        value = new

    return f, assign


def test_an_assigned_variable_makes_another_function_of_the_same_object():
    f, assign = assignable(1.0)
    first = function_token(f)
    assert function_token(f) is first
    assign(2.0)
    second = function_token(f)
    assert second is not first
    assert function_token(f) is second


@pytest.mark.parametrize("hold", [capture, functools.partial, jax.vmap, jax.jit, inside])
def test_a_variable_deep_inside_is_watched(hold):
    for before, after in [(1.0, 2.0), (capture(1), capture(1)), ((1, [2]), (1, [3]))]:
        inner, assign = assignable(before)
        f = hold(inner)
        first = function_token(f)
        assert function_token(f) is first
        assign(after)
        assert function_token(f) is not first


def in_a_loop():
    made = []
    for value in (1, 2):
        made.append(lambda: value)  # noqa: B023 (the variable is to be shared)
    return made[0]


def in_a_comprehension():
    return [lambda: value for value in (1, 2)][0]  # noqa: B023 (likewise)


def in_a_while():
    value = 0
    while value < 2:
        value += 1
        f = lambda: value  # noqa: B023, E731 (likewise)
    return f


def before_the_assignment():
    value = 1
    f = lambda: value  # noqa: E731 (it is to have no name)
    value = 2
    return f


def in_a_generator():
    def generate():
        for value in (1, 2):
            yield lambda: value  # noqa: B023 (the variable is to be shared)

    return next(generate())


def assigned_by_another():
    return assignable(1)[0]


def deleted_by_another():
    value = 1

    def delete():
        nonlocal value
        del value

    return lambda: (value, delete)


def of_a_lambda():
    return (lambda: (lambda value: lambda: value)(1))()


LOST = {"made": lambda value: lambda: value}


@pytest.mark.parametrize(
    "make",
    [
        in_a_loop,
        in_a_comprehension,
        in_a_while,
        before_the_assignment,
        in_a_generator,
        assigned_by_another,
        deleted_by_another,
        functools.partial(LOST["made"], 1),
    ],
)
def test_a_function_whose_variable_may_be_assigned_later_is_equal_to_no_other(make):
    assert not one_token(make(), make())


def after_the_last_assignment(value):
    if value is None:
        value = 1
    for _ in range(2):
        f = lambda: value  # noqa: E731 (it is to have no name)
    return f


def after_a_loop():
    for value in (1, 2):
        abs(value)
    return lambda: value


def after_a_choice(value=None):
    try:
        found = 1 if value else 2
    finally:
        value = 3
    return lambda: (found, value)


def calling_itself():
    def f(n):
        return 1 if n == 0 else f(n - 1)

    return f


def of_a_method():
    return Maker().make(1)


def of_a_class_method():
    return Maker.make_class(1)


def of_a_property():
    return Maker().made


def of_a_decorated_function():
    return decorated(1)


def of_a_local_class():
    class Local:
        def make(self, value):
            return lambda: value

    return Local().make(1)


class Maker:
    def make(self, value):
        return lambda: value

    @classmethod
    def make_class(cls, value):
        return lambda: value

    @property
    def made(self):
        value = 1
        return lambda: value


@functools.cache
def decorated(value):
    return lambda: value


def test_functions_whose_variables_are_assigned_before_are_compared():
    for make in (
        functools.partial(after_the_last_assignment, 1),
        after_a_loop,
        after_a_choice,
        calling_itself,
        of_a_method,
        of_a_class_method,
        of_a_property,
        of_a_decorated_function,
        of_a_local_class,
        of_a_lambda,
    ):
        assert one_token(make(), make())


def test_a_variable_that_is_empty_at_first_is_watched():
    tokens = []

    def f():
        return late

    tokens.append(function_token(f))
    late = 1
    tokens.append(function_token(f))
    assert tokens[0] is not tokens[1]
    assert function_token(f) is tokens[1]
    assert f() == 1


@pytest.mark.parametrize(
    ("container", "change"),
    [
        ([1, 2], lambda c: c.append(3)),
        ([1, 2], lambda c: c.__setitem__(0, 1.0)),
        ({"a": 1}, lambda c: c.update(a=2)),
        ({1}, lambda c: c.add(2)),
        (collections.deque([1]), lambda c: c.append(3)),
        ([{"a": [1]}], lambda c: c[0]["a"].append(2)),
        ((1, [2]), lambda c: c[1].append(2)),
        (Pair([1]), lambda c: c.a.append(2)),
    ],
    ids=kind_name,
)
def test_a_captured_container_changed_in_place_makes_another_function(container, change):
    f = capture(container)
    first = function_token(f)
    assert function_token(f) is function_token(capture(container)) is first
    change(container)
    new = capture(container)
    assert function_token(new) is not first
    assert function_token(f) is function_token(new)


@pytest.mark.parametrize("make", [default, keyword, partial, attribute])
def test_a_list_held_elsewhere_and_changed_in_place_makes_another_new_function(make):
    value = [1]
    first = function_token(make(value))
    kept = make(value)
    assert function_token(kept) is not None
    value.append(2)
    assert not one_token(make(value), kept)
    assert function_token(make(value)) is not first


def test_a_changed_object_makes_another_new_function():
    owner = Plain(1.0)
    before = capture(owner)
    assert one_token(before, capture(owner))
    owner.value = 2.0
    assert not one_token(before, capture(owner))


def test_an_array_that_is_gone_is_equal_to_no_other():
    tokens = [function_token(capture(jnp.ones(2))) for _ in range(50)]
    assert len(set(tokens)) == 50


def test_compiled_functions_with_other_options_are_different():
    def f(x, n):
        return x * n

    assert one_token(jax.jit(f), jax.jit(f))
    options = [{}, {"static_argnums": 1}, {"donate_argnums": 0}, {"inline": True}]
    for a, b in itertools.combinations(options, 2):
        assert not one_token(jax.jit(f, **a), jax.jit(f, **b))
    assert not one_token(functools.lru_cache(2)(f), functools.lru_cache(3)(f))
    assert not one_token(jax.custom_jvp(f), jax.custom_jvp(f, nondiff_argnums=(1,)))
    assert not one_token(jax.vmap(f, (0, None)), jax.vmap(f, (0, 0)))


# --- what a function changes itself ---


def counting_by_nonlocal():
    n = 0

    def f(x):
        nonlocal n
        n += 1
        return x

    return f


def counting_by_helper():
    n = 0

    def count():
        nonlocal n
        n += 1

    def f(x):
        count()
        return x, n

    return f


def counting_by_list():
    calls: list[int] = []

    def f(x):
        calls.append(1)
        return x

    return f


def counting_by_item():
    calls = [0]

    def f(x):
        calls[0] += 1
        return x

    return f


def counting_inside():
    calls: dict[str, int] = {}

    def f(x):
        def inner():
            calls["n"] = 1

        inner()
        return x

    return f


def counting_globally():
    def f(x):
        LOG.append(1)
        return x

    return f


COUNTING = [
    counting_by_nonlocal,
    counting_by_helper,
    counting_by_list,
    counting_by_item,
    counting_inside,
    counting_globally,
]


@pytest.mark.parametrize("make", COUNTING)
def test_a_function_that_counts_its_calls_stays_the_same(make):
    f = make()
    token = function_token(f)
    f(1)
    assert function_token(f) is token


@pytest.mark.parametrize("make", COUNTING)
def test_functions_that_have_counted_differently_are_different(make):
    f, g = make(), make()
    f(1)
    assert not one_token(f, g)


# --- always a hit ---

EQUAL = {
    "int": lambda: 10**30,
    "nan": lambda: float("nan") * 1,
    "complex": lambda: complex(1, float("nan")),
    "numpy_scalar": lambda: np.float32(2),
    "array": lambda: np.arange(4).reshape(2, 2),
    "array_of_no_items": lambda: np.zeros((0, 2)),
    "array_view": lambda: np.arange(8)[::2],
    "array_of_objects": lambda: np.array([1, "a"], object),
    "containers": lambda: [1, ("a", {"b": {2}}), frozenset({3}), collections.deque([4])],
    "ordered": lambda: collections.OrderedDict(a=1),
    "proxy": lambda: types.MappingProxyType({"a": 1}),
    "named": lambda: Pair(1, capture(2)),
    "dataclass": lambda: Bound([1]),
    "own_rule_strong": lambda: Slotted(1),
    "lambda": lambda: lambda x: x + 1,
    "closure": lambda: capture(capture(1)),
    "recursive": lambda: recursive(1),
    "partial": lambda: functools.partial(len, (1,)),
    "getter": lambda: operator.attrgetter("a"),
    "jitted": lambda: jitted(1),
    "custom": lambda: custom(1),
    "custom_reverse": lambda: custom_reverse(1),
    "method": lambda: method(1),
    "named_function": lambda: helper,
    "jax_function": lambda: jax.nn.relu,
    "ufunc": lambda: jnp.add,
    "numpy_function": lambda: np.add,
    "builtin": lambda: len,
    "descriptor": lambda: str.upper,
    "class": lambda: Plain,
    "module": lambda: jnp,
    "enum": lambda: Color.RED,
    "dtype": lambda: np.dtype("float32"),
    "device": lambda: jax.devices()[0],
    "range": lambda: range(3),
    "slice": lambda: slice(1, None),
    "namespace": lambda: types.SimpleNamespace(a=[1]),
    "pytree": lambda: jax.tree_util.Partial(len, 1),
    "defaultdict": lambda: collections.defaultdict(list, a=1),
    "shape": lambda: jax.ShapeDtypeStruct((2,), "float32"),
    "sharding": lambda: jax.P("data"),
}


@pytest.mark.parametrize("make", MAKERS)
def test_functions_that_are_made_alike_are_equal(make):
    for value in (1, NAN, (1, "a"), [1, 2], None, helper):
        assert one_token(make(value), make(value))


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_values_that_are_equal_make_equal_functions(make):
    assert one_token(capture(make()), capture(make()))
    assert one_token(inside(make()), inside(make()))


@pytest.mark.parametrize("value", [jnp.ones(2), Plain(1), object(), ByName("a")], ids=kind_name)
def test_the_same_object_makes_equal_functions(value):
    assert one_token(capture(value), capture(value))


def test_objects_with_a_rule_of_their_own_are_equal_while_they_live():
    a, b = ByName("a"), ByName("a")
    assert one_token(capture(a), capture(b))


def test_bound_methods_of_one_object_are_equal_whatever_it_does():
    owner = Plain(1)
    call = types.MethodType(capture(1), owner)
    owner.value = 2
    assert one_token(call, types.MethodType(capture(1), owner))
    assert not one_token(call, types.MethodType(capture(1), Plain(2)))


def test_a_function_that_holds_itself_in_a_list_is_compared():
    def make(value):
        held: list[Any] = [value]

        def f(x):
            return held, x

        held.append(f)
        return f

    assert one_token(make(1), make(1))
    assert not one_token(make(1), make(2))


def test_a_function_that_holds_very_much_is_equal_to_itself_only():
    a, b = capture(list(range(20_000))), capture(list(range(20_000)))
    assert not one_token(a, b)
    assert function_token(a) is function_token(a)


def test_an_empty_cell_is_no_obstacle():
    assert one_token(with_empty_cell(), with_empty_cell())


def with_empty_cell():
    if SCALE is None:
        late = 1
    return lambda: late


# --- tracers ---


def test_functions_that_capture_tracers_have_tokens_and_do_not_leak():
    def run(x):
        f, g = capture(x), capture(x)
        assert one_token(f, g)
        assert not one_token(f, capture(x + 1))
        assert not one_token(f, capture([x]))
        hash(intern_key((f, g)))
        return jnp.sin(f(x)[1])

    with jax.checking_leaks():
        jax.jit(run)(1.0)
        jax.grad(run)(1.0)
        jax.vmap(run)(jnp.ones(2))


# --- memory and threads ---


def test_what_a_function_captures_is_not_kept_alive():
    for make in (jnp.ones, Plain, ByName, np.ones, capture, Bound):
        value = make(2)
        f, in_list, gone = capture(value), capture([value]), weakref.ref(value)
        tokens = function_token(f), function_token(in_list)
        del value, f, in_list
        gc.collect()
        assert gone() is None
        assert tokens[0] is not tokens[1]


def test_thousands_of_functions_leave_nothing_behind():
    gc.collect()
    before = len(_remembered), len(_tokens)
    for i in range(2_000):
        function_token(capture(i))
    held: list[Any] = []
    held.append(capture(held))
    function_token(held[0])
    del held
    gc.collect()
    assert (len(_remembered), len(_tokens)) == before


def test_threads_that_ask_at_the_same_time_get_one_token():
    functions = [[nested(i) for i in range(20)] for _ in range(8)]
    start = threading.Barrier(8)
    found: list[Any] = [None] * 8

    def ask(k):
        start.wait()
        found[k] = [function_token(f) for f in functions[k]]

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tokens == found[0] for tokens in found)
    assert len(set(found[0])) == 20
