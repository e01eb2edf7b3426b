"""Every public factory of Optax is an `Optimizer`: see the table in `_factories.py`."""

import contextlib
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tests.optim._factories import ROWS, of_optax
from vernal import filter_jit
from vernal.optim import Optimizer

# Some public factories are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# Public, but they make no transformation, or do not say what they make.
NOT_FACTORIES = {
    "WrappedSchedule",
    "matrix_inverse_pth_root",
    "schedule_free_eval_params",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
}
# An `Optimizer` refuses what they make.
INJECTED = {"inject_hyperparams", "inject_stateful_hyperparams"}


def may_be_factory(x):
    if inspect.isclass(x):
        return hasattr(x, "init") and hasattr(x, "update") and not issubclass(x, tuple)
    if not (inspect.isfunction(x) or isinstance(x, functools.partial)):
        return False
    returned = inspect.signature(x).return_annotation
    return returned is inspect.Signature.empty or "GradientTransformation" in str(returned)


def test_every_public_factory_of_optax_has_a_row():
    public = {
        name: value
        for module in (optax, optax.contrib)
        for name, value in vars(module).items()
        if not name.startswith("_")
    }
    found = {name for name, value in public.items() if may_be_factory(value)}
    assert found == set(ROWS) | NOT_FACTORIES | INJECTED


def leaf_names(opt):
    """The paths of the leaves, without the word `settings` in them."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(opt)]
    return {re.sub(r"\.settings\['(\w+)'\]", r".\1", path).lstrip(".") for path in paths}


@pytest.mark.parametrize("name", ROWS)
def test_the_leaves_are_those_of_the_table(name):
    assert leaf_names(ROWS[name].make(Optimizer)) == ROWS[name].leaves


def changing(new, change):
    """`new` with other numbers where an `Optimizer` has leaves."""

    def changed(factory, *args, **settings):
        leaves = Optimizer(factory, *args, **settings).settings
        numbers = {n: v for n, v in settings.items() if n in leaves and isinstance(v, float)}
        return new(factory, *args, **{**settings, **{n: change(v) for n, v in numbers.items()}})

    return changed


KINDS = (float, int, np.float32, np.float64, np.int64, jnp.float32)


def other_instances(row):
    """Optimisers with larger numbers, each with another kind of them."""
    for kind in KINDS:
        yield row.make(changing(Optimizer, lambda value, kind=kind: kind(value + 1)))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.sample(3)
def test_new_instances_and_new_numbers_have_one_type(name):
    def type_of(opt):
        leaves, treedef = jax.tree.flatten(opt)
        return treedef, [jax.typeof(leaf) for leaf in leaves]

    first = type_of(ROWS[name].make(Optimizer))
    assert all(leaf.weak_type for leaf in first[1])
    for opt in other_instances(ROWS[name]):
        assert type_of(opt) == first


def start(name, dtype):
    model = {
        "b": jnp.asarray([0.5, -1.0, 1.5], dtype),
        "w": jnp.linspace(-1.0, 2.0, 12, dtype=dtype).reshape(4, 3),
    }
    return optax.LookaheadParams.init_synced(model) if name == "lookahead" else model


def loss(model, t, bowl):
    """A slope that turns with the time, and a bowl for optimisers that want to arrive."""
    total = 0.0
    for i, leaf in enumerate(jax.tree.leaves(model)):
        j = jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        slope = jnp.cos(t.astype(leaf.dtype) * (0.3 + 0.07 * j) + i)
        total += jnp.sum(leaf * slope) + 0.5 * bowl * jnp.sum(leaf**2)
    return total


def gradient(row, model, t):
    """The gradient, and the extra arguments of a step."""
    bowl = float(bool(row.needs & {"value", "value_fn", "obj_fn", "bowl"}))

    def value_fn(model):
        return loss(model, t, bowl)

    value, grads = jax.value_and_grad(value_fn)(getattr(model, "fast", model))
    known = {"value": value, "grad": grads, "value_fn": value_fn, "obj_fn": value_fn}
    if "batched" in row.needs:
        grads = jax.tree.map(lambda g: jnp.stack([g, 2 * g]), grads)
    return grads, {n: x for n, x in known.items() if n in row.needs}


def loop(row, model, state, update, steps=1000):
    def step(carry, t):
        model, state = carry
        grads, extra = gradient(row, model, t)
        return update(model, grads, state, **extra), None

    times = jnp.arange(steps, dtype=jnp.float32)
    carry = (model, state)
    if "grows" in row.needs:
        carry, times = step(carry, times[0])[0], times[1:]
    return jax.lax.scan(step, carry, times)[0]


def update_of(transformation):
    """A step of Optax alone."""

    def update(model, grads, state, **extra):
        updates, state = transformation.update(grads, state, model, **extra)
        return optax.apply_updates(model, updates), state

    return update


@contextlib.contextmanager
def optax_promotes():
    """What the suite forbids, and an `Optimizer` allows for as long as Optax runs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# The older fusions of the suite (`conftest.py`) round a product and its sum in one step in one program and in two in
# another, which a thousand steps turn into more than is allowed here.
ROUNDS_ALIKE = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}


def theirs(row, model, new=of_optax):
    transformation = row.make(new)
    run = jax.jit(
        lambda m: loop(row, m, transformation.init(m), update_of(transformation)),
        compiler_options=ROUNDS_ALIKE,
    )
    with optax_promotes():
        return run(model)


def assert_same(actual, expected, tolerance):
    """Equality relative to the largest number of each array."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if jnp.issubdtype(b.dtype, jnp.floating):
            assert np.all(np.isfinite(b))
            scale = np.max(np.abs(b), initial=0.0)
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)
        else:
            np.testing.assert_array_equal(a, b)


SLOW = pytest.mark.slow, pytest.mark.sample(4)
# One of each kind; the whole table takes minutes.
QUICK = ("adam", "lars", "adafactor", "polyak_sgd", "chain", "multi_transform", "MultiSteps")
THOROUGH = pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=SLOW) for n in ROWS]
)


@THOROUGH
@pytest.mark.sample(6)
def test_a_thousand_steps_equal_those_of_optax_and_are_traced_once(name):
    row, model = ROWS[name], start(name, jnp.float32)

    @filter_jit(compiler_options=ROUNDS_ALIKE)
    def ours(opt, model):
        return loop(row, model, opt.init(model), opt.update)

    after, state = ours(row.make(Optimizer), model)
    assert_same((after, state), theirs(row, model), 1e-6)
    first, last = jax.tree.leaves(model)[0], jax.tree.leaves(after)[0]
    assert (np.max(np.abs(last - first)) > 1e-3) == (name != "set_to_zero")
    for opt in other_instances(row):
        ours(opt, model)
    assert ours.trace_count == 1


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ROWS)
def test_a_thousand_steps_equal_those_of_optax_in_float64(name):
    with jax.enable_x64(True):
        row, model = ROWS[name], start(name, jnp.float64)
        ours = jax.jit(
            lambda opt, m: loop(row, m, opt.init(m), opt.update), compiler_options=ROUNDS_ALIKE
        )
        assert_same(ours(row.make(Optimizer), model), theirs(row, model), 1e-12)


@THOROUGH
@pytest.mark.sample(3)
def test_members_of_a_population_step_as_they_do_alone(name):
    row, model = ROWS[name], start(name, jnp.float32)
    members = row.make(Optimizer), row.make(changing(Optimizer, lambda value: 1.1 * value))

    def some_steps(opt, model):
        return loop(row, model, opt.init(model), opt.update, steps=5)

    population = jax.tree.map(lambda *x: jnp.stack(x), *members)
    models = jax.tree.map(lambda x: jnp.stack([x, x]), model)
    alone, together = jax.jit(some_steps), jax.jit(jax.vmap(some_steps))(population, models)
    for i, member in enumerate(members):
        assert_same(jax.tree.map(lambda x, i=i: x[i], together), alone(member, model), 1e-4)


# Whose state Optax itself turns to float32 at the first step: here it keeps its type.
DRIFTING = {"scale_by_distance_over_gradients"}


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.sample(12)
def test_types_of_updates_and_states_are_those_of_optax_in_bfloat16(name):
    row, model = ROWS[name], start(name, jnp.bfloat16)
    opt, transformation = row.make(Optimizer), row.make(of_optax)
    t = jnp.zeros((), jnp.float32)

    def updates(transformation, model, state):
        grads, extra = gradient(row, model, t)
        return transformation.update(grads, state, model, **extra)

    def step(opt, model, state):
        grads, extra = gradient(row, model, t)
        return opt.update(model, grads, state, **extra)

    with optax_promotes():
        their_state = jax.eval_shape(transformation.init, model)
        state = jax.eval_shape(opt.init, model)
        assert dtypes(state) == dtypes(their_state)
        their_updates, after_step = jax.eval_shape(
            functools.partial(updates, transformation), model, their_state
        )
        our_updates, _ = jax.eval_shape(
            lambda opt, model, state: updates(opt.build(), model, state), opt, model, state
        )
    assert dtypes(our_updates) == dtypes(their_updates)
    if name in DRIFTING:
        assert dtypes(after_step) != dtypes(their_state)
        after_step = their_state
    for _ in range(2):
        model, after = jax.eval_shape(step, opt, model, state)
        assert dtypes(after) == dtypes(after_step)
        assert dtypes(model) == [jnp.bfloat16] * len(dtypes(model))
        state = after
