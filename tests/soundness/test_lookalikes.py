"""Values that compare equal, or carry the name of something else, and are not it."""

import collections
import enum
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from tests.soundness._answers import (
    FIELD_ROUTES,
    ONE,
    Answers,
    Holder,
    StaticHolder,
    X,
    Y,
    number_of,
)


class Loud(float):
    """A float with a number of its own, which `==` does not see."""

    factor = 1.0

    def __mul__(self, x):
        return x * (float(self) * self.factor)

    __rmul__ = __mul__


def loud(factor: float) -> Loud:
    number = Loud(2.0)
    number.factor = factor
    return number


class Shout(str):
    """A string that means something else."""

    def lower(self):
        return "louder"


class Many(int):
    """An int that means something else."""

    def __index__(self):
        return 4

    def __mul__(self, x):
        return x * 4

    __rmul__ = __mul__


class Level(enum.IntEnum):
    ONE = 1


class Grade(enum.IntEnum):
    ONE = 1


class Pair(collections.namedtuple("Pair", "a b")):
    """A tuple that means something else."""

    @property
    def number(self):
        return 10.0


class OtherPair(collections.namedtuple("OtherPair", "a b")):
    @property
    def number(self):
        return 20.0


# Each row: values that Python may call equal, and what tells them apart.
ALIKE: dict[str, tuple[tuple[Any, ...], Any]] = {
    "1, 1.0, True": ((1, 1.0, True), lambda value: float(len(type(value).__name__))),
    "0, -0.0, 0.0, False": (
        (0, -0.0, 0.0, False),
        lambda value: math.copysign(1.0, value) * len(type(value).__name__),
    ),
    "1 and 1+0j": ((1, 1 + 0j, 1.0), lambda value: float(len(type(value).__name__))),
    "0j and -0j": ((complex(0, 0), complex(0, -0.0)), lambda value: math.copysign(1.0, value.imag)),
    "a subclass of float": ((2.0, loud(1.0), 2), lambda value: float(len(type(value).__name__))),
    "a subclass of str": (("Loud", Shout("Loud")), lambda value: float(len(value.lower()))),
    "a subclass of int": ((1, Many(1)), lambda value: float(range(9)[value])),
    "members of two enums": ((Level.ONE, Grade.ONE, 1), lambda value: float(len(repr(value)))),
    "tuples": (((1, 2), (1.0, 2), (True, 2)), lambda value: float(len(type(value[0]).__name__))),
    "nested tuples": ((((0.0,),), ((-0.0,),)), lambda value: math.copysign(1.0, value[0][0])),
    "named tuples": (
        (Pair("a", "b"), OtherPair("a", "b")),
        lambda value: value.number,
    ),
    "frozensets": (
        (frozenset({1}), frozenset({1.0}), frozenset({True})),
        lambda value: float(len(type(next(iter(value))).__name__)),
    ),
    "str and bytes": (("a", b"a"), lambda value: float(len(repr(value)))),
    "ranges": (
        (range(0), range(3, 3), range(0, 3, 5), range(0, 1)),
        lambda value: value.step + 10.0 * value.stop,
    ),
    "slices": ((slice(1), slice(1.0)), lambda value: float(len(type(value.stop).__name__))),
    "frozensets of names": (
        (frozenset({"a"}), frozenset({"b"})),
        lambda value: float(ord(next(iter(value)))),
    ),
}

# From Python 3.12 on a slice has a hash; before, it is refused.
if slice.__hash__ is None:
    del ALIKE["slices"]


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize("cls", [Holder, StaticHolder])
@pytest.mark.parametrize("wrap", [vernal.filter_jit, jax.jit])
@pytest.mark.parametrize(("values", "read"), ALIKE.values(), ids=ALIKE)
@pytest.mark.sample(6)
def test_alike_values_in_fields_are_told_apart(values, read, wrap, cls, order):
    step = wrap(lambda model, x: x * read(model.f))
    for value in (values * 2)[::order]:
        got, right = float(step(cls(ONE, value), X)[0]), read(value)
        assert got == right, f"{value!r} in a field got the program of another: {got}, not {right}"


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize(("values", "read"), ALIKE.values(), ids=ALIKE)
@pytest.mark.sample(3)
def test_alike_values_as_arguments_are_told_apart(values, read, order):
    step = vernal.filter_jit(lambda value, x: x * read(value))
    for value in (values * 2)[::order]:
        # Numbers that are arguments are static here, as everything that is not an array.
        got, right = float(step(value, X)[0]), read(value)
        assert got == right, f"{value!r} got the program of another: {got}, not {right}"


@pytest.mark.parametrize("order", [1, -1], ids=["first", "last"])
@pytest.mark.parametrize(("values", "read"), ALIKE.values(), ids=ALIKE)
@pytest.mark.sample(12)
def test_alike_values_in_partials_and_closures_are_told_apart(values, read, order, answers):
    def apply(value, x):
        return x * read(value)

    for value in (values * 2)[::order]:
        answers.check(functools.partial(apply, value), X, (id(value), "partial"))
        answers.check(lambda x, value=value: x * read(value), X)


@pytest.mark.parametrize(("values", "read"), ALIKE.values(), ids=ALIKE)
def test_a_model_keeps_the_very_value_it_was_given(values, read):
    models = [Holder(ONE, value) for value in values] + [
        StaticHolder(ONE, value) for value in values
    ]
    copies = [jax.tree.map(lambda leaf: leaf, model) for model in models]
    for model, made in zip(models, copies, strict=True):
        assert read(made.f) == read(model.f), f"{model.f!r} became {made.f!r}"


def test_numbers_with_attributes_in_library_closures():
    step = vernal.filter_jit(lambda opt, x: opt.update(x, opt.init(x))[0])
    for factor in (1.0, 3.0, 1.0):
        with jax.numpy_dtype_promotion("standard"):
            got = float(step(optax.scale(loud(factor)), X)[0])
        assert got == 2.0 * factor, f"optax.scale over a number with factor {factor} gave {got}"


def test_nan_is_itself():
    nan = float("nan")
    model = Holder(ONE, nan)
    doubled = jax.tree.map(jnp.add, model, model)
    assert float(doubled.w) == 2.0
    assert math.isnan(jax.jit(lambda m: m)(model).f)
    step = vernal.filter_jit(lambda m, x: x * m.f)
    assert jnp.isnan(step(model, X)).all()
    assert step(Holder(ONE, 1.0), X)[0] == 1.0


def test_dtypes_are_one_value_however_they_are_written():
    traces = []

    @vernal.filter_jit
    def step(model, x):
        traces.append(model.f)
        return x.astype(model.f)

    for written in (jnp.float32, np.dtype("float32"), jnp.dtype(jnp.float32), jnp.float32):
        assert step(Holder(ONE, written), X).dtype == np.float32
    assert len(traces) == 1, f"one dtype was traced {len(traces)} times, as {traces}"
    assert step(Holder(ONE, jnp.float16), X).dtype == np.float16
    assert jax.tree.structure(Holder(ONE, jnp.float32)) == jax.tree.structure(
        Holder(ONE, np.dtype("float32"))
    )


@pytest.mark.parametrize("first", [np.dtype("float32"), np.float32, jnp.float32])
@pytest.mark.parametrize("written", [np.float32, jnp.float32])
def test_a_dtype_that_is_a_function_stays_one(first, written):
    models = [Holder(ONE, first), Holder(ONE, written)]
    made = [jax.tree.map(lambda leaf: leaf, model) for model in models][1]
    assert callable(made.f), (
        f"the field was given {written!r}, which can be called, and holds {made.f!r}"
    )
    assert made.f(1.5) == 1.5


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
@pytest.mark.parametrize("first", [np.float64, jnp.float64])
def test_numpy_s_scalar_types_are_not_those_of_jax(first):
    """They are equal, and compute differently: in 64 and in 32 bits here."""
    second = jnp.float64 if first is np.float64 else np.float64

    def scaled(cast, x):
        lost_in_32_bits = (cast(1) + cast(1e-12) - cast(1)) * cast(1e12)
        return x * jnp.asarray(lost_in_32_bits, x.dtype)

    for made in (lambda cast: cast, lambda cast: functools.partial(cast), Holder):
        step = vernal.filter_jit(lambda held, x: scaled(getattr(held, "f", held), x))
        for cast in (first, second):
            held = made(ONE, cast) if made is Holder else made(cast)
            assert (step(held, X) == 0).all() == (cast is jnp.float64), (made, cast)
    for cast in (first, second):
        out = vernal.loops.fori_loop(
            0, 1, lambda i, c: (scaled(c[1], c[0]), c[1]), (X, cast), kind="lax"
        )[0]
        assert (out == 0).all() == (cast is jnp.float64)


def test_classes_with_one_name_are_two():
    def make(number):
        class Kind(enum.Enum):
            ONE = number

        return Kind

    step = vernal.filter_jit(lambda kind, x: x * kind.value)
    for number in (1.0, 2.0):
        assert step(make(number).ONE, X)[0] == number
    read = jax.jit(lambda model, x: x * model.f.ONE.value)
    for number in (1.0, 2.0):
        assert read(Holder(ONE, make(number)), X)[0] == number


def _posing_as(library: Any, k: float) -> Any:
    """A user's function that carries everything of a library's function that can be written."""

    def f(x):
        return x * k

    functools.update_wrapper(f, library)
    f.__module__, f.__qualname__, f.__name__ = (
        library.__module__,
        library.__qualname__,
        library.__name__,
    )
    return f


@pytest.mark.parametrize(
    "library",
    [jax.nn.relu, jnp.tanh, optax.sgd, functools.reduce, np.sum, math.sin],
    ids=lambda f: f.__name__,
)
@pytest.mark.sample(3)
def test_a_function_that_poses_as_a_library_function_is_the_users(library, answers):
    for k in (1.0, 2.0, 1.0):
        answers.check(_posing_as(library, k), X)
    held = types.SimpleNamespace(k=1.0)

    @functools.wraps(library)
    def f(x):
        return x * held.k

    answers.check(f, X)
    held.k = 4.0
    answers.check(functools.wraps(library)(lambda x: x * held.k), X)
    answers.check(f, Y)


@pytest.mark.parametrize("name", ["optax", "jax.nn", "numpy", "vernal", "functools"])
@pytest.mark.sample(3)
def test_code_that_is_executed_under_the_name_of_a_library_is_the_users(name, answers):
    source = "def make(held):\n    return lambda x: x * held[0]\n"
    filename = getattr(optax, "__file__", "optax.py")
    space: dict[str, Any] = {"__name__": name}
    exec(compile(source, filename, "exec"), space)
    held, other = [1.0], [1.0]
    f, g = space["make"](held), space["make"](other)
    answers.check(f, X)
    answers.check(g, X)
    held[0] = 3.0
    answers.check(g, X)
    answers.check(space["make"](held), X)
    answers.check(f, Y)
    answers.check(space["make"]([1.0]), Y)


@pytest.mark.parametrize("name", ["optax", "jax.nn", "math"])
@pytest.mark.sample(3)
def test_a_global_of_a_namespace_with_the_name_of_a_library(name, answers):
    spaces = [{"__name__": name, "K": k} for k in (1.0, 2.0)]
    for space in spaces:
        exec("f = lambda x: x * K\ndef make(): return lambda x: x * K", space)
    for space in spaces + spaces[::-1]:
        answers.check(space["f"], X)
        answers.check(space["make"](), X)
    spaces[0]["K"] = 7.0
    answers.check(spaces[0]["make"](), X)
    answers.check(spaces[1]["make"](), X)


@pytest.mark.parametrize("route", FIELD_ROUTES, ids=lambda route: route.__name__)
@pytest.mark.sample(3)
def test_equal_constants_of_other_types_by_every_route(route):
    answers = Answers(route)

    def apply(k, x):
        return x * number_of(k)

    def make(k):
        return lambda x: apply(k, x)

    for k in (1, 1.0, True, 0.0, -0.0):
        answers.check(make(k), X)
        answers.check(functools.partial(apply, k), X)
