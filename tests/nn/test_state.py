"""`State`, `make_with_state`: Equinox's protocol, against Equinox; both protocols against each other."""

import copy
import inspect
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import nn


class Counter(nn.StatefulLayer):
    """Multiplies by the number of calls; its average is a second state, of two arrays."""

    calls: nn.Variable
    moments: nn.Variable

    def __init__(self, size=2):
        self.calls = nn.Variable(0)
        self.moments = nn.Variable({"sum": jnp.zeros(size), "last": (jnp.ones(size),)})

    def __call__(self, x, state=None, *, key=None):
        read = (lambda v: v.value) if state is None else state.get
        calls, moments = read(self.calls) + 1, read(self.moments)
        moments = {"sum": moments["sum"] + x, "last": (x,)}
        y = calls.astype(x.dtype) * x
        if state is None:
            return self.moments.update(moments, self.calls.update(calls, y))
        return y, state.set(self.calls, calls).set(self.moments, moments)


class Theirs(eqx.nn.StatefulLayer):
    calls: eqx.nn.StateIndex
    moments: eqx.nn.StateIndex

    def __init__(self, size=2):
        self.calls = eqx.nn.StateIndex(0)
        self.moments = eqx.nn.StateIndex({"sum": jnp.zeros(size), "last": (jnp.ones(size),)})

    def __call__(self, x, state, *, key=None):
        calls, moments = state.get(self.calls) + 1, state.get(self.moments)
        state = state.set(self.moments, {"sum": moments["sum"] + x, "last": (x,)})
        return calls.astype(x.dtype) * x, state.set(self.calls, calls)


def sequence(package, layer):
    return lambda: package.Sequential(
        [layer(), package.Lambda(jnp.sin), package.Sequential([layer()]), package.Dropout(0.5)]
    )


X = jnp.array([0.5, -2.0])


def test_markers_and_values_are_those_of_equinox(getkey):
    model, state = nn.make_with_state(sequence(nn, Counter))()
    theirs, their_state = eqx.nn.make_with_state(sequence(eqx.nn, Theirs))()
    assert model[0].calls.marker == theirs[0].calls.marker == "Sequential.layers[0].calls"
    assert model[2][0].moments.marker == theirs[2][0].moments.marker
    key = getkey()
    for _ in range(2):
        x, state = model(X, state, key=key)
        their_x, their_state = theirs(X, their_state, key=key)
        np.testing.assert_allclose(x, their_x, rtol=1e-6)
        leaves, their_leaves = jax.tree.leaves(state), jax.tree.leaves(their_state)
        for ours, other in zip(leaves, their_leaves, strict=True):
            np.testing.assert_allclose(ours, other, rtol=1e-6)


def test_both_protocols_say_the_same(getkey):
    make, key = sequence(nn, Counter), getkey()
    whole = make()
    model, state = nn.make_with_state(make)()
    for _ in range(2):
        y, whole = nn.apply(whole, X, method=lambda model, x: model(x, key=key))
        expected, state = model(X, state, key=key)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
    values = [whole[0].calls.value, whole[0].moments.value]
    assert vernal.tree_allclose(values, [state.get(model[0].calls), state.get(model[0].moments)])


def test_the_pair_passes_through_jit_pickle_copies_files_and_ensembles(tmp_path):
    model, state = nn.make_with_state(Counter)()
    jitted = jax.jit(lambda model, state, x: model(x, state))
    y, new = jitted(model, state, X)
    assert jnp.array_equal(y, X) and repr(state) != "State(~old~)"
    for again in (pickle.loads(pickle.dumps((model, new))), copy.deepcopy((model, new))):
        assert jnp.array_equal(jitted(*again, X)[0], 2 * X)
    vernal.save(tmp_path / "state.safetensors", new)
    loaded = vernal.load(tmp_path / "state.safetensors", nn.make_with_state(Counter)()[1])
    assert vernal.tree_equal(loaded, new) and jitted._cache_size() == 1
    models, states = vernal.filter_vmap(nn.make_with_state(Counter), axis_size=3)()
    ys, states = jax.vmap(jitted, in_axes=(0, 0, None))(models, states, X)
    assert ys.shape == (3, 2) and jnp.array_equal(states.get(model.calls), jnp.ones(3, int))


def test_parts_of_the_state_are_mapped_and_put_back():
    make = lambda: [Counter(), vernal.filter_vmap(Counter, axis_size=3)()]  # noqa: E731
    (one, many), state = nn.make_with_state(make)()
    y, state = one(X, state)
    sub = state.substate(many)
    ys, sub = jax.vmap(many, in_axes=(None, 0))(y, sub)
    new = state.update(sub)
    assert ys.shape == (3, 2) and jnp.array_equal(new.get(many.calls), jnp.ones(3, int))
    assert new.get(one.calls) == 1
    assert repr(state) == "State(~old~)" and "calls" in repr(new) and "calls" in repr(sub)


def test_an_old_state_cannot_be_used():
    model, state = nn.make_with_state(Counter)()
    copied = jax.tree.map(lambda x: x, state)
    new = state.set(model.calls, 5)
    assert new.get(model.calls) == 5 and copied.get(model.calls) == 0
    for use in (
        lambda: state.get(model.calls),
        lambda: state.set(model.calls, 1),
        lambda: state.substate(model),
        lambda: state.update(copied),
        lambda: copied.update(state),
        lambda: jax.tree.leaves(state),
    ):
        with pytest.raises(ValueError, match=r"(?s)this state is outdated.*State\(~old~\)"):
            use()


def test_what_does_not_fit_a_state_is_refused():
    model, state = nn.make_with_state(Counter)()
    get, set_, update = (inspect.unwrap(f) for f in (nn.State.get, nn.State.set, nn.State.update))
    with pytest.raises(ValueError, match="looked up by `Variable`"):
        get(state, "calls")
    with pytest.raises(KeyError, match="no value for the variable None"):
        state.get(nn.Variable(0))
    for value in (jnp.zeros(2), 1.5, (1,)):
        with pytest.raises(
            ValueError, match=r"(?s)has another structure, shape or dtype.*Counter.calls"
        ):
            set_(state, model.calls, value)
    with pytest.raises(ValueError, match="only be updated with another state"):
        update(state, {"Counter.calls": 1})
    with pytest.raises(KeyError, match=r"no variable 'list\[0\]'"):
        state.update(nn.make_with_state(lambda: [nn.Variable(0)])()[1])
    assert repr(state) != "State(~old~)"


def test_a_variable_holds_arrays_of_strong_type_which_are_buffers():
    index = nn.Variable({"a": 1.0, "b": np.zeros(2), "key": jax.random.key(0)})
    assert not any(jax.typeof(x).weak_type for x in jax.tree.leaves(index) if x.dtype == float)
    assert vernal.trainable(index).value == {"a": False, "b": False, "key": False}
    assert jax.tree.structure(Counter()) == jax.tree.structure(Counter())
    with pytest.raises(
        ValueError, match=r"initial value, not a function(?s:.)*Variable\(make\(\)\)"
    ):
        nn.Variable(lambda: jnp.zeros(2))
    with pytest.raises(
        TypeError, match=r"variable must hold arrays only(?s:.)*Variable\(value\)\['a'\]"
    ):
        nn.Variable({"a": "text"})
    abstract = jax.eval_shape(Counter)
    assert jax.tree.leaves(abstract)[0].shape == ()


def test_without_its_state_a_model_says_so():
    for model in (nn.make_with_state(Counter)()[0], nn.delete_init_state(Counter())):
        assert not jax.tree.leaves(model)
        with pytest.raises(RuntimeError, match="the model does not hold its state"):
            model(X)
        with pytest.raises(RuntimeError, match="the model does not hold its state"):
            nn.apply(model, X)
    with pytest.raises(RuntimeError, match="the model does not hold its state"):
        nn.make_with_state(lambda: model)()


def test_a_model_with_state_may_be_a_leaf_or_nothing_at_all():
    index, state = nn.make_with_state(lambda: nn.Variable(jnp.ones(2)))()
    assert index.marker == "Variable" and jnp.array_equal(state.get(index), jnp.ones(2))
    assert repr(nn.make_with_state(lambda: 3)()) == "(3, State({}))"


def test_stateful_layers_say_so():
    assert Counter().is_stateful() and Theirs().is_stateful()
    with pytest.raises(TypeError, match="__call__"):
        nn.StatefulLayer()


def test_a_stack_refuses_the_state_that_it_cannot_hand_on(getkey):
    def make():
        return nn.Stack(lambda key: nn.BatchNorm(2), 2, key=getkey())

    x = jnp.ones((5, 2))
    model, state = nn.make_with_state(make)()
    with pytest.raises(TypeError, match=r"a `Stack` takes no `state`(.|\n)*nn.apply\(model, x\)"):
        model(x, state)
    model, state = nn.make_with_state(lambda: nn.Sequential([make()]))()
    with pytest.raises(RuntimeError, match=r"the model does not hold its state(.|\n)*Stack"):
        model(x, state)


@pytest.mark.parametrize("layer", [nn.BatchNorm(2), nn.Sequential([nn.BatchNorm(2)])])
def test_a_key_in_the_place_of_the_state(layer, getkey):
    call = inspect.unwrap(type(layer).__call__)
    with pytest.raises(
        TypeError, match=r"was given something that is not a State(.|\n)*to pass a random key"
    ):
        call(layer, jnp.ones((5, 2)), getkey())
