"""`Schedule` equals Optax's schedules, and new ones do not compile again."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.schedules
import pytest

from vernal import Module, Static, filter_jit, load, save
from vernal.optim import Optimizer, Schedule

COUNTS = jnp.arange(201)


def sgdr(peak):
    return [
        {"init_value": 0.01, "peak_value": peak, "warmup_steps": 5, "decay_steps": 60},
        {"init_value": 0.02, "peak_value": peak / 2, "warmup_steps": 5, "decay_steps": 90},
    ]


# For each factory: settings, other values of those that are leaves, and how many leaves there are.
# What Optax compares or converts is structure.
SCHEDULES = {
    "constant_schedule": ({"value": 0.1}, {"value": 0.3}, 1),
    "cosine_decay_schedule": (
        {"init_value": 0.1, "decay_steps": 150, "alpha": 0.1, "exponent": 1.5},
        {"init_value": 1, "alpha": 0.2},
        3,
    ),
    "cosine_onecycle_schedule": (
        {"transition_steps": 150, "peak_value": 0.1, "pct_start": 0.4, "div_factor": 5.0},
        {"peak_value": 0.7},
        1,
    ),
    "exponential_decay": (
        {"init_value": 0.1, "transition_steps": 20, "decay_rate": 0.5, "end_value": 1e-3},
        {"end_value": 1e-2, "init_value": 0.2},
        2,
    ),
    "join_schedules": (
        {"schedules": [optax.constant_schedule(0.1), lambda n: 0.1 / (1 + n)], "boundaries": [9]},
        {},
        0,
    ),
    "linear_onecycle_schedule": (
        {"transition_steps": 150, "peak_value": 0.1, "pct_final": 0.7, "final_div_factor": 50.0},
        {"peak_value": 0.7},
        1,
    ),
    "linear_schedule": (
        {"init_value": 0.1, "end_value": 0.01, "transition_steps": 90, "transition_begin": 7},
        {"init_value": 0.01, "end_value": 2},
        2,
    ),
    "piecewise_constant_schedule": (
        {"init_value": 0.1, "boundaries_and_scales": {30: 0.5, 90: 0.1}},
        {"init_value": 0.2},
        1,
    ),
    "piecewise_interpolate_schedule": (
        {
            "interpolate_type": "cosine",
            "init_value": 0.1,
            "boundaries_and_scales": {30: 0.5, 90: 0.1},
        },
        {"init_value": 0.2},
        1,
    ),
    "polynomial_schedule": (
        {"init_value": 0.1, "end_value": 0.01, "power": 2, "transition_steps": 90},
        {"power": 3},
        3,
    ),
    "sgdr_schedule": ({"cosine_kwargs": sgdr(0.4)}, {}, 0),
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
        {"init_value": 0.01, "end_value": 1e-2},
        2,
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
        {"peak_value": 0.2, "init_value": 0.01},
        2,
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
@pytest.mark.sample(6)
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


def ramp(peak, init=0.0, steps=100):
    return Schedule(optax.linear_schedule, init, peak, steps)


def test_a_step_with_another_schedule_is_not_compiled_again():
    @filter_jit
    def step(opt, model, state):
        return opt.update(model, {"w": jnp.ones(3)}, state)

    model = {"w": jnp.ones(3)}
    for peak in (0.1, 0.2, np.float32(0.3), 1, jnp.asarray(0.5)):
        raw = optax.sgd(optax.linear_schedule(0.05, peak, 100))
        opt = Optimizer(optax.sgd, ramp(peak, 0.05))
        state, expected = opt.init(model), model
        reference = raw.init(model)
        new = model
        for _ in range(3):
            new, state = step(opt, new, state)
            with jax.numpy_dtype_promotion("standard"):
                updates, reference = raw.update({"w": jnp.ones(3)}, reference, expected)
                expected = optax.apply_updates(expected, updates)
        close(new["w"], expected["w"])
    step(Optimizer(optax.sgd, ramp(0.1, 0.05)).replace(end_value=0.7), model, state)
    assert step.trace_count == 1
    step(Optimizer(optax.sgd, ramp(0.1, steps=101)), model, state)
    assert step.trace_count == 2


def test_a_population_of_schedules_is_one_with_stacked_numbers():
    peaks = [0.1, 0.2, 0.4]
    expected = np.stack([values_of(ramp(peak)) for peak in peaks])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(ramp, peaks))
    made = ramp(jnp.asarray(peaks), init=jnp.zeros(3))
    run = jax.vmap(lambda schedule: jax.vmap(schedule)(COUNTS))
    close(run(stacked), expected)
    close(run(made), expected)
    close(
        jax.vmap(lambda p: jax.vmap(ramp(1.0).replace(end_value=p))(COUNTS))(jnp.asarray(peaks)),
        expected,
    )


def test_the_numbers_can_be_differentiated():
    schedule = Schedule(optax.linear_schedule, 0.0, 1.0, 10)
    gradient = jax.grad(lambda s: s(4))(schedule)
    np.testing.assert_allclose(gradient.settings["init_value"], 0.6, rtol=1e-6)
    np.testing.assert_allclose(gradient.settings["end_value"], 0.4, rtol=1e-6)


def test_schedules_inside_schedules_are_reached():
    joined = Schedule(
        optax.join_schedules, [ramp(0.1), Schedule(optax.constant_schedule, 0.02)], [50]
    )
    raw = optax.join_schedules(
        [optax.linear_schedule(0.0, 0.1, 100), optax.constant_schedule(0.02)], [50]
    )
    close(values_of(joined), values_of(raw))
    np.testing.assert_allclose(joined.replace(value=0.03)(70), 0.03, rtol=1e-6)
    np.testing.assert_allclose(
        jax.jit(lambda s, peak: s.replace(end_value=peak)(10))(joined, 0.5), 0.05, rtol=1e-6
    )
    run = jax.jit(lambda schedule: schedule(3))
    run(joined), run(joined.replace(end_value=0.7, value=0.0))
    assert run._cache_size() == 1
    with pytest.raises(TypeError, match="`join_schedules` does not take these settings"):
        joined.replace(rate=1.0)


def test_the_peak_of_joined_schedules_is_a_leaf():
    """The advice in the docstring of `Schedule`."""

    def joined(peak):
        rise = Schedule(optax.linear_schedule, 0.0, peak, 10)
        fall = Schedule(optax.cosine_decay_schedule, peak, 90)
        return Schedule(optax.join_schedules, [rise, fall], boundaries=[10])

    run = jax.jit(lambda schedule: jax.vmap(schedule)(COUNTS))
    for peak in (0.1, 0.2):
        close(run(joined(peak)), values_of(warmup(peak)))
    assert run._cache_size() == 1


def test_what_a_factory_decides_is_decided_by_the_numbers_it_has_now():
    run = jax.jit(lambda schedule: schedule(60))
    # Optax asks whether the peak is zero, for it divides by it.
    for peak in (0.1, 0.0, 0.2):
        schedule = warmup(0.1).replace(peak_value=peak)
        close(values_of(schedule), values_of(optax.warmup_cosine_decay_schedule(0, peak, 10, 100)))
        close(run(schedule), schedule(60))
    assert run._cache_size() == 3 and not jax.tree.leaves(warmup(0.1))[1:]
    # One that was decided by its old number would stay at 5.
    steps = Schedule(optax.piecewise_constant_schedule, 1.0, {5: 0.5, 10: 5.0})
    other = steps.replace(boundaries_and_scales={5: 8.0, 10: 1.0})
    assert float(run(other)) == 8.0 and float(run(steps)) == 2.5


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (warmup(0.1), "peak_value"),
        (Schedule(optax.exponential_decay, 0.1, 10, 0.5), "decay_rate"),
        (Schedule(optax.cosine_onecycle_schedule, 100, 0.1, pct_start=0.4), "pct_start"),
        (ramp(0.1), "transition_steps"),
    ],
)
def test_a_traced_number_at_which_the_factory_looks_is_refused(schedule, name):
    def replaced(value):
        return schedule.replace(**{name: value})(3)

    with pytest.raises(
        TypeError, match=rf"looks at the value of a setting that is a leaf: {name}"
    ) as info:
        jax.jit(replaced)(0.3)
    assert f"vernal.Static(...) for `{name}`" in str(info.value)
    with pytest.raises(TypeError, match=rf"is a leaf: {name}(.|\n)*vernal.Static\(3\)"):
        replaced(jnp.asarray(3.0))


def test_a_factory_of_ones_own_is_asked_in_the_same_way():
    def factory(peak: float, rates, shift=0.9, steps=10):
        return lambda count: peak + shift + rates["a"][0] * count / steps

    settings = {"peak": 1.5, "rates": {"a": [0.25, 3]}, "shift": 0.75}
    schedule = Schedule(factory, **settings)
    # Neither the default nor what is done with it makes a difference.
    assert len(jax.tree.leaves(schedule)) == 3
    np.testing.assert_allclose(schedule(4), factory(**settings)(4), rtol=1e-5)
    run = jax.jit(lambda schedule: schedule(4))
    run(schedule), run(Schedule(factory, **{**settings, "shift": 2.0, "peak": 1.2}))
    assert run._cache_size() == 1

    def clipped(peak: float, rate: float):
        low = min(peak, 2.0)
        return lambda count: low * rate * count

    with pytest.raises(TypeError, match=r"`clipped` looks at(.|\n)*: peak(.|\n)*Static\(1.5\)"):
        Schedule(clipped, 1.5, 0.1)

    def lowest(rates):
        low = min(rates)
        return lambda count: low * count

    with pytest.raises(TypeError, match=r"a leaf: rates\[0\], rates\[1\]"):
        Schedule(lowest, [0.1, 0.2])
    schedule = Schedule(clipped, Static(1.5), 0.1)
    np.testing.assert_allclose(schedule(2), 0.3, rtol=1e-6)
    # It stays static, and the factory decides afresh.
    higher = schedule.replace(peak=3.0, rate=1.0)
    np.testing.assert_allclose(higher(2), 4.0, rtol=1e-6)
    assert len(jax.tree.leaves(higher)) == 1


def test_a_schedule_that_looks_at_a_leaf_is_refused_outside_of_a_compiled_function_too():
    def factory(rate: float, limit: float):
        def schedule(count):
            return rate * count if limit > 0.25 else rate

        return schedule

    schedule = Schedule(factory, 0.1, 0.5)
    for call in (schedule, jax.jit(schedule), jax.jit(lambda n: Schedule(factory, 0.1, 0.5)(n))):
        with pytest.raises(TypeError, match=r"`factory` looks at the value(.|\n)*: limit"):
            call(3)
    np.testing.assert_allclose(schedule.replace(limit=Static(0.5))(3), 0.3, rtol=1e-6)


def test_a_schedule_that_cannot_be_compiled_for_its_own_reasons_still_runs():
    schedule = Schedule(lambda rate: lambda count: rate if count < 10 else 0.0, 0.5)
    assert float(schedule(3)) == 0.5 and float(schedule(30)) == 0.0
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(schedule)(3)


def test_what_a_factory_converts_is_refused():
    def factory(peak: float):
        level = float(np.asarray(peak) * 2)
        return lambda count: level * count

    with pytest.raises(TypeError, match=r"a leaf: peak"):
        Schedule(factory, 0.5)
    assert float(Schedule(factory, Static(0.5))(3)) == 3.0

    def picky(rate: float):
        if type(rate) is not float:
            raise ValueError("a float, please")
        return lambda count: rate * count

    with pytest.raises(TypeError, match=r"`picky` looks at(.|\n)*: rate"):
        Schedule(picky, 0.5)

    def computes(rate: float):
        level = float(jnp.log(rate))
        return lambda count: level * count

    with pytest.raises(TypeError, match=r"`computes` converts an array to a Python number"):
        Schedule(computes, Static(0.5))


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


def test_a_factory_that_makes_no_schedule_is_refused():
    with pytest.raises(
        TypeError, match=r"must return a function of the step count(.|\n)*Optimizer\("
    ):
        Schedule(optax.adam, 1e-3)
    with pytest.raises(TypeError, match="does not take these settings"):
        Schedule(optax.constant_schedule, 1e-3, rate=1.0)


def test_a_factory_may_call_a_schedule_while_it_builds():
    def factory(schedule, scale: float):
        first = schedule(0)
        return lambda count: scale * (schedule(count) - first)

    raw = optax.linear_schedule(0.5, 0.1, 100)
    close(
        values_of(Schedule(factory, ramp(0.1, 0.5), 2.0)), 2 * (values_of(raw) - values_of(raw)[0])
    )


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
    save(tmp_path / "schedule.safetensors", schedule)
    assert load(tmp_path / "schedule.safetensors", warmup(0.1, init=0.7)) == schedule
