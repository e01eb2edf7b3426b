"""Structure has a hash that cannot change: what can be changed in place is refused in a field, or
is a node that is read at every flatten."""

import array
import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from tests.soundness._answers import ONE, Holder, StaticHolder, X, Y


@dataclasses.dataclass
class Mutable:
    k: float = 1.0


@dataclasses.dataclass(frozen=True)
class FrozenAroundAList:
    items: Any = dataclasses.field(default_factory=list)


class Lists(vernal.Module):
    """Without arrays, and yet it can change."""

    held: Any


@dataclasses.dataclass(eq=False)
class MutableByIdentity:
    k: float = 1.0


@dataclasses.dataclass
class CallableMutable:
    k: float = 1.0

    def __call__(self, x):
        return x * self.k


@dataclasses.dataclass(frozen=True)
class Settings:
    k: float = 1.0


class EqualWithoutHash:
    def __eq__(self, other):
        return type(other) is EqualWithoutHash


class MyList(list):
    """JAX knows `list`, and no class that is derived from it."""


class MySet(set):
    pass


class MyDict(dict):
    """Likewise."""


# Everything here can change in place, and has no hash.
UNHASHABLE: dict[str, Callable[[], Any]] = {
    "set": lambda: {1, 2},
    "empty set": set,
    "subclass of set": lambda: MySet({1}),
    "bytearray": lambda: bytearray(b"ab"),
    "deque": lambda: collections.deque([1, 2]),
    "subclass of list": lambda: MyList([1, 2]),
    "subclass of dict": lambda: MyDict(a=1),
    "counter": lambda: collections.Counter("ab"),
    "chain map": lambda: collections.ChainMap({"a": 1}),
    "user list": lambda: collections.UserList([1]),
    "user dict": lambda: collections.UserDict(a=1),
    "dataclass": Mutable,
    "callable dataclass": CallableMutable,
    "dataclass without __eq__": MutableByIdentity,
    "module in a frozen dataclass": lambda: FrozenAroundAList(Lists([1])),
    "module in a frozenset": lambda: frozenset([Lists([1])]),
    "module in a slice": lambda: slice(Lists([1])),
    "frozen dataclass around a list": lambda: FrozenAroundAList([1]),
    "namespace": lambda: types.SimpleNamespace(k=1),
    "__eq__ without __hash__": EqualWithoutHash,
    "array of the standard library": lambda: array.array("d", [1.0]),
    "array of strings": lambda: np.array(["a", "b"]),
    "array of bytes": lambda: np.array([b"a"]),
    "array of objects": lambda: np.array([{}, None], dtype=object),
    "array of dates": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "dict view": lambda: {"a": 1}.keys(),
    "memory of a buffer": lambda: memoryview(bytearray(b"ab")),
}


@pytest.mark.parametrize("cls", [Holder, StaticHolder])
@pytest.mark.parametrize("make", UNHASHABLE.values(), ids=UNHASHABLE)
def test_what_can_change_in_place_is_refused_in_a_field(make, cls):
    with pytest.raises((TypeError, ValueError), match=rf"(?s)\.f\b.*{cls.__name__}"):
        cls(ONE, make())


# JAX deprecates iterators as leaves.
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize("cls", [Holder, StaticHolder])
@pytest.mark.parametrize("make", [lambda: iter([1]), lambda: (i for i in [1])])
def test_iterators_are_refused_in_a_field(make, cls):
    with pytest.raises(ValueError, match=rf"(?s)can change in place.*{cls.__name__}"):
        cls(ONE, make())


@pytest.mark.parametrize("inside", [
    lambda value: [value],
    lambda value: (1, value),
    lambda value: {"key": value},
    lambda value: [ONE, {"key": (value, jnp.tanh)}],
], ids=["list", "tuple", "dict", "mixed"])  # fmt: skip
@pytest.mark.parametrize("name", ["set", "deque", "dataclass", "subclass of list", "bytearray"])
def test_what_can_change_in_place_is_refused_inside_containers(name, inside):
    with pytest.raises((TypeError, ValueError), match=r"(?s)\.f\b.*Holder"):
        Holder(ONE, inside(UNHASHABLE[name]()))


@pytest.mark.parametrize("value", [[1], {"a": 1}, (1, [2]), [], {}, ({},)], ids=repr)
def test_lists_and_dicts_are_refused_in_static_fields(value):
    with pytest.raises((TypeError, ValueError), match=r"(?s)\.f\b.*StaticHolder"):
        StaticHolder(ONE, value)


def test_a_refusal_says_what_to_write_instead():
    with pytest.raises((TypeError, ValueError)) as caught:
        Holder(ONE, {1, 2})
    assert "frozenset" in str(caught.value), f"a set should become a frozenset: {caught.value}"
    with pytest.raises((TypeError, ValueError)) as caught:
        StaticHolder(ONE, [1, 2])
    assert "tuple" in str(caught.value), f"a list should become a tuple: {caught.value}"


@pytest.mark.parametrize("make", UNHASHABLE.values(), ids=UNHASHABLE)
def test_the_layout_of_equinox_fails_when_it_is_hashed(make):
    class Old(vernal.Module, layout="fields"):
        f: Any
        w: Any

    try:
        model = Old(make(), ONE)
    except (TypeError, ValueError):
        return  # refused even earlier
    with pytest.raises((TypeError, ValueError), match="unhashable|cannot hash|Non-hashable"):
        vernal.filter_jit(lambda m, x: x * m.w)(model, X)


@pytest.mark.parametrize(
    "value",
    [
        1, "text", None, (1, "a"), frozenset({1, "a"}), b"ab", range(3), Settings(), jnp.tanh, int,
        types.MappingProxyType, Ellipsis, functools.partial(max, 1), np.dtype("float32"),
        frozenset({(1, frozenset({2}))}), Settings(k=Settings()),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
@pytest.mark.parametrize("cls", [Holder, StaticHolder])
def test_what_cannot_change_is_accepted(value, cls):
    model = cls(ONE, value)
    assert jax.tree.structure(model) == jax.tree.structure(cls(ONE, value))
    assert hash(jax.tree.structure(model)) == hash(jax.tree.structure(cls(ONE, value)))
    assert jax.jit(lambda m, x: x * m.w)(model, X)[0] == 1.0


def _set_first(items: Any) -> None:
    items[0] = 5.0


def _append(items: Any) -> None:
    items.append(7.0)


def _append_array(items: Any) -> None:
    items.append(3 * ONE)


def _number_to_array(items: Any) -> None:
    items[0] = 4 * ONE


def _retype(items: Any) -> None:
    items[0] = 1


def _swap(items: Any) -> None:
    items[0], items[1] = items[1], items[0]


def _clear(items: Any) -> None:
    items.clear()


def _total(tree: Any) -> Any:
    # Types count: 1 and 1.0 are different structure.
    leaves = jax.tree.leaves(tree)
    number = sum((10.0**n * x for n, x in enumerate(leaves)), start=0.0)
    return number + 1000.0 * sum(type(x) is int for x in leaves)


WRAPS: dict[str, Callable[[Any], Any]] = {
    "filter_jit": vernal.filter_jit,
    "jax.jit": jax.jit,
    "tree.map": lambda f: lambda model, x: f(jax.tree.map(lambda leaf: leaf, model), x),
    "partition": lambda f: (
        lambda model, x: f(vernal.combine(*vernal.partition(model, vernal.is_array)), x)
    ),
}
LISTS: dict[str, Callable[[list], Any]] = {
    "list": lambda items: items,
    "in a list": lambda items: [items],
    "in a dict": lambda items: {"key": items},
    "in a tuple": lambda items: (jnp.tanh, items),
    "in a module": lambda items: Holder(ONE, items),
    "in a mixed list": lambda items: [ONE, items, {"more": items}],
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("hold", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize(
    "change", [_set_first, _append, _append_array, _number_to_array, _retype, _swap, _clear]
)
@pytest.mark.sample(3)
def test_a_list_that_is_changed_in_place_is_read_at_every_flatten(change, hold, wrap):
    items: list[Any] = [1.0, 2.0]
    model = Holder(ONE, hold(items))
    step = wrap(lambda model, x: x * _total(_plain(model.f)))
    for _ in range(3):
        assert float(step(model, X)[0]) == _total(_plain(model.f))
    change(items)
    for _ in range(2):
        got, right = float(step(model, X)[0]), _total(_plain(model.f))
        assert got == right, (
            f"the list was changed in place by {change.__name__}: {got}, not {right}"
        )


def _plain(value: Any) -> Any:
    """The numbers in containers and modules, in order."""
    if isinstance(value, Holder):
        return _plain(value.f)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return [_plain(item) for item in value.values()]
    return value if isinstance(value, (int, float, jax.Array)) else []


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_dict_that_is_changed_in_place_is_read_at_every_flatten(wrap):
    options: dict[str, Any] = {"k": 1.0}
    model = Holder(ONE, {"options": options})
    step = wrap(lambda model, x: x * sum(model.f["options"].values()))
    for change in (
        lambda: options.update(k=2.0),
        lambda: options.update(more=3.0),
        lambda: options.pop("k"),
        lambda: options.update(more=2 * ONE),
        lambda: options.update(more=True),
    ):
        for _ in range(2):
            assert float(step(model, X)[0]) == float(sum(options.values()))
        change()
        got, right = float(step(model, X)[0]), float(sum(options.values()))
        assert got == right, f"after a change in place to {options}: {got}, not {right}"


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_functions_in_a_list_that_is_changed_in_place(wrap):
    def make(k):
        return lambda x: x * k

    functions = [make(1.0), make(2.0)]
    model = Holder(ONE, functions)
    step = wrap(lambda model, x: model.f[1](model.f[0](x)))
    for k in (3.0, 4.0, 3.0):
        functions[1] = make(k)
        got = float(step(model, X)[0])
        assert got == k, f"the second function multiplies by {k}, and the result by {got}"


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize(
    ("make", "grow"),
    [
        (lambda: {1}, lambda later: later.add(2)),
        (lambda: bytearray(b"a"), lambda later: later.append(2)),
        (lambda: collections.deque([1]), lambda later: later.append(2)),
    ],
    ids=["set", "bytearray", "deque"],
)
def test_what_cannot_be_hashed_and_is_added_later_is_refused_or_read(make, grow, wrap):
    items: list[Any] = [1]
    model = Holder(ONE, items)
    step = wrap(lambda model, x: x * float(len(model.f[-1])))
    later = make()
    items.append(later)
    for length in (1, 2):
        try:
            got = float(step(model, X)[0])
        except (TypeError, ValueError):
            return
        assert got == length, (
            f"{later!r} in a list was changed in place, and its old length is used"
        )
        grow(later)


def _first(items, x):
    return x * items[0]


def _first_by_keyword(x, *, items):
    return x * items[0]


PARTIALS: dict[str, Callable[[list], Any]] = {
    "argument": lambda items: functools.partial(_first, items),
    "keyword": lambda items: functools.partial(_first_by_keyword, items=items),
    "partial of a partial": lambda items: functools.partial(functools.partial(_first, items)),
}


@pytest.mark.parametrize("make", PARTIALS.values(), ids=PARTIALS)
def test_partials_of_lists_are_refused_or_right(make, answers):
    """A list has no hash: such a partial is refused, or is itself only."""
    first, second = [1.0], [1.0]
    try:
        f, g = make(first), make(second)
        answers.check(f, X, id(first))
        answers.check(g, X, id(second))
        first[0] = 5.0
        answers.check(g, X, id(second))
        answers.check(f, Y, id(first))
        answers.check(g, Y, id(second))
        answers.check(make([1.0]), Y)
        answers.check(make([5.0]), X)
    except (TypeError, ValueError) as error:
        assert "partial" in str(error) or "hash" in str(error), f"refused without a reason: {error}"


@pytest.mark.parametrize("held", [Lists([1.0]), Lists((Lists({"a": 1}),))], ids=["list", "dict"])
def test_a_module_that_can_change_is_refused_as_structure(held):
    says = r"(?s)can change in place.*\.f of .*Holder"
    with pytest.raises(ValueError, match=says):
        StaticHolder(ONE, held)
    for cls in (Holder, StaticHolder):
        with pytest.raises(ValueError, match=says):
            cls(ONE, functools.partial(max, held))


def test_a_module_that_stays_what_it_is_may_be_static():
    for stays in (Lists((1.0, "a")), Lists(vernal.Static([1])), vernal.filter_jit(jnp.sin)):
        assert StaticHolder(ONE, stays).f is stays


class Config(dict):
    """A dict that promises not to change."""

    def __hash__(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(sorted(self.items())))


class Scale:
    def __init__(self, k):
        self.k = k

    def __eq__(self, other):
        return type(other) is Scale and self.k == other.k

    def __hash__(self):
        return hash(self.k)

    def __getitem__(self, name):
        return getattr(self, name)

    def __setitem__(self, name, value):
        setattr(self, name, value)


@pytest.mark.parametrize("make", [lambda k: Config(k=k), Scale], ids=["dict", "object"])
@pytest.mark.parametrize(
    "around",
    [Holder, StaticHolder, lambda one, held: Lists(Holder(one, held)), lambda one, held: held],
    ids=["field", "static field", "module in a module", "argument"],
)
def test_a_broken_promise_does_not_reach_a_new_object(make, around):
    """An object changes that promised by its hash not to; new ones that equal it now are answered for themselves."""

    def k_of(held):
        if isinstance(held, (dict, Scale)):
            return held["k"]
        return k_of(held.held if isinstance(held, Lists) else held.f)

    step = vernal.filter_jit(lambda held, x: x * k_of(held))
    changes = make(1.0)
    assert (step(around(ONE, changes), X) == X).all()
    changes["k"] = 5.0
    assert (step(around(ONE, make(5.0)), X) == 5 * X).all()
    assert (step(around(ONE, make(1.0)), X) == X).all()
