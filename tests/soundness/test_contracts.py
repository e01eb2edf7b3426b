"""What a model keeps: the identity of its functions, equal hashes of what is equal, properties that
run once, and leaves that agree with attributes."""

import copy
import functools
import gc
import pickle
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from tests.soundness._answers import ONE, Holder, StaticHolder, X


def module_level(x):
    return x * 2


class HasMethod:
    def times(self, x):
        return x


def _closure() -> Any:
    k = 2.0
    return lambda x: x * k


PASSED_ON = {
    "flatten": lambda m: jax.tree.unflatten(jax.tree.structure(m), jax.tree.leaves(m)),
    "tree.map": lambda m: jax.tree.map(lambda leaf: leaf + 0, m),
    "filter_jit": vernal.filter_jit(lambda m: m),
    "jax.jit": jax.jit(lambda m: m),
    "jax.jit twice": lambda m: jax.jit(lambda m: m)(jax.jit(lambda m: m)(m)),
    "jax.vmap": lambda m: jax.vmap(lambda m, x: m, in_axes=(None, 0), out_axes=None)(m, X),
    "lax.scan": lambda m: jax.lax.scan(lambda m, x: (m, x), m, X)[0],
    "grad": lambda m: jax.grad(lambda m: m.w * 1.0)(m),
    "copy": copy.copy,
    "tree_at": lambda m: vernal.tree_at(lambda m: m.w, m, 2 * ONE),
    "partition": lambda m: vernal.combine(*vernal.partition(m, vernal.is_array)),
    "pytree of models": lambda m: jax.tree.map(lambda leaf: leaf, {"a": [m]})["a"][0],
}


USERS = {
    "closure": _closure,
    "module level": lambda: module_level,
    "bound method": lambda: HasMethod().times,
    "partial": lambda: functools.partial(module_level),
    "partial of a closure": lambda: functools.partial(_closure()),
    "class": lambda: HasMethod,
    "lru_cache": lambda: functools.lru_cache(module_level),
}


@pytest.mark.parametrize("cls", [Holder, StaticHolder])
@pytest.mark.parametrize("pass_on", PASSED_ON.values(), ids=PASSED_ON)
@pytest.mark.parametrize("make", USERS.values(), ids=USERS)
@pytest.mark.sample(3)
def test_a_users_function_keeps_its_identity(make, pass_on, cls):
    others = [cls(ONE, make()) for _ in range(3)]
    f = make()
    model = cls(ONE, f)
    for _ in range(2):
        got = pass_on(model).f
        if isinstance(f, functools.partial):
            # Partials of the same parts are one value: that their function is the user's is what counts.
            assert got.func is f.func, "a partial came back around another function"
        else:
            assert got is f, f"{f} came back as {got}"
    assert others[0].f is not None


@pytest.mark.parametrize("cls", [Holder, StaticHolder])
def test_functions_in_containers_keep_their_identity(cls):
    f, g = _closure(), _closure()
    models = [cls(ONE, (f, g)), cls(ONE, (g, f)), cls(ONE, (f, f)), cls(ONE, (g, g))]
    for model in models:
        for pass_on in PASSED_ON.values():
            got = pass_on(model).f
            assert got[0] is model.f[0] and got[1] is model.f[1]


def test_pickling_is_by_reference():
    model = pickle.loads(pickle.dumps(Holder(ONE, module_level)))
    assert model.f is module_level
    assert jax.tree.structure(model) == jax.tree.structure(Holder(ONE, module_level))
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(Holder(ONE, _closure()))


def test_a_deep_copy_of_a_closure_is_the_closure():
    f = _closure()
    assert copy.deepcopy(Holder(ONE, f)).f is f


def test_a_model_that_is_dropped_frees_its_function():
    class Times:
        def __call__(self, x):
            return x

    model = Holder(ONE, Times())
    model = jax.tree.map(lambda leaf: leaf, model)
    seen = weakref.ref(model.f)
    del model
    gc.collect()
    assert seen() is None, "a function that only a dead model held is still alive"


EQUAL = {
    "plain": lambda: Holder(jnp.arange(3.0), "text"),
    "function": lambda: Holder(jnp.arange(3.0), module_level),
    "partial": lambda: Holder(ONE, functools.partial(module_level, k=1)),
    "method of a class": lambda: Holder(ONE, Holder.__call__),
    "list": lambda: Holder(ONE, [ONE, 1, {"a": jnp.tanh}]),
    "numpy": lambda: Holder(jnp.asarray(np.arange(3.0, dtype=np.float32)), (1, 2)),
    "nested": lambda: Holder(ONE, Holder(ONE, Holder(ONE, 1))),
    "static": lambda: StaticHolder(ONE, ("a", frozenset({1}))),
    "compiled": lambda: vernal.filter_jit(lambda m: m)(Holder(ONE, "text")),
    "compiled by jax": lambda: jax.jit(lambda m: m)(Holder(ONE, "text")),
    "mapped": lambda: jax.tree.map(lambda leaf: leaf + 1, Holder(ONE, "text")),
    "library function": lambda: Holder(ONE, functools.partial(jax.nn.gelu, approximate=True)),
    "layer": lambda: vernal.nn.Linear(2, 2, key=jax.random.key(0)),
    "dtype": lambda: Holder(ONE, np.dtype("float32")),
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_modules_have_equal_hashes(make):
    a, b = make(), make()
    assert a == b, "two models that are made alike must be equal"
    assert hash(a) == hash(b), "equal models must have equal hashes"
    assert {a: 1}[b] == 1
    c = jax.tree.map(lambda leaf: leaf, a)
    assert a == c and hash(a) == hash(c), "a copy is equal, and must have the same hash"


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_equal_structures_have_equal_hashes(make):
    a, b = jax.tree.structure(make()), jax.tree.structure(make())
    assert a == b and hash(a) == hash(b)


def test_alike_numbers_in_equal_modules():
    for a, b in ((1, 1.0), (1, True), (0.0, -0.0), ("a", "a")):
        one, two = Holder(ONE, a), Holder(ONE, b)
        if one == two:
            assert hash(one) == hash(two), (
                f"models that hold {a!r} and {b!r} are equal with different hashes"
            )
        if type(a) is not type(b) or str(a) != str(b):
            assert jax.tree.structure(one) != jax.tree.structure(two)


def test_a_hash_looks_at_no_value():
    @jax.jit
    def inside(w):
        return jnp.asarray(float(hash(Holder(w, "text")) == hash(Holder(w, "text"))))

    assert inside(ONE) == 1.0
    assert hash(Holder(jnp.zeros(3), 1)) == hash(Holder(jnp.ones(3), 1))


class Asking(vernal.Module):
    w: jax.Array
    f: Any

    @property
    def broken(self):
        EVALUATED.append("broken")
        raise AttributeError("this property has no answer")

    @property
    def whole(self):
        EVALUATED.append("whole")
        return self.w


EVALUATED: list[str] = []


@pytest.mark.parametrize("pass_on", [
    lambda m: m, PASSED_ON["filter_jit"], PASSED_ON["jax.jit"], PASSED_ON["tree.map"],
    lambda m: PASSED_ON["filter_jit"](PASSED_ON["filter_jit"](m)),
])  # fmt: skip
def test_a_property_is_evaluated_once(pass_on):
    PASSED_ON["filter_jit"](
        Asking(ONE, jnp.tanh)
    )  # an instance of the class has come out of a program
    model = pass_on(Asking(ONE, jnp.tanh))
    EVALUATED.clear()
    with pytest.raises(AttributeError, match="this property has no answer"):
        _ = model.broken
    assert EVALUATED == ["broken"], f"one look at a property evaluated {EVALUATED}"
    EVALUATED.clear()
    assert not hasattr(model, "broken")
    assert EVALUATED == ["broken"], f"one look at a property evaluated {EVALUATED}"
    EVALUATED.clear()
    assert model.whole is model.w
    assert EVALUATED == ["whole"]
    with pytest.raises(AttributeError, match="missing"):
        _ = model.missing


CHANGES = {
    "flattened": lambda m: jax.tree.leaves(m),
    "flattened twice": lambda m: (jax.tree.leaves(m), jax.tree.leaves(m)),
    "compiled": lambda m: vernal.filter_jit(lambda m: m.w * 2)(m),
    "compiled thrice": lambda m: [vernal.filter_jit(lambda m: m.w * 2)(m) for _ in range(3)],
    "mapped": lambda m: jax.tree.map(lambda leaf: leaf, m),
    "hashed": hash,
    "nothing": lambda m: None,
}


@pytest.mark.parametrize("before", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("made", ["fresh", "mapped", "compiled"])
@pytest.mark.parametrize("how", ["object.__setattr__", "__dict__"])
def test_attributes_and_leaves_agree_after_a_change_by_force(how, made, before):
    model: Any = Holder(ONE, jnp.tanh)
    if made == "mapped":
        model = jax.tree.map(lambda leaf: leaf, model)
    elif made == "compiled":
        model = vernal.filter_jit(lambda m: m)(model)
    before(model)
    new = jnp.full((), 5.0)
    try:
        if how == "__dict__":
            model.__dict__["w"] = new
        else:
            object.__setattr__(model, "w", new)
    except (AttributeError, TypeError):
        return  # refused: nothing has changed
    _agree(model)
    again = vernal.filter_jit(lambda m: m.w)(model)
    assert float(again) == float(model.w), f"the program saw {again}, the attribute is {model.w}"
    _agree(model)


def _agree(model: Any) -> None:
    leaves = jax.tree.leaves(model)
    assert float(model.w) == float(leaves[0]), f"m.w is {model.w}, and the leaf is {leaves[0]}"
    mapped = jax.tree.map(lambda leaf: leaf, model)
    assert float(mapped.w) == float(model.w), f"m.w is {model.w}, and a copy has {mapped.w}"


@pytest.mark.parametrize("before", CHANGES.values(), ids=CHANGES)
def test_structure_that_is_changed_by_force(before):
    """A function put into a field by force: the attribute and every copy agree, or it is an error."""
    model: Any = Holder(ONE, _closure())
    before(model)
    f = _closure()
    try:
        object.__setattr__(model, "f", f)
        copies = [pass_on(model) for pass_on in (PASSED_ON["tree.map"], PASSED_ON["filter_jit"])]
    except (AttributeError, TypeError, ValueError):
        return
    for made in copies:
        assert made.f is model.f, "the attribute is one function, and a copy has another"


def test_weak_types_survive_a_step():
    """Review A9: the second step must not compile again."""
    traces = []

    @vernal.filter_jit
    def step(model, grads):
        traces.append(model["w"].weak_type)
        return vernal.apply_updates(model, grads)

    model = {"w": jnp.asarray(1.0)}
    assert model["w"].weak_type
    for _ in range(3):
        model = step(model, {"w": jnp.asarray(0.5)})
    assert model["w"].weak_type, "apply_updates made a weakly typed parameter strong"
    assert len(traces) == 1, f"three equal steps were traced {len(traces)} times: {traces}"


def test_threads_get_their_own_functions():
    step = vernal.filter_jit(lambda m, x: m(x))
    wrong = []

    def work(seed):
        for n in range(6):
            k = float(seed * 100 + n)
            got = float(step(Holder(ONE, lambda x, k=k: x * k), X)[0])
            if got != k:
                wrong.append((k, got))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"(own number, answer): {wrong}"
