"""The table of Optax's factories holds everything that Optax exports, and says what Optax does with its numbers."""

import contextlib
import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

from tests.optim._factories import ROWS
from tests.optim.test_factories import INJECTED, NOT_FACTORIES, gradient, may_be_factory, start
from tests.optim.test_schedule import SCHEDULES, names_of_factories
from vernal.optim import Optimizer
from vernal.optim._optax_table import ADDED, BRANCHED, CLOSE, LEAF, TABLE, ZERO, row_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# Integers and arrays that count, seed or choose, in spite of annotations that allow real numbers.
NO_REAL_NUMBERS = set(
    """accumulation_size axis cooldown decay_offset every_k_schedule k key mask max_backtracking_steps
    max_linesearch_steps ns_steps patience print_win_rate_every_n_steps
    random_seed step_offset sync_period trust_ratio_mask update_interval weight_decay_mask
    """.split()
)
# Numbers far from one, whose difference from one loses nothing in float32.
FAR_FROM_ONE = {"slow_step_size", "alpha", "end_value", "peak_value"}


def exported():
    """The factories that Optax exports, by module and name."""
    for module in TABLE:
        for name, value in vars(sys.modules[module]).items():
            schedule = module == "optax" and name in names_of_factories()
            if name[0] != "_" and name not in NOT_FACTORIES | INJECTED:
                if schedule or may_be_factory(value):
                    yield module, name, value


def test_every_factory_that_optax_exports_has_a_line():
    found = {(module, name) for module, name, _ in exported()}
    assert found == {(module, name) for module, rows in TABLE.items() for name in rows}


def takes_real_numbers(parameter):
    kinds = str(parameter.annotation)
    scalar = "float" in kinds or "numpy.number" in kinds
    scalar &= not kinds.startswith("collections.abc.Callable")
    tree = (
        "typing.Any" in kinds
        or "Callable[..." in kinds
        or "Iterable" in kinds
        or "Sequence" in kinds
    )
    return isinstance(parameter.default, float) or (scalar and not tree)


def test_every_parameter_that_takes_real_numbers_is_decided():
    for _, name, factory in exported():
        parameters = inspect.signature(factory).parameters
        real = {p.name for p in parameters.values() if takes_real_numbers(p)} - NO_REAL_NUMBERS
        row = row_of(factory)
        assert real <= set(row) <= set(parameters), name
        assert set(row.values()) <= {LEAF, CLOSE, ADDED, BRANCHED, ZERO}, name


class Watched(float):
    """A float that notes what is asked of it, and of what is computed of it."""

    def __new__(cls, value, name, asked):
        self = super().__new__(cls, value)
        self.name, self.asked = name, asked
        return self


def watch(operator, word, derived=False):
    original = getattr(float, operator)

    def method(self, *others):
        result = original(self, *others)
        if result is not NotImplemented and (word != CLOSE or others[0] == 1):
            if word is not None:
                self.asked.add((self.name, ZERO if word == BRANCHED and others == (0.0,) else word))
        return (
            Watched(result, self.name, self.asked) if type(result) is float and derived else result
        )

    setattr(Watched, operator, method)


for operator in ("__lt__", "__le__", "__gt__", "__ge__", "__int__", "__round__", "__bool__"):
    watch(operator, "compared")
for operator in ("__eq__", "__ne__"):
    watch(operator, BRANCHED)
watch("__rsub__", CLOSE)
for operator in ("__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__neg__", "__pow__"):
    watch(operator, None, derived=True)
Watched.__hash__ = float.__hash__


def watched(values, asked):
    """Settings whose floats note what Optax asks of them."""

    def one(name, value):
        return jax.tree.map(lambda x: Watched(x, name, asked) if type(x) is float else x, value)

    return {name: one(name, value) for name, value in values.items()}


@contextlib.contextmanager
def promotion():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def asked_of_optimizer(name):
    """What Optax asks of the numbers of one factory, while it builds, starts and steps."""
    row, asked, factories = ROWS[name], set(), []

    def new(factory, *args, **settings):
        if row_of(factory) is row_of(target):
            factories.append(factory)
            settings = watched(settings, asked)
        return factory(*args, **settings)

    target = getattr(optax, name, None) or getattr(optax.contrib, name)
    model = start(name, jnp.float32)

    def step(model):
        transformation = row.make(new)
        state = transformation.init(model)
        grads, extra = gradient(row, model, jnp.zeros(()))
        return transformation.update(grads, state, model, **extra)[0]

    with promotion():
        jax.eval_shape(step, model)
    return target, asked


def asked_of_schedule(name):
    factory, asked = getattr(optax, name), set()
    for settings in (SCHEDULES[name][0], {**SCHEDULES[name][0], **SCHEDULES[name][1]}):
        with promotion():
            jax.eval_shape(factory(**watched(settings, asked)), 3)
    return factory, asked


@pytest.mark.parametrize("name", sorted(set(ROWS) | set(SCHEDULES)))
@pytest.mark.sample(6)
def test_what_optax_asks_of_a_number_is_what_the_table_says(name):
    factory, asked = (asked_of_schedule if name in SCHEDULES else asked_of_optimizer)(name)
    row = row_of(factory)
    for setting, reason in sorted(asked):
        if reason == CLOSE:
            right = row[setting] in (CLOSE, BRANCHED) or setting in FAR_FROM_ONE
        elif reason == ZERO:
            right = row[setting] in (ZERO, BRANCHED)
        else:
            right = row[setting] == BRANCHED
        assert right, (setting, reason)
    for setting, reason in row.items():
        if reason == CLOSE:
            assert (setting, CLOSE) in asked, setting
        if reason == ZERO:
            assert (setting, ZERO) in asked, setting


def test_what_is_added_loses_its_digits_as_a_leaf():
    added = {
        (name, s)
        for rows in TABLE.values()
        for name, row in rows.items()
        for s in row
        if row[s] == ADDED
    }
    assert added == {("fromage", "learning_rate")}
    model, grads = jnp.ones(2), jnp.ones(2)
    with promotion():
        raw = optax.fromage(1e-3)
        expected = raw.update(grads, raw.init(model), model)[0]
        for rate, digits in ((1e-3, 1e-6), (jnp.asarray(1e-3), 1e-3)):
            made = Optimizer(optax.fromage, rate).build()
            error = jnp.max(jnp.abs(made.update(grads, made.init(model), model)[0] / expected - 1))
            assert (error < 1e-6) == (digits == 1e-6)


def test_only_optax_itself_is_in_the_table():
    @functools.wraps(optax.adam)
    def adam(*args, **settings):
        return optax.adam(*args, **settings)

    assert row_of(adam) == {} and row_of(print) == {}
    assert row_of(functools.partial(optax.adam, eps=1e-6)) == row_of(optax.adam) != {}
