"""What cannot change is shared: a fresh optimiser, a partial of library functions, a bound method
of an equal model compile once. Without these, never sharing would pass every other test here."""

import functools
import json
import math
import operator
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from tests.soundness._answers import ONE, Holder, StaticHolder, X
from vernal import Optimizer
from vernal.optim import Schedule


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


# Objects that their factories make of closures: fresh ones are the same value.
FRESH: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=1e-2),
    "sgd": lambda: optax.sgd(0.1),
    "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(1e-3),
    "lion": lambda: optax.lion(1e-4),
    "clip": lambda: optax.clip(1.0),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
    "chain of chains": lambda: optax.chain(
        optax.chain(optax.clip(1.0)), optax.chain(optax.sgd(0.1))
    ),
    "schedule": lambda: optax.adam(optax.linear_schedule(1e-3, 1e-4, 100)),
    "warm-up": lambda: optax.sgd(optax.warmup_constant_schedule(0.0, 1e-3, 10)),
    "dtype": lambda: optax.adam(1e-3, mu_dtype=jnp.float32),
}
SCHEDULES: dict[str, Callable[[], Any]] = {
    "constant": lambda: optax.constant_schedule(0.1),
    "linear": lambda: optax.linear_schedule(0.1, 0.2, 100),
    "polynomial": lambda: optax.polynomial_schedule(0.1, 0.2, 2, 100),
    "exponential": lambda: optax.exponential_decay(0.1, 100, 0.5, end_value=0.01),
}
# What these capture could change, so that fresh ones are other values: a list, a variable that is
# assigned, a variable that may still be, a function of the user's. And the optimisers of Vernal that
# say the same in values.
CHANGEABLE: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "cosine": (
        lambda: optax.adam(optax.cosine_decay_schedule(1e-3, 100)),
        lambda: Optimizer(optax.adam, Schedule(optax.cosine_decay_schedule, 1e-3, 100)),
    ),
    "exponential": (
        lambda: optax.sgd(optax.exponential_decay(0.1, 100, 0.5)),
        lambda: Optimizer(optax.sgd, Schedule(optax.exponential_decay, 0.1, 100, 0.5)),
    ),
    "warm-up": (
        lambda: optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
        lambda: Optimizer(
            optax.sgd, Schedule(optax.warmup_cosine_decay_schedule, 0.0, 1e-3, 10, 100)
        ),
    ),
    "masked by a function": (
        lambda: optax.masked(optax.sgd(0.1), is_matrix),
        lambda: Optimizer(optax.masked, Optimizer(optax.sgd, 0.1), is_matrix),
    ),
    "masked by a tree": (
        lambda: optax.masked(optax.sgd(0.1), {"w": True, "b": False}),
        lambda: Optimizer(optax.masked, Optimizer(optax.sgd, 0.1), {"w": True, "b": False}),
    ),
    "decay with a mask": (
        lambda: optax.add_decayed_weights(1e-2, mask=is_matrix),
        lambda: Optimizer(optax.add_decayed_weights, 1e-2, mask=is_matrix),
    ),
    "parts": (
        lambda: optax.multi_transform({"a": optax.sgd(0.1)}, {"w": "a", "b": "a"}),
        lambda: Optimizer(
            optax.multi_transform, {"a": Optimizer(optax.sgd, 0.1)}, {"w": "a", "b": "a"}
        ),
    ),
}
# Functions, and partials of functions, of settled packages.
FUNCTIONS: dict[str, Callable[[], Any]] = {
    "gelu": lambda: functools.partial(jax.nn.gelu, approximate=True),
    "leaky relu": lambda: functools.partial(jax.nn.leaky_relu, negative_slope=0.1),
    "softmax": lambda: functools.partial(jax.nn.softmax, axis=-1),
    "power": lambda: functools.partial(jnp.power, 2.0),
    "partial of a partial": lambda: functools.partial(
        functools.partial(jax.nn.gelu), approximate=False
    ),
    "jax.vmap": lambda: functools.partial(jax.vmap, in_axes=0),
    "initializer": lambda: jax.nn.initializers.normal(0.1),
    "initializer of a kind": lambda: jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal"),
    "with a dtype": lambda: functools.partial(jnp.asarray, dtype=jnp.float32),
    "with a numpy dtype": lambda: functools.partial(jnp.asarray, dtype=np.dtype("float32")),
    "with a function": lambda: functools.partial(jax.tree.map, jnp.tanh),
    "of math": lambda: functools.partial(math.pow, 2.0),
    "operator": lambda: functools.partial(operator.mul, 2.0),
    "of this module": lambda: functools.partial(module_level, k=2),
    "with a tuple": lambda: functools.partial(jnp.sum, axis=(0, 1)),
    "with a frozenset": lambda: functools.partial(module_level, k=frozenset({1, "a"})),
}


def module_level(x, k=1):
    return x


def traces_of(make: Callable[[], Any], wrap: Any, hold: Callable[[Any], Any]) -> int:
    """How often four fresh objects are traced."""
    traces = []

    def step(held, x):
        traces.append(1)
        return x

    compiled = wrap(step)
    for _ in range(4):
        compiled(hold(make()), X)
    return len(traces)


@pytest.mark.parametrize(
    "make", (FRESH | SCHEDULES | FUNCTIONS).values(), ids=FRESH | SCHEDULES | FUNCTIONS
)
def test_fresh_library_objects_as_arguments_are_traced_once(make):
    count = traces_of(make, vernal.filter_jit, lambda value: value)
    assert count == 1, f"four fresh ones were traced {count} times"


@pytest.mark.parametrize("cls", [Holder, StaticHolder])
@pytest.mark.parametrize("wrap", [vernal.filter_jit, jax.jit])
@pytest.mark.parametrize(
    "make", (FRESH | SCHEDULES | FUNCTIONS).values(), ids=FRESH | SCHEDULES | FUNCTIONS
)
@pytest.mark.sample(3)
def test_fresh_library_objects_in_fields_are_traced_once(make, wrap, cls):
    count = traces_of(make, wrap, lambda value: cls(ONE, value))
    assert count == 1, f"four models that hold fresh ones were traced {count} times"
    a, b = (jax.tree.structure(cls(ONE, make())) for _ in range(2))
    assert a == b and hash(a) == hash(b)


def test_a_step_with_fresh_optimisers_is_right():
    step = vernal.filter_jit(lambda opt, params, state: opt.update(params, state, params))
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    with jax.numpy_dtype_promotion("standard"):
        for rate in (0.1, 0.2, 0.1):
            for make in (
                lambda: optax.sgd(rate),  # noqa: B023 (called at once)
                lambda: optax.chain(optax.clip(0.5), optax.sgd(rate)),  # noqa: B023 (likewise)
            ):
                right = make().update(params, make().init(params), params)[0]
                got = step(make(), params, make().init(params))[0]
                assert vernal.tree_allclose(got, right), f"{got} for {right}"
    assert step.trace_count == 4, f"two kinds at two rates were traced {step.trace_count} times"


@pytest.mark.parametrize(("of_optax", "of_vernal"), CHANGEABLE.values(), ids=CHANGEABLE)
@pytest.mark.sample(3)
def test_what_could_change_is_traced_for_each_object_and_an_optimizer_once(of_optax, of_vernal):
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    with jax.numpy_dtype_promotion("standard"):
        right = of_optax().update(params, of_optax().init(params), params)[0]
        plain = vernal.filter_jit(lambda opt, params, state: opt.update(params, state, params)[0])
        for _ in range(3):
            assert vernal.tree_allclose(plain(of_optax(), params, of_optax().init(params)), right)
    assert plain.trace_count == 3
    step = vernal.filter_jit(lambda opt, params, state: opt.update(params, params, state)[0])
    for _ in range(4):
        new = step(of_vernal(), params, of_vernal().init(params))
        assert vernal.tree_allclose(new, vernal.apply_updates(params, right), rtol=1e-6)
    assert step.trace_count == 1


def test_methods_of_equal_modules_share():
    class Layer(vernal.Module):
        w: jax.Array
        act: Any

        def apply(self, x):
            return self.act(self.w * x)

    def make(n):
        return Layer(jnp.full((), float(n)), functools.partial(jax.nn.gelu, approximate=True))

    step = vernal.filter_jit(lambda f, x: f(x))
    for n in range(4):
        assert jnp.allclose(step(make(n).apply, X), make(n).apply(X))
    assert step.trace_count == 1, f"methods of equal models were traced {step.trace_count} times"
    given = [vernal.filter_jit(make(n).apply) for n in range(3)]
    for n, compiled in enumerate(given):
        assert jnp.allclose(compiled(X), make(n).apply(X))


def test_a_partial_over_a_module_is_only_itself():
    """The module may hold a list, as ordinary objects may."""

    class Layer(vernal.Module):
        factors: list

        def apply(self, x):
            return self.factors[0] * x

    step = vernal.filter_jit(lambda f, x: f(x))
    model = Layer([2.0])
    kept = functools.partial(model.apply)
    for _ in range(3):
        step(kept, X)
    assert step.trace_count == 1
    step(functools.partial(model.apply), X)
    assert step.trace_count == 2


def test_a_new_lambda_is_traced_again_and_nothing_else():
    step = vernal.filter_jit(lambda f, x: f(x))
    f = lambda x: x * 2  # noqa: E731 (it is compared)
    for _ in range(3):
        step(f, X)
    assert step.trace_count == 1, "the same lambda was traced more than once"
    step(lambda x: x * 2, X)
    assert step.trace_count == 2, "a new lambda is another function"
    step(f, X)
    assert step.trace_count == 2, "the first lambda still has its program"


def test_a_new_lambda_in_a_field_is_traced_again_and_nothing_else():
    traces = []

    @jax.jit
    def step(model, x):
        traces.append(1)
        return model(x)

    f = lambda x: x * 2  # noqa: E731 (it is compared)
    for n in range(3):
        step(Holder(jnp.full((), float(n), jnp.float32), f), X)
    assert len(traces) == 1
    model = Holder(ONE, lambda x: x * 2)
    for _ in range(3):
        step(model, X)
        model = jax.tree.map(lambda leaf: leaf + 1, model)
    assert len(traces) == 2
    step(Holder(ONE, f), X)
    assert len(traces) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: optax.adam(1e-3), lambda: optax.adam(2e-3)),
        (lambda: optax.adam(1e-3), lambda: optax.adam(1e-3, b1=0.8)),
        (lambda: optax.sgd(1), lambda: optax.sgd(1.0)),
        (lambda: optax.sgd(0.0), lambda: optax.sgd(-0.0)),
        (lambda: optax.sgd(0.1), lambda: optax.sgd(0.1, nesterov=True, momentum=0.9)),
        (lambda: optax.chain(optax.clip(1.0)), lambda: optax.chain(optax.clip(2.0))),
        (lambda: optax.masked(optax.sgd(0.1), is_matrix), lambda: optax.masked(optax.sgd(0.1), traces_of)),
        (lambda: optax.constant_schedule(1.0), lambda: optax.constant_schedule(2.0)),
        (FUNCTIONS["gelu"], lambda: functools.partial(jax.nn.gelu, approximate=False)),
        (FUNCTIONS["gelu"], lambda: functools.partial(jax.nn.gelu, approximate=1)),
        (lambda: functools.partial(jnp.sum, axis=0), lambda: functools.partial(jnp.sum, axis=False)),
        (lambda: functools.partial(jnp.sum, axis=0), lambda: functools.partial(jnp.sum, 0)),
    ],
)  # fmt: skip
def test_library_objects_that_differ_do_not_share(one, other):
    step = vernal.filter_jit(lambda held, x: x)
    step(one(), X)
    step(other(), X)
    assert step.trace_count == 2, "two objects that differ were traced once"
    assert jax.tree.structure(Holder(ONE, one())) != jax.tree.structure(Holder(ONE, other()))


def test_a_registered_package_is_settled(tmp_path, monkeypatch):
    source = """
        def scale(k):
            return lambda x: x * k

        def read(held):
            return lambda x: x * held[0]

        def count():
            n = 0
            def f(x):
                nonlocal n
                n += 1
                return x * n
            return f
    """
    for name in ("settled_package_of_a_test", "other_package_of_a_test"):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    import other_package_of_a_test as other  # pyright: ignore[reportMissingImports]
    import settled_package_of_a_test as mine  # pyright: ignore[reportMissingImports]

    vernal.settled("settled_package_of_a_test")
    assert traces_of(lambda: mine.scale(2.0), vernal.filter_jit, lambda f: f) == 1
    assert traces_of(lambda: other.scale(2.0), vernal.filter_jit, lambda f: f) == 4
    step = vernal.filter_jit(lambda f, x: f(x))
    for k in (1.0, 2.0, 1.0):
        assert step(mine.scale(k), X)[0] == k
    held = [1.0]
    assert step(mine.read(held), X)[0] == 1.0
    held[0] = 2.0
    assert step(mine.read(held), X)[0] == 2.0, "a list that is captured can change, settled or not"
    assert [float(step(mine.count(), X)[0]) for _ in range(2)] == [1.0, 1.0]


@pytest.mark.parametrize("package", ["__main__", "a.b", ""])
def test_what_is_no_package_cannot_be_settled(package):
    with pytest.raises(ValueError, match="settled takes the name of a whole package"):
        vernal.settled(package)


def test_functions_of_the_standard_library_over_a_users_are_the_users():
    step = vernal.filter_jit(lambda f, x: f(x))

    def make(k):
        return functools.reduce(lambda f, g: lambda x: g(f(x)), [lambda x: x * k, lambda x: x])

    for k in (1.0, 2.0, 1.0):
        assert step(make(k), X)[0] == k
        dumps = functools.partial(json.dumps, default=lambda o: o * k)  # noqa: B023 (called at once)
        assert float(vernal.filter_jit(lambda d, x: x * float(d({1: k})[6:-1]))(dumps, X)[0]) == k  # noqa: B023 (likewise)
