"""`Schedule` equals Optax's schedules, and new ones do not compile again."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.schedules
import pytest

from vernal import Module, filter_jit, load, save
from vernal.optim import Optimizer, Schedule

COUNTS = jnp.arange(201)


def sgdr(peak):
    return [
        {"init_value": 0.01, "peak_value": peak, "warmup_steps": 5, "decay_steps": 60},
        {"init_value": 0.02, "peak_value": peak / 2, "warmup_steps": 5, "decay_steps": 90},
    ]


# For each factory: settings, other values of those that are leaves, and how many leaves there are.
SCHEDULES = {
    "constant_schedule": ({"value": 0.1}, {"value": 0.3}, 1),
    "cosine_decay_schedule": (
        {"init_value": 0.1, "decay_steps": 150, "alpha": 0.1, "exponent": 1.5},
        {"init_value": 1, "alpha": 0.2},
        3,
    ),
    "cosine_onecycle_schedule": (
        {"transition_steps": 150, "peak_value": 0.1, "pct_start": 0.4, "div_factor": 5.0},
        {"peak_value": 0.7, "div_factor": 10.0},
        2,
    ),
    "exponential_decay": (
        {"init_value": 0.1, "transition_steps": 20, "decay_rate": 0.5, "end_value": 1e-3},
        {"decay_rate": 0.7, "init_value": 0.2},
        3,
    ),
    "join_schedules": (
        {"schedules": [optax.constant_schedule(0.1), lambda n: 0.1 / (1 + n)], "boundaries": [9]},
        {},
        0,
    ),
    "linear_onecycle_schedule": (
        {"transition_steps": 150, "peak_value": 0.1, "pct_final": 0.7, "final_div_factor": 50.0},
        {"peak_value": 0.7, "final_div_factor": 30.0},
        2,
    ),
    "linear_schedule": (
        {"init_value": 0.1, "end_value": 0.01, "transition_steps": 90, "transition_begin": 7},
        {"init_value": 0.01, "end_value": 2},
        2,
    ),
    "piecewise_constant_schedule": (
        {"init_value": 0.1, "boundaries_and_scales": {30: 0.5, 90: 0.1}},
        {"init_value": 0.2, "boundaries_and_scales": {30: 0.6, 90: 0.2}},
        3,
    ),
    "piecewise_interpolate_schedule": (
        {
            "interpolate_type": "cosine",
            "init_value": 0.1,
            "boundaries_and_scales": {30: 0.5, 90: 0.1},
        },
        {"init_value": 0.2},
        3,
    ),
    "polynomial_schedule": (
        {"init_value": 0.1, "end_value": 0.01, "power": 2, "transition_steps": 90},
        {"power": 3},
        3,
    ),
    "sgdr_schedule": ({"cosine_kwargs": sgdr(0.4)}, {"cosine_kwargs": sgdr(0.8)}, 4),
    "warmup_constant_schedule": (
        {"init_value": 0.0, "peak_value": 0.1, "warmup_steps": 20},
        {"peak_value": 0.2},
        2,
    ),
    "warmup_cosine_decay_schedule": (
        {
            "init_value": 0.0,
            "peak_value": 0.1,
            "warmup_steps": 20,
            "decay_steps": 120,
            "end_value": 1e-3,
        },
        {"peak_value": 0.2, "end_value": 1e-2},
        3,
    ),
    "warmup_exponential_decay_schedule": (
        {
            "init_value": 0.0,
            "peak_value": 0.1,
            "warmup_steps": 20,
            "transition_steps": 30,
            "decay_rate": 0.9,
            "staircase": True,
        },
        {"peak_value": 0.2, "decay_rate": 0.8},
        3,
    ),
}


def names_of_factories():
    """What is public and says of itself that it is a schedule."""
    found = {name for module in (optax, optax.schedules) for name in dir(module)}
    return {
        name
        for name in found
        if name[0] != "_" and name.endswith(("_schedule", "_schedules", "exponential_decay"))
    } - {"scale_by_schedule"}


def values_of(fn):
    with jax.numpy_dtype_promotion("standard"):
        return np.asarray([fn(n) for n in COUNTS[:3]] + list(jax.vmap(fn)(COUNTS[3:])))


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-7 * np.max(np.abs(theirs)))


def test_no_public_factory_is_forgotten():
    assert names_of_factories() == set(SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_values_are_those_of_optax_and_new_numbers_run_the_same_program(name):
    factory = getattr(optax, name)
    settings, others, leaves = SCHEDULES[name]
    traces = 0

    @jax.jit
    def run(schedule):
        nonlocal traces
        traces += 1
        return jax.vmap(schedule)(COUNTS)

    schedule = Schedule(factory, **settings)
    assert len(jax.tree.leaves(schedule)) == leaves
    assert all(leaf.weak_type for leaf in jax.tree.leaves(schedule))
    close(values_of(schedule), values_of(factory(**settings)))
    close(run(schedule), values_of(factory(**settings)))
    run(Schedule(factory, **settings))
    changed = factory(**{**settings, **others})
    close(run(Schedule(factory, **{**settings, **others})), values_of(changed))
    close(run(schedule.replace(**others)), values_of(changed))
    assert traces == 1
    assert run(copy.deepcopy(schedule)).shape == (201,) and traces == 1


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"join_schedules"}))
def test_schedules_are_pickled_by_what_they_were_made_of(name):
    schedule = Schedule(getattr(optax, name), **SCHEDULES[name][0])
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule and hash(jax.tree.structure(again)) == hash(
        jax.tree.structure(schedule)
    )


def warmup(peak, init=0.0, steps=100):
    return Schedule(optax.warmup_cosine_decay_schedule, init, peak, 10, steps)


def test_a_step_with_another_schedule_is_not_compiled_again():
    @filter_jit
    def step(opt, model, state):
        return opt.update(model, {"w": jnp.ones(3)}, state)

    model = {"w": jnp.ones(3)}
    for peak in (0.1, 0.2, np.float32(0.3), 1, jnp.asarray(0.5)):
        raw = optax.sgd(optax.warmup_cosine_decay_schedule(0.05, peak, 10, 100))
        opt = Optimizer(optax.sgd, warmup(peak, 0.05))
        state, expected = opt.init(model), model
        reference = raw.init(model)
        new = model
        for _ in range(3):
            new, state = step(opt, new, state)
            with jax.numpy_dtype_promotion("standard"):
                updates, reference = raw.update({"w": jnp.ones(3)}, reference, expected)
                expected = optax.apply_updates(expected, updates)
        close(new["w"], expected["w"])
    step(Optimizer(optax.sgd, warmup(0.1, 0.05)).replace(peak_value=0.7), model, state)
    assert step.trace_count == 1
    step(Optimizer(optax.sgd, warmup(0.1, steps=101)), model, state)
    assert step.trace_count == 2


def test_a_population_of_schedules_is_one_with_stacked_numbers():
    peaks = [0.1, 0.2, 0.4]
    expected = np.stack([values_of(warmup(peak)) for peak in peaks])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(warmup, peaks))
    made = warmup(jnp.asarray(peaks), init=jnp.zeros(3))
    run = jax.vmap(lambda schedule: jax.vmap(schedule)(COUNTS))
    close(run(stacked), expected)
    close(run(made), expected)
    close(
        jax.vmap(lambda p: jax.vmap(warmup(1.0).replace(peak_value=p))(COUNTS))(jnp.asarray(peaks)),
        expected,
    )


def test_the_numbers_can_be_differentiated():
    schedule = Schedule(optax.linear_schedule, 0.0, 1.0, 10)
    gradient = jax.grad(lambda s: s(4))(schedule)
    np.testing.assert_allclose(gradient.settings["init_value"], 0.6, rtol=1e-6)
    np.testing.assert_allclose(gradient.settings["end_value"], 0.4, rtol=1e-6)


def test_schedules_inside_schedules_are_reached():
    joined = Schedule(
        optax.join_schedules, [warmup(0.1), Schedule(optax.constant_schedule, 0.02)], [50]
    )
    raw = optax.join_schedules(
        [optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100), optax.constant_schedule(0.02)], [50]
    )
    close(values_of(joined), values_of(raw))
    np.testing.assert_allclose(joined.replace(value=0.03)(70), 0.03, rtol=1e-6)
    np.testing.assert_allclose(
        jax.jit(lambda s, peak: s.replace(peak_value=peak)(10))(joined, 0.5), 0.5, rtol=1e-6
    )
    run = jax.jit(lambda schedule: schedule(3))
    run(joined), run(joined.replace(peak_value=0.7, value=0.0))
    assert run._cache_size() == 1
    with pytest.raises(TypeError, match="`join_schedules` does not take these settings"):
        joined.replace(rate=1.0)


def test_what_a_factory_decides_is_structure():
    run = jax.jit(lambda schedule: schedule(60))
    assert float(run(warmup(0.1))) > 0
    # Optax asks whether the peak is zero, for it divides by it.
    zero = warmup(0.0)
    assert float(run(zero)) == 0.0 and run._cache_size() == 2
    assert jax.tree.structure(zero) != jax.tree.structure(warmup(0.1))
    assert jax.tree.structure(zero.replace(peak_value=0.1)) == jax.tree.structure(warmup(0.1))


def test_a_number_that_becomes_an_integer_is_structure():
    schedule = Schedule(optax.cosine_onecycle_schedule, 100, 0.1, pct_start=0.3)
    assert dict(schedule.structure) == {"transition_steps": 100, "pct_start": 0.3}
    assert dict(schedule.replace(pct_start=0.5).structure)["pct_start"] == 0.5


def test_factories_of_ones_own_may_compute_with_their_numbers():
    def factory(peak: float, rates, shift=0.5, steps=10):
        low = min(peak, 2.0) if f"{peak}" else 0.0
        base = -((-peak) ** 2) % 100.0 // 0.4 + 0 * abs(low)
        offset = np.float32(2.0) * shift - 1 / (1 + shift)
        return lambda count: base + offset + rates["a"][0] * count / steps

    settings = {"peak": 1.5, "rates": {"a": [0.25, 3]}, "shift": 0.75}
    schedule = Schedule(factory, **settings)
    assert len(jax.tree.leaves(schedule)) == 3
    np.testing.assert_allclose(schedule(4), factory(**settings)(4), rtol=1e-5)
    other = {**settings, "shift": 2, "peak": 1.2}
    run = jax.jit(lambda schedule: schedule(4))
    run(schedule)
    np.testing.assert_allclose(run(Schedule(factory, **other)), factory(**other)(4), rtol=1e-5)
    assert run._cache_size() == 1


def test_a_number_that_is_converted_keeps_its_value_and_is_structure():
    def factory(log: float, array: float, rounded: float, added: float, key: float, scale: float):
        parts = [jnp.log(log), np.cos(array), round(rounded), jnp.ones(()) * added, {key: 1.0}[2.0]]
        return lambda count: scale * sum(map(float, parts)) + count

    settings = {"log": 3.0, "array": 0.5, "rounded": 2.7, "added": 0.1, "key": 2.0, "scale": 2.0}
    schedule = Schedule(factory, **settings)
    assert sorted(schedule.settings) == ["scale"]
    np.testing.assert_allclose(schedule(1), factory(**settings)(1), rtol=1e-6)
    np.testing.assert_allclose(
        schedule.replace(log=4.0)(1), factory(**{**settings, "log": 4.0})(1), rtol=1e-6
    )


def test_a_number_that_the_factory_asks_for_its_type_is_structure():
    def factory(rate: float, scale: float):
        if type(rate) is not float:
            raise TypeError("a float, please")
        return lambda count: rate * scale * count

    schedule = Schedule(factory, 0.5, 2.0)
    assert sorted(schedule.settings) == ["scale"] and float(schedule(3)) == 3.0


def test_what_the_factory_refuses_is_refused():
    def factory(rate: float):
        if rate < 0:
            raise ValueError("a negative rate")
        return lambda count: rate * count

    with pytest.raises(ValueError, match="a negative rate"):
        Schedule(factory, -1.0)


def test_traced_numbers_are_taken_where_the_factory_does_not_look_at_them():
    made_inside = jax.jit(lambda rate: Schedule(optax.cosine_decay_schedule, rate, 100)(3))
    close(made_inside(0.1), optax.cosine_decay_schedule(0.1, 100)(3))
    for fn in (lambda rate: warmup(rate)(3), lambda rate: logarithmic(rate)(3)):
        with pytest.raises(
            TypeError, match=r"looks at its numbers while it builds(.|\n)*`schedule.replace\(peak"
        ):
            jax.jit(fn)(0.1)
    with pytest.raises(TypeError, match="looks at its numbers"):
        jax.jit(lambda s, rate: s.replace(peak_value=rate, decay_steps=90)(3))(warmup(0.1), 0.2)


def logarithmic(peak):
    def factory(peak: float):
        level = jnp.log(peak)
        return lambda count: level * count

    return Schedule(factory, peak)


def test_a_population_of_different_kinds_is_refused():
    with pytest.raises(ValueError, match="decides differently for the numbers of one array"):
        warmup(jnp.asarray([0.0, 0.1]))


def test_a_factory_that_makes_no_schedule_is_refused():
    with pytest.raises(
        TypeError, match=r"returns a function of the count of steps(.|\n)*Optimizer\("
    ):
        Schedule(optax.adam, 1e-3)
    with pytest.raises(TypeError, match="does not take these settings"):
        Schedule(optax.constant_schedule, 1e-3, rate=1.0)


def test_a_factory_may_not_call_a_schedule_while_it_builds():
    def factory(schedule, scale: float):
        first = schedule(0)
        return lambda count: scale * (schedule(count) - first)

    with pytest.raises(TypeError, match="calls the schedule that it is given while it builds"):
        Schedule(factory, warmup(0.1), 2.0)

    def later(schedule, scale: float):
        return lambda count: scale * schedule(count)

    close(values_of(Schedule(later, warmup(0.1), 2.0)), 2 * values_of(warmup(0.1)))


def test_what_the_factory_was_given_may_change_afterwards():
    boundaries = [3]
    schedules = [Schedule(optax.constant_schedule, v) for v in (1.0, 2.0)]
    joined = Schedule(optax.join_schedules, schedules, boundaries)
    boundaries[0] = 10
    assert float(joined(5)) == 2.0
    assert jax.jit(lambda s: s(5))(Schedule(optax.join_schedules, schedules, boundaries)) == 1.0


def test_a_schedule_is_a_module_that_can_be_read_and_saved(tmp_path):
    schedule = warmup(0.1)
    assert isinstance(schedule, Module) and schedule == warmup(0.1) and schedule != warmup(0.2)
    assert repr(schedule).startswith("Schedule(") and "peak_value" in repr(schedule)
    assert "recipe" not in repr(schedule)
    save(tmp_path / "schedule.safetensors", schedule)
    assert load(tmp_path / "schedule.safetensors", warmup(0.7)) == schedule
