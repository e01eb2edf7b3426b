"""Tied weights stay tied."""

import inspect
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal import nn
from vernal.trees import tree_check


class Tied(vernal.Module):
    shared: nn.Shared

    def __init__(self, key):
        a, b = jax.random.split(key)
        layers = {"in": nn.Embedding(5, 3, key=a), "out": nn.Linear(3, 5, key=b)}
        self.shared = nn.Shared(layers, lambda m: m["out"].weight, lambda m: m["in"].weight)

    def __call__(self, token):
        layers = self.shared()
        return layers["out"](jnp.tanh(layers["in"](token)))


def loss(model, token=2):
    return (model(jnp.array(token)) ** 2).sum()


def test_the_weight_is_stored_and_counted_once(getkey):
    model = Tied(getkey())
    assert [leaf.shape for leaf in jax.tree.leaves(model)] == [(5, 3), (5,)]
    assert model.shared()["out"].weight is model.shared()["in"].weight


def test_both_places_add_to_the_gradient(getkey):
    model = Tied(getkey())

    def both(first, second):
        hidden = jnp.tanh(first[2])
        return ((second @ hidden + model.shared()["out"].bias) ** 2).sum()

    weight = model.shared()["in"].weight
    expected = sum(jax.grad(both, argnums=(0, 1))(weight, weight))
    grads = jax.grad(loss)(model)
    np.testing.assert_allclose(grads.shared.pytree["in"].weight, expected, rtol=1e-5)


def test_it_stays_tied_through_training_saving_and_vmap(getkey, tmp_path):
    model = Tied(getkey())
    optimiser = vernal.Optimizer(optax.sgd, 0.1)
    state = optimiser.init(model)
    trained, state = optimiser.update(model, jax.grad(loss)(model), state)
    vernal.save(tmp_path / "model.safetensors", trained)
    loaded = vernal.load(tmp_path / "model.safetensors", Tied(getkey()))
    for after in (trained, loaded):
        layers = after.shared()
        assert layers["in"].weight is layers["out"].weight
        np.testing.assert_allclose(loss(after), loss(trained), rtol=1e-6)
    assert loss(trained) < loss(model)
    models = jax.vmap(Tied)(jax.random.split(getkey(), 4))
    one = jax.tree.map(lambda x: x[1], models)
    np.testing.assert_allclose(jax.vmap(loss)(models)[1], loss(one), rtol=1e-5)


def test_several_nodes_and_whole_layers_are_shared(getkey):
    make = [nn.Linear(3, 3, key=getkey()) for _ in range(3)]
    shared = nn.Shared(make, lambda m: (m[1], m[2]), lambda m: (m[0], m[0]))
    assert len(jax.tree.leaves(shared)) == 2
    first, second, third = shared()
    assert first == second == third


def test_it_is_equinoxs(getkey):
    ours = [nn.Linear(3, 3, key=getkey()) for _ in range(2)]
    theirs = [eqx.nn.Linear(3, 3, key=getkey()) for _ in range(2)]
    where, get = lambda m: m[1].weight, lambda m: m[0].weight
    ours, theirs = nn.Shared(ours, where, get), eqx.nn.Shared(theirs, where, get)
    assert [x.shape for x in jax.tree.leaves(ours)] == [
        x.shape for x in jax.tree.leaves(eqx.filter(theirs, eqx.is_array))
    ]


def test_nodes_that_differ_are_refused(getkey):
    layers = nn.Linear(3, 3, key=getkey()), nn.Linear(3, 2, key=getkey())
    with pytest.raises(
        ValueError, match=r"(?s)shared arrays must have one shape and dtype.*\[2,3\]"
    ):
        nn.Shared(layers, lambda m: m[1].weight, lambda m: m[0].weight)


class Twice(vernal.Module):
    """Stores one layer in two places, which is not sharing: see what `tree_check` says."""

    layers: list[nn.Linear]

    def __init__(self, key):
        layer = nn.Linear(3, 3, key=key)
        self.layers = [layer, layer]


def test_a_layer_stored_twice_is_found_at_construction_and_a_shared_one_counts_once(getkey):
    with pytest.raises(ValueError, match=r"(?s)one node of type Linear appears twice.*layers\[1\]"):
        tree_check(Twice(getkey()))
    model = Tied(getkey())
    tree_check(model)
    text = vernal.debug.summary(model, jnp.array(2))
    total = next(line for line in text.splitlines() if "total" in line.lower())
    assert str(5 * 3 + 5) in total.split()


def test_what_is_put_where_a_shared_node_is_used_but_not_stored_is_refused(getkey):
    model, new = Tied(getkey()), jnp.zeros((5, 3))
    text = (
        r"(?s)in the place of a shared node.*where: shared\.pytree\['out'\]\.weight\n"
        r".*stored once, at shared\.pytree\['in'\]\.weight.*tree_at for shared\.pytree\['in'\]"
    )
    for where in ("shared.pytree.out.weight", lambda m: m.shared.pytree["out"].weight):
        wrong = vernal.tree_at(where, model, new)
        with pytest.raises(ValueError, match=text):
            wrong(jnp.array(2))
        with pytest.raises(ValueError, match=text):
            nn.resolve(wrong)
    layer = nn.Linear(3, 5, key=getkey())
    with pytest.raises(ValueError, match=text):
        vernal.tree_at("shared.pytree.out", model, layer)(jnp.array(2))
    # Where it is stored, and what is not shared, it can be changed.
    changed = vernal.tree_at(
        ["shared.pytree.in.weight", "shared.pytree.out.bias"], model, [new, new[:, 0]]
    )
    assert not changed(jnp.array(2)).any() and changed.shared()["out"].weight is new


def test_what_is_shared_may_be_computed(getkey):
    layers = [nn.Linear(3, 3, key=getkey()) for _ in range(2)]
    shared = nn.Shared(layers, lambda both: both[1].weight, lambda both: both[0].weight.T)
    wrong = vernal.tree_at(lambda s: s.pytree[1].weight, shared, jnp.zeros((3, 3)))
    with pytest.raises(
        ValueError,
        match=r"(?s)pytree\[1\].*the nodes that shared\.get\(shared\.pytree\) is computed from",
    ):
        wrong()


@pytest.mark.parametrize(
    ("where", "get"),
    [("ab", "bc"), ("ab", "ba"), ("a", "a")],
    ids=["chain", "swap", "itself"],
)
def test_what_is_taken_out_is_not_what_is_stored(where, get, getkey):
    layers = {name: nn.Linear(2, 2, key=getkey()) for name in "abc"}
    with pytest.raises(ValueError, match=r"(?s)takes out a node that `get` picks.*where=\(a, b\)"):
        nn.Shared(layers, lambda m: tuple(m[n] for n in where), lambda m: tuple(m[n] for n in get))
    both = nn.Shared(layers, lambda m: (m["a"], m["b"]), lambda m: (m["c"], m["c"]))()
    assert vernal.tree_equal(both["a"], both["b"]) and vernal.tree_equal(both["a"], layers["c"])


class TiedByPath(vernal.Module):
    shared: nn.Shared

    def __init__(self, key):
        a, b = jax.random.split(key)
        layers = {"in": nn.Embedding(5, 3, key=a), "out": nn.Linear(3, 5, key=b)}
        self.shared = nn.Shared(layers, "out.weight", "in.weight")

    __call__ = Tied.__call__


def test_models_that_are_tied_by_paths_are_alike(getkey):
    key = getkey()
    model, again = TiedByPath(key), TiedByPath(key)
    assert vernal.tree_equal(model, again)
    assert vernal.tree_equal(model, pickle.loads(pickle.dumps(model)))
    np.testing.assert_array_equal(model(jnp.array(2)), Tied(key)(jnp.array(2)))
    step = vernal.filter_jit(lambda m: m(jnp.array(2)))
    for each in (model, again, TiedByPath(getkey())):
        step(each)
    assert step.trace_count == 1
    optax.incremental_update(vernal.params(model), vernal.params(TiedByPath(getkey())), 0.1)
    stack = nn.Stack.of([TiedByPath(getkey()).shared for _ in range(2)])
    assert stack.layers.pytree["in"].weight.shape == (2, 5, 3)


def test_several_paths(getkey):
    layers = {name: nn.Linear(2, 2, key=getkey()) for name in "abc"}
    both = nn.Shared(layers, ("a", "b"), ("c", "c"))()
    assert vernal.tree_equal(both["a"], layers["c"]) and vernal.tree_equal(both["b"], layers["c"])
    with pytest.raises(
        ValueError,
        match=r"(?s)the path matches several.*Shared\(where=.\*",
    ):
        nn.Shared(layers, "*", "c")
    with pytest.raises(ValueError, match=r"(?s)Shared|get='d'"):
        nn.Shared(layers, "a", "d")
    with pytest.raises(ValueError, match=r"(?s)takes out a node that `get` picks.*where=\(a, b\)"):
        nn.Shared(layers, ("a", "b"), ("b", "a"))


def test_what_picks_no_node_is_refused(getkey):
    layers, first = nn.MLP(2, 2, 2, 1, key=getkey()), "layers.0.weight"
    init = inspect.unwrap(nn.Shared.__init__)
    for name, where, get in [("where", 1, first), ("get", first, ("layers", 2))]:
        with pytest.raises(TypeError, match=f"(?s)`{name}` must pick a node.*Shared.*lambda"):
            init(object.__new__(nn.Shared), layers, where, get)
