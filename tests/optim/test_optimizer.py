"""`Optimizer` equals Optax, step for step, and does not compile twice."""

import copy
import functools
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import vernal
from vernal import Module, Static, filter_jit, filter_value_and_grad, load, save, tree_equal
from vernal.nn import MLP
from vernal.optim import Optimizer
from vernal.optim._factory import factory_of


def loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def data(getkey):
    return jax.random.normal(getkey(), (16, 3)), jax.random.normal(getkey(), (16, 2))


SCHEDULE = optax.cosine_decay_schedule(1e-2, 20)
SAME = {
    "adam": (
        Optimizer(optax.adam, 1e-2, b1=0.8, b2=0.99999, eps=1e-6),
        optax.adam(1e-2, b1=0.8, b2=0.99999, eps=1e-6),
    ),
    "chain": (
        Optimizer(
            optax.chain,
            Optimizer(optax.clip_by_global_norm, 0.1),
            Optimizer(optax.adam, 1e-2),
            optax.scale(0.5),
        ),
        optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2), optax.scale(0.5)),
    ),
    "schedule": (Optimizer(optax.adam, SCHEDULE), optax.adam(SCHEDULE)),
    "lambda": (
        Optimizer(optax.sgd, lambda count: 0.1 / (1.0 + count)),
        optax.sgd(lambda count: 0.1 / (1.0 + count)),
    ),
}


@pytest.mark.parametrize("name", SAME)
@pytest.mark.sample(3)
def test_twenty_steps_equal_those_of_optax(name, getkey):
    ours, theirs = SAME[name]
    x, y = data(getkey)
    model = MLP(3, 2, 4, 1, key=getkey())
    other, other_state, state = model, theirs.init(model), ours.init(model)

    @filter_jit
    def step(opt, model, state):
        _, grads = filter_value_and_grad(loss)(model, x, y)
        return opt.update(model, grads, state)

    # Optax mixes dtypes, which the suite forbids; an Optimizer allows it for as long as Optax runs.
    @jax.numpy_dtype_promotion("standard")
    @jax.jit
    def reference(model, state):
        grads = jax.grad(loss)(model, x, y)
        updates, state = theirs.update(grads, state, model)
        return optax.apply_updates(model, updates), state

    for _ in range(20):
        model, state = step(ours, model, state)
        other, other_state = reference(other, other_state)
    assert step.trace_count == 1
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    assert jax.tree.structure(model) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def make_plain(lr):
    return Optimizer(optax.adamw, lr, weight_decay=0.1)


def make_chain(lr):
    clip = Optimizer(optax.clip_by_global_norm, 1)
    return Optimizer(optax.chain, clip, Optimizer(optax.sgd, learning_rate=lr, momentum=0.5))


def make_replaced(lr):
    return Optimizer(optax.chain, Optimizer(optax.adam, 0.3)).replace(learning_rate=lr)


@pytest.mark.parametrize("make", [make_plain, make_chain, make_replaced])
@pytest.mark.parametrize("jit", [filter_jit, jax.jit])
def test_new_instances_and_new_numbers_do_not_compile_again(make, jit):
    traces = 0

    @jit
    def step(opt, model, state):
        nonlocal traces
        traces += 1
        return opt.update(model, jax.tree.map(jnp.ones_like, model), state)

    model = {"w": jnp.ones(3)}
    state = make(0.1).init(model)
    for lr in (0.1, 1, 0, 0.0, np.float32(0.2), np.float64(0.2), np.int64(2), jnp.float32(0.3)):
        model, state = step(make(lr), model, state)
    assert traces == 1


def test_numbers_are_leaves_and_the_rest_is_structure():
    opt = Optimizer(optax.adamw, 1, 0.95, eps=1e-6, weight_decay=0.0, nesterov=True, mu_dtype=None)
    assert sorted(opt.settings) == ["eps", "learning_rate"]
    assert dict(opt.structure) == {
        "b1": 0.95,
        "weight_decay": 0.0,
        "nesterov": True,
        "mu_dtype": None,
    }
    assert all(leaf.weak_type for leaf in jax.tree.leaves(opt))
    assert not jax.tree.leaves(Optimizer(optax.sgd, SCHEDULE))
    assert not jax.tree.leaves(Optimizer(optax.ema, 0.9))


def test_a_setting_close_to_one_becomes_a_leaf_when_an_array_is_given():
    opt = Optimizer(optax.adam, 1e-3, b2=jnp.asarray(0.99))
    assert sorted(opt.settings) == ["b2", "learning_rate"]
    assert sorted(opt.replace(b2=0.9).settings) == ["b2", "learning_rate"]
    assert dict(Optimizer(optax.adam, 1e-3, b2=0.99).replace(b2=0.9).structure) == {"b2": 0.9}


def test_floats_and_arrays_are_leaves_whatever_the_factory_does_with_them():
    """The default, the name and what is computed play no role."""

    def factory(rate, strength=0.9, b2=0.999, decay=0.5, extra=None):
        return optax.sgd((rate + 1.0) * strength * (1 - b2) * decay)

    opt = Optimizer(
        factory, 0.1, strength=0.1, b2=0.99, decay=np.float32(0.7), extra=[0.5, {"a": 1}]
    )
    assert sorted(opt.settings) == ["b2", "decay", "extra", "rate", "strength"]
    assert leaf_count(opt) == 5 and opt.settings["extra"][1] == {"a": 1}
    opt = Optimizer(factory, 1, 2, b2=True, decay=np.int64(3), extra="text")
    assert opt.settings == {} and opt.structure[3] == ("decay", 3)
    arrays = Optimizer(factory, np.asarray([1.0, 2.0]), jnp.asarray(3), extra=jax.random.key(0))
    assert [x.dtype.name for x in jax.tree.leaves(arrays)] == ["key<fry>", "float32", "int32"]
    assert Optimizer(lambda **k: optax.sgd(**k), learning_rate=0.1).build() is not None


def test_the_caller_moves_a_setting_to_the_other_side():
    opt = Optimizer(optax.adam, Static(1e-3), b1=jnp.asarray(0.9))
    assert leaf_count(opt) == 1 and opt.settings["learning_rate"] == Static(1e-3)
    slower = opt.replace(learning_rate=1e-4)
    assert slower.settings["learning_rate"] == Static(1e-4)
    assert leaf_count(opt.replace(learning_rate=jnp.asarray(0.1))) == 2
    assert leaf_count(opt.replace(b1=Static(0.8))) == 0
    model = {"w": jnp.ones(3)}
    ours, _ = slower.update(model, model, slower.init(model))
    raw = optax.adam(1e-4)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = raw.update(model, raw.init(model), model)
    np.testing.assert_allclose(ours["w"], model["w"] + updates["w"], rtol=1e-6)


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.int64(2), jnp.asarray(2), 0.0])
def test_a_number_that_replaces_a_leaf_is_a_leaf_of_the_same_type(number):
    def of_ones_own(rate, weight_decay):
        return optax.adamw(rate, weight_decay=weight_decay)

    for opt in (
        Optimizer(optax.adamw, 0.1, weight_decay=0.1),
        Optimizer(of_ones_own, rate=0.1, weight_decay=0.1),
    ):
        first = next(iter(opt.settings))
        other = opt.replace(**{first: number, "weight_decay": number})
        assert jax.tree.structure(other) == jax.tree.structure(opt)
        assert jax.tree.map(jax.typeof, other) == jax.tree.map(jax.typeof, opt)


def test_a_factory_that_branches_on_a_leaf_is_refused_when_the_optimizer_is_made():
    def factory(rate: float, limit: float = 0.5):
        return optax.sgd(rate) if limit > 0.25 else optax.sign_sgd(rate)

    assert Optimizer(factory, 0.1).build() is not None
    with pytest.raises(
        TypeError, match=r"`factory` looks at the value of a setting that is a leaf: limit\n"
    ) as info:
        Optimizer(factory, 0.1, 0.5)
    assert "vernal.Static(0.5) for `limit`" in str(info.value)
    for call in (
        lambda: Optimizer(optax.chain, Optimizer(factory, 0.1, Static(0.5))).replace(
            limit=jnp.asarray(0.1)
        ),
        lambda: jax.jit(lambda limit: Optimizer(factory, 0.1, limit).init(0.0))(0.5),
        lambda: jax.vmap(lambda limit: Optimizer(factory, 0.1, limit).init(0.0))(jnp.ones(2)),
    ):
        with pytest.raises(TypeError, match=r"looks at the value of a setting(.|\n)*: limit\n"):
            call()
    signs = Optimizer(factory, 0.1, Static(0.5)).replace(limit=0.1)
    new, _ = signs.update(jnp.ones(2), jnp.asarray([5.0, -7.0]), signs.init(jnp.ones(2)))
    np.testing.assert_allclose(new, [0.9, 1.1], rtol=1e-6)


def test_a_transformation_that_branches_on_a_leaf_is_refused_at_its_first_use():
    def factory(scale: float, start: float):
        def init(params):
            return jax.tree.map(jnp.zeros_like, params) if start > 0.5 else ()

        def update(updates, state, params=None):
            return jax.tree.map(lambda u: -scale * u if scale < 1 else u, updates), state

        return optax.GradientTransformation(init, update)

    model = {"w": jnp.ones(2)}
    for init in (lambda o: o.init(model), jax.jit(lambda o: o.init(model))):
        with pytest.raises(TypeError, match=r"`factory` looks at(.|\n)*a leaf: start\n"):
            init(Optimizer(factory, 0.5, 0.7))
    outer = Optimizer(optax.chain, Optimizer(factory, 0.5, Static(0.7)), optax.scale(2.0))
    step = lambda o: o.update(model, model, o.init(model))  # noqa: E731 (compiled, and not)
    for call in (step, jax.jit(step), lambda o: jax.jit(lambda: step(o))()):
        with pytest.raises(TypeError, match=r"`chain` looks at(.|\n)*: args\[0\].scale\n"):
            call(outer)
    new, _ = step(outer.replace(scale=Static(0.5)))
    np.testing.assert_allclose(new["w"], np.zeros(2))


def test_a_transformation_that_looks_at_the_gradients_runs_outside_of_compiled_functions():
    def factory(rate: float):
        def update(updates, state, params=None):
            finite = bool(jnp.all(jnp.isfinite(updates)))
            return -rate * updates if finite else jnp.zeros_like(updates), state

        return optax.GradientTransformation(optax.identity().init, update)

    opt = Optimizer(factory, 0.5)
    state = opt.init(jnp.ones(2))
    np.testing.assert_allclose(opt.update(jnp.ones(2), jnp.ones(2), state)[0], [0.5, 0.5])
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(lambda g: opt.update(jnp.ones(2), g, state))(jnp.ones(2))


def test_what_optax_looks_at_while_it_builds_is_structure():
    opt = Optimizer(optax.contrib.reduce_on_plateau, factor=0.5, rtol=1e-3, min_scale=0.1)
    assert sorted(opt.settings) == ["min_scale"]
    assert dict(opt.structure) == {"factor": 0.5, "rtol": 1e-3}
    state = opt.init({"w": jnp.ones(2)})
    model, _ = opt.update({"w": jnp.ones(2)}, {"w": jnp.ones(2)}, state, value=jnp.ones(()))
    np.testing.assert_allclose(model["w"], 2 * np.ones(2))
    with pytest.raises(ValueError, match="factor"):
        Optimizer(optax.contrib.reduce_on_plateau, factor=-1.0)
    with pytest.raises(TypeError, match=r"`reduce_on_plateau` looks at(.|\n)*: factor\n"):
        Optimizer(optax.contrib.reduce_on_plateau, factor=jnp.asarray(0.5))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("inject", ["inject_hyperparams", "inject_stateful_hyperparams"])
def test_injected_hyperparameters_are_refused(inject):
    with pytest.raises(
        TypeError, match=r"reads its numbers from its state(.|\n)*Optimizer\(adam, ...\)"
    ):
        Optimizer(getattr(optax, inject)(optax.adam), 0.1)


@pytest.mark.parametrize(
    "mask",
    [
        {"w": True, "b": False},
        lambda params: {"w": True, "b": False},
        jax.tree.map(lambda x: x.ndim > 1, {"mlp": MLP(2, 2, 2, 1, key=jax.random.key(0))}),
    ],
    ids=["dict", "function", "module"],
)
def test_masks_are_structure(mask):
    opt = Optimizer(optax.adamw, 0.1, weight_decay=0.5, mask=mask)
    assert leaf_count(opt) == 2
    model = {"w": jnp.ones(2), "b": jnp.ones(2)}
    if isinstance(mask, dict) and "mlp" in mask:
        model = {"mlp": MLP(2, 2, 2, 1, key=jax.random.key(0))}
    zeros = jax.tree.map(jnp.zeros_like, model)
    step = filter_jit(lambda opt, model, state: opt.update(model, zeros, state))
    for rate in (0.1, 0.2):
        new, _ = step(opt.replace(learning_rate=rate), model, opt.init(model))
    assert step.trace_count == 1
    decayed = mask(model) if callable(mask) else mask
    for p, q, decays in zip(*map(jax.tree.leaves, (model, new, decayed)), strict=True):
        np.testing.assert_allclose(q, p * (0.9 if decays else 1.0), rtol=1e-6)


def test_a_factory_that_cannot_be_remembered_is_asked_each_time():
    class Factory:
        __slots__ = ()

        def __call__(self, rate: float):
            return optax.sgd(rate)

    assert sorted(Optimizer(Factory(), 0.1).settings) == ["rate"]


def test_what_was_not_differentiated_stays_as_it_is(getkey):
    model = {"a": jnp.ones(2), "b": {"c": jnp.ones(2), "d": jnp.arange(3)}}
    opt = Optimizer(optax.adamw, 0.1, weight_decay=0.5)
    state = opt.init(model)
    grads = {"a": jnp.ones(2), "b": None}
    new, state = jax.jit(opt.update)(model, grads, state)
    assert not np.allclose(new["a"], model["a"])
    assert tree_equal(new["b"], model["b"])
    grads = {"a": jnp.ones(2), "b": {"c": None, "d": None}}
    assert tree_equal(opt.update(new, grads, state)[0]["b"], model["b"])


def test_float0_gradients_of_integers_are_passed_over():
    model = {"w": jnp.ones(2), "n": jnp.arange(2)}
    grads = jax.grad(lambda m: jnp.sum(m["w"]), allow_int=True)(model)
    opt = Optimizer(optax.sgd, 1.0)
    new, _ = opt.update(model, grads, opt.init(model))
    assert tree_equal(new, {"w": jnp.zeros(2), "n": jnp.arange(2)})


def test_bfloat16_weights_and_states_keep_their_type():
    model = {"w": jnp.ones(3, jnp.bfloat16)}
    opt = Optimizer(optax.adam, 1e-1)
    state = opt.init(model)
    new, new_state = opt.update(model, model, state)
    assert new["w"].dtype == jnp.bfloat16
    assert [x.dtype for x in jax.tree.leaves(new_state)] == [
        x.dtype for x in jax.tree.leaves(state)
    ]

    @jax.jit
    def step(rate):
        strong = opt.replace(learning_rate=rate)
        assert not jax.typeof(strong.settings["learning_rate"]).weak_type
        return strong.update(model, model, strong.init(model))[1]

    again = step(jnp.float32(1))
    assert [x.dtype for x in jax.tree.leaves(again)] == [x.dtype for x in jax.tree.leaves(state)]


@pytest.mark.parametrize("jit", [filter_jit, jax.jit])
def test_weakly_typed_weights_are_not_compiled_for_again(jit):
    traces = 0

    @jit
    def step(opt, model, state):
        nonlocal traces
        traces += 1
        return opt.update(model, jax.tree.map(jnp.ones_like, model), state)

    weak = jnp.array(1.0)
    model = {"a": weak, "b": jnp.ones(2, jnp.bfloat16), "c": jnp.broadcast_to(weak, 3)}
    types = jax.tree.map(jax.typeof, model)
    assert types["a"].weak_type and types["c"].weak_type
    opt = Optimizer(optax.adam, 0.1)
    state = opt.init(model)
    for _ in range(3):
        model, state = step(opt, model, state)
        assert jax.tree.map(jax.typeof, model) == types
    assert traces == 1


def test_learning_rates_are_swept_by_vmap():
    rates = jnp.asarray([0.1, 0.2, 0.3])
    model = {"w": jnp.zeros(2)}

    def step(rate):
        opt = Optimizer(optax.sgd, rate)
        return opt.update(model, {"w": jnp.ones(2)}, opt.init(model))[0]["w"]

    np.testing.assert_allclose(jax.vmap(step)(rates), -np.outer(rates, np.ones(2)))
    opts = Optimizer(optax.sgd, rates)
    new = jax.vmap(lambda o: o.update(model, {"w": jnp.ones(2)}, o.init(model))[0]["w"])(opts)
    np.testing.assert_allclose(new, -np.outer(rates, np.ones(2)))


def test_the_hyperparameters_can_be_differentiated():
    model, grads = jnp.ones(3), jnp.full(3, 2.0)
    opt = Optimizer(optax.sgd, 0.1)
    grad = jax.grad(lambda o: jnp.sum(o.update(model, grads, o.init(model))[0]))(opt)
    np.testing.assert_allclose(grad.settings["learning_rate"], -6.0)


def test_replace_finds_settings_of_nested_optimisers():
    opt = make_chain(0.1)
    new = opt.replace(learning_rate=0.2, max_norm=3.0)
    assert jax.tree.structure(new) == jax.tree.structure(opt)
    np.testing.assert_allclose([float(x) for x in jax.tree.leaves(new)], [3.0, 0.2, 0.5], rtol=1e-6)
    nested = Optimizer(optax.masked, make_chain(0.1), True)
    assert float(jax.tree.leaves(nested.replace(learning_rate=0.4))[1]) == pytest.approx(0.4)
    np.testing.assert_allclose(
        new.replace(learning_rate=SCHEDULE).settings["args"][0].settings["max_norm"], 3.0
    )


def test_a_setting_that_none_or_several_have_is_refused():
    two = Optimizer(optax.chain, Optimizer(optax.sgd, 0.1), Optimizer(optax.adam, 0.1))
    several, none = (
        "'learning_rate' is a setting of 2 nested factories",
        "no setting is called 'lr'",
    )
    for opt, name, why in [(two, "learning_rate", several), (make_chain(0.1), "lr", none)]:
        with pytest.raises(
            TypeError, match=f"`chain` does not take these settings(.|\n)*got: {why}"
        ):
            opt.replace(**{name: 1.0})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Optimizer(optax.adam, 1e-3, lr=1.0),
        lambda: Optimizer(optax.adam),
        lambda: Optimizer(optax.adam, 1e-3, learning_rate=1.0),
        lambda: Optimizer(optax.adam, 1e-3).replace(momentum=0.1),
    ],
)
def test_a_wrong_setting_names_the_factory_and_its_parameters(make):
    with pytest.raises(
        TypeError, match=r"`adam` does not take these settings(.|\n)*learning_rate, b1=0.9"
    ):
        make()


def test_a_factory_without_signature_is_refused():
    with pytest.raises(TypeError, match="a factory needs a signature"):
        Optimizer(min, 1.0)


def test_an_optimiser_that_is_built_is_refused_with_what_to_write():
    with pytest.raises(
        TypeError, match=r"its factory is expected(.|\n)*Optimizer\(optax.adam, 1e-3\)"
    ):
        # Not `Optimizer` itself, whose annotation the tests check before.
        factory_of(optax.adam(1e-3))


@pytest.mark.parametrize("factory", [optax.adam, optax.sgd])
def test_a_string_is_no_learning_rate(factory):
    with pytest.raises(TypeError, match=r"(?s)the learning rate is a string.*float\('1e-3'\)"):
        Optimizer(factory, "1e-3")
    with pytest.raises(TypeError, match="the learning rate is a string"):
        Optimizer(factory, 0.1).replace(learning_rate="1e-3")


def test_gradients_of_another_structure_are_refused():
    opt = Optimizer(optax.sgd, 0.1)
    model = {"w": jnp.ones(2)}
    with pytest.raises(ValueError, match="the gradients do not have the structure of the model"):
        opt.update(model, (jnp.ones(2),), opt.init(model))


def test_an_extra_argument_that_nobody_takes_is_refused():
    def factory(scale: float):
        plain = optax.scale(scale)
        return optax.GradientTransformation(plain.init, lambda u, s, p=None: plain.update(u, s, p))

    opt = Optimizer(factory, -1.0)
    model = {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match="the transformation takes no extra argument `value`"):
        opt.update(model, model, opt.init(model), value=1.0)


def test_an_optimizer_is_a_module():
    opt = make_chain(0.1)
    assert isinstance(opt, Module) and opt == make_chain(0.1) and opt != make_chain(0.2)
    doubled = jax.tree.map(lambda x: 2 * x, opt)
    np.testing.assert_allclose(jax.tree.leaves(doubled)[1], 0.2)
    partial = Optimizer(functools.partial(optax.sgd, momentum=0.9), 0.1)
    assert sorted(partial.settings) == ["learning_rate"]


class Decay(Module):
    rate: jax.Array
    power: float

    def __call__(self, count):
        return self.rate / (1.0 + count) ** self.power


def test_a_callable_module_is_a_schedule_whose_arrays_are_leaves():
    traces = 0

    @jax.jit
    def step(opt, model, state):
        nonlocal traces
        traces += 1
        return opt.update(model, {"w": jnp.ones(2)}, state)

    for rate in (0.5, 0.25):
        opt = Optimizer(optax.sgd, Decay(jnp.asarray(rate), 1.0))
        model = {"w": jnp.zeros(2)}
        state = opt.init(model)
        for _ in range(2):
            model, state = step(opt, model, state)
        np.testing.assert_allclose(model["w"], np.full(2, -1.5 * rate), rtol=1e-6)
    assert traces == 1 and leaf_count(opt) == 1


def test_an_array_that_a_schedule_closes_over_is_a_leaf():
    """As a constant of the compiled program it would be the first one for all."""
    step = filter_jit(lambda opt, model, state: opt.update(model, model, state)[0])

    def decay(rate):
        return lambda count: rate / (1.0 + count)

    for rate in (0.5, 0.25):
        opt = Optimizer(optax.sgd, decay(jnp.asarray(rate)))
        assert leaf_count(opt) == 1
        np.testing.assert_allclose(step(opt, jnp.ones(2), opt.init(jnp.ones(2))), 1 - rate)
    # A new function of the user is another one, whatever array it captures.
    assert step.trace_count == 2 and leaf_count(Optimizer(optax.sgd, decay(0.5))) == 0


def leaf_count(opt):
    return len(jax.tree.leaves(opt))


def test_a_weight_decay_of_zero_leaves_the_term_out_as_optax_does():
    model, grads = {"w": jnp.asarray([jnp.inf, 1.0])}, {"w": jnp.ones(2)}
    none = Optimizer(optax.adamw, 0.1, weight_decay=0.0)
    new, _ = none.update(model, grads, none.init(model))
    assert not np.any(np.isnan(new["w"]))
    assert leaf_count(none) == 1 and leaf_count(none.replace(weight_decay=0.1)) == 2
    assert leaf_count(Optimizer(optax.adamw, 0.1, weight_decay=0)) == 1
    assert leaf_count(Optimizer(optax.adamw, 0.1, weight_decay=1)) == 2


def test_a_momentum_of_none_has_no_state():
    assert not jax.tree.leaves(Optimizer(optax.sgd, 0.1).init(jnp.ones(2)))
    assert len(jax.tree.leaves(Optimizer(optax.sgd, 0.1, momentum=0.0).init(jnp.ones(2)))) == 1


def test_what_a_factory_derives_by_adding_keeps_its_digits():
    opt = Optimizer(optax.fromage, 0.01)
    assert leaf_count(opt) == 0
    assert leaf_count(opt.replace(learning_rate=jnp.asarray(0.01))) == 1


def test_functions_among_the_extra_arguments_get_the_whole_model():
    class Model(Module):
        weight: jax.Array
        count: jax.Array
        name: str

        def loss(self):
            assert self.name == "bowl"
            return jnp.sum(self.weight**2) * self.count.astype(jnp.float32)

    model = Model(jnp.asarray([3.0, -1.0]), jnp.asarray(2), "bowl")
    opt = Optimizer(optax.lbfgs)
    state = opt.init(model)

    @filter_jit
    def step(model, state):
        value, grads = filter_value_and_grad(Model.loss)(model)
        return opt.update(model, grads, state, value=value, grad=grads, value_fn=Model.loss)

    for _ in range(3):
        model, state = step(model, state)
    np.testing.assert_allclose(model.weight, np.zeros(2), atol=1e-5)
    assert model.count.dtype == jnp.int32


def test_a_function_of_something_else_is_passed_on_as_it_is():
    def factory(scale: float):
        def update(updates, state, params=None, *, twice):
            return jax.tree.map(lambda u: scale * twice(u), updates), state

        return optax.GradientTransformationExtraArgs(lambda params: (), update)

    opt = Optimizer(factory, -1.0)
    new, _ = opt.update({"w": jnp.ones(2)}, {"w": jnp.ones(2)}, (), twice=lambda u: 2 * u)
    np.testing.assert_allclose(new["w"], -np.ones(2))
    with pytest.raises(TypeError, match="takes no extra argument `thrice`"):
        opt.update({"w": jnp.ones(2)}, {"w": jnp.ones(2)}, (), twice=abs, thrice=abs)


def test_lookahead_steps_its_pair_with_gradients_of_the_fast_parameters():
    model = {"w": jnp.ones(2), "frozen": jnp.ones(2)}
    pair = optax.LookaheadParams.init_synced(model)
    opt = Optimizer(optax.lookahead, Optimizer(optax.sgd, 0.5), sync_period=2, slow_step_size=0.5)
    state = opt.init(pair)
    for _ in range(2):
        pair, state = opt.update(pair, {"w": jnp.ones(2), "frozen": None}, state)
    np.testing.assert_allclose(pair.slow["w"], np.full(2, 0.5))
    np.testing.assert_allclose(pair.fast["w"], np.full(2, 0.5))
    assert tree_equal(pair.slow["frozen"], jnp.ones(2))


def test_a_state_that_gets_more_at_the_first_step_is_kept():
    opt = Optimizer(optax.monitor, {"norm": optax.tree.norm})
    model = {"w": jnp.ones(4)}
    _, state = opt.update(model, model, opt.init(model))
    assert float(state.measurements["norm"]) == 2.0


@pytest.mark.parametrize(
    "again",
    [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_are_equal_and_of_one_type(again):
    opt = make_chain(0.1)
    other = again(opt)
    assert other == opt and jax.tree.structure(other) == jax.tree.structure(opt)
    assert jax.tree.map(jax.typeof, other) == jax.tree.map(jax.typeof, opt)


def test_optimisers_and_states_are_saved_by_name(tmp_path):
    opt, model = make_chain(0.1), {"w": jnp.ones(3)}
    _, state = opt.update(model, model, opt.init(model))
    save(tmp_path / "run.safetensors", (opt, state))
    fresh = make_chain(0.7)
    loaded, loaded_state = load(tmp_path / "run.safetensors", (fresh, fresh.init(model)))
    assert loaded == opt and tree_equal(loaded_state, state)
    with pytest.raises(ValueError, match="learning_rate"):
        load(tmp_path / "run.safetensors", (Optimizer(optax.sgd, 0.1), state))


def test_an_optimiser_shows_its_settings():
    text = repr(Optimizer(optax.adam, 1e-3, b2=0.99))
    assert "adam" in text and "learning_rate" in text and "0.99" in text


def test_equal_optimisers_are_one_structure_however_their_settings_are_given():
    one, other = Optimizer(optax.adam, 0.1, 0.8), Optimizer(optax.adam, b1=0.8, learning_rate=0.1)
    assert one == other and jax.tree.structure(one) == jax.tree.structure(other)
    assert one != Optimizer(optax.adam, 0.1, 0.7) and one != Optimizer(optax.adamw, 0.1, 0.8)
    assert hash(one) == hash(one.replace()) and len({one, one}) == 1


def test_numbers_are_arrays_without_jit_too():
    with jax.disable_jit():
        assert isinstance(jax.tree.leaves(Optimizer(optax.sgd, 0.1))[0], jax.Array)
    made = jax.jit(lambda: Optimizer(optax.sgd, 0.1))()
    assert jax.tree.leaves(made)[0].weak_type


def test_extra_arguments_reach_optax():
    opt = Optimizer(optax.polyak_sgd, max_learning_rate=1.0)
    model = jnp.asarray([3.0])
    value, grad = jax.value_and_grad(lambda p: jnp.sum(p**2))(model)
    new, _ = opt.update(model, grad, opt.init(model), value=value)
    np.testing.assert_allclose(new, [3.0 - 9.0 / 36.0 * 6.0], rtol=1e-6)


def test_the_room_does_not_need_optax_to_be_imported():
    code = "import sys, vernal.optim; raise SystemExit('optax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_a_gradient_that_is_a_module_may_be_an_extra_argument():
    model = vernal.nn.Linear(2, 1, key=jax.random.key(0))
    x = jnp.ones((3, 2))

    def loss(model):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    opt = Optimizer(optax.lbfgs)
    state = opt.init(model)
    for _ in range(3):
        value, grads = jax.value_and_grad(loss)(model)
        model, state = opt.update(model, grads, state, value=value, grad=grads, value_fn=loss)
    assert loss(model) < 1e-3


def test_a_mask_may_capture_an_array():
    like = jnp.ones(2)
    params = {"w": jnp.ones(2), "b": jnp.ones((2, 2))}

    def mask(params):
        return jax.tree.map(lambda p: p.ndim == like.ndim, params)

    for opt in (
        Optimizer(optax.adamw, 0.1, weight_decay=1.0, mask=mask),
        Optimizer(optax.masked, Optimizer(optax.sgd, 0.1), mask),
    ):
        new, _ = opt.update(params, jax.tree.map(jnp.zeros_like, params), opt.init(params))
        assert bool(jnp.all(new["b"] == 1.0))


def test_a_new_schedule_of_the_users_is_another_one_whatever_it_captures():
    base, held, params = jnp.asarray(0.1), {"scale": 1.0}, jnp.zeros(2)
    step = filter_jit(lambda opt, params, state: opt.update(params, jnp.ones(2), state)[0])
    for scale in (1.0, 5.0, 1.0):
        held["scale"] = scale
        for make in (
            lambda: Optimizer(optax.sgd, lambda count: base * held["scale"]),
            lambda: vernal.optim.from_optax(optax.sgd(lambda count: base * held["scale"])),
        ):
            opt = make()
            assert jnp.allclose(step(opt, params, opt.init(params)), -0.1 * scale)


def test_a_gradient_for_a_python_number_is_refused():
    opt = Optimizer(optax.sgd, 0.1)
    model = {"w": jnp.ones(2), "scale": [1.0]}
    state = opt.init(model)
    with pytest.raises(TypeError, match=r"model\['scale'\]\[0\](.|\n)*jnp.asarray\(number\)"):
        opt.update(model, {"w": jnp.ones(2), "scale": [jnp.asarray(2.0)]}, state)
    new, _ = opt.update(model, {"w": jnp.ones(2), "scale": [None]}, state)
    assert new["scale"] == [1.0]


@pytest.mark.parametrize("made", [None, lambda count: 0.1], ids=["None", "a schedule"])
def test_a_factory_that_returns_no_transformation_is_refused(made):
    def factory(learning_rate):
        return made

    opt = Optimizer(factory, 0.1)
    says = r"must return a gradient transformation(.|\n)*factory, which returns(.|\n)*Schedule\("
    with pytest.raises(TypeError, match=says):
        opt.init({"w": jnp.ones(2)})
    with pytest.raises(TypeError, match=says):
        opt.update({"w": jnp.ones(2)}, {"w": jnp.ones(2)}, ())


@pytest.mark.parametrize("factory", [optax.adam, optax.sgd])
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 3), (3, 1), (3, 1, 3), ()])
def test_a_gradient_of_another_shape_is_refused_even_if_it_broadcasts(factory, shape):
    model = {"w": jnp.ones((3, 3))}
    opt = Optimizer(factory, 0.1)
    with pytest.raises(
        ValueError, match=r"not have the shape of its array(.|\n)*grads\['w'\](.|\n)*3, 3"
    ):
        opt.update(model, {"w": jnp.ones(shape)}, opt.init(model))


def test_a_misspelt_setting_is_named():
    with pytest.raises(TypeError, match="no setting is called 'learning_rat'"):
        Optimizer(optax.adam, learning_rat=1e-3)
