"""Rules by path: which array gets which sharding, and one error for all that does not fit."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import NamedSharding

import vernal
from vernal import nn
from vernal.sharding import data_parallel, make_mesh, shardings
from vernal.trees import named_leaves

MESH = make_mesh(data=4, model=2)
MODEL = vernal.filter_eval_shape(lambda key: nn.MLP(4, 6, 8, 2, key=key), jax.random.key(0))
RULES = {
    "layers.{0,1}.weight": P("model", None),
    "layers.2.weight": P(None, ("model", "data")),
    "**.bias": P(),
}


def specs(tree):
    return {name: s.spec for name, s in named_leaves(tree).items()}


def test_every_array_has_the_spec_of_its_rule():
    found = shardings(MODEL, MESH, RULES)
    assert isinstance(found, nn.MLP)
    assert found.layers[0].weight == NamedSharding(MESH, P("model", None))
    assert specs(found) == {
        "layers.0.weight": P("model", None),
        "layers.0.bias": P(),
        "layers.1.weight": P("model", None),
        "layers.1.bias": P(),
        "layers.2.weight": P(None, ("model", "data")),
        "layers.2.bias": P(),
    }


def test_rules_may_be_made_from_the_tree_and_the_rest_may_have_a_default():
    def rules(model):
        return {name: P("data") for name, x in named_leaves(model).items() if x.shape == (8,)}

    found = specs(shardings(MODEL, MESH, rules, default=P()))
    assert found.pop("layers.0.bias") == found.pop("layers.1.bias") == P("data")
    assert set(found.values()) == {P()}


def test_numbers_need_no_rule_and_other_leaves_have_no_sharding():
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {"n": jnp.ones(()), "key": keys[0], "keys": keys, "x": np.ones(4), "f": abs, "i": 3}
    found = shardings(tree, MESH, {"{x,keys}": P("data")})
    assert found["f"] is None and found["i"] is None
    assert {name: s.spec for name, s in found.items() if s} == {
        "n": P(),
        "key": P(),
        "keys": P("data"),
        "x": P("data"),
    }


def test_names_are_patterns_for_themselves_also_where_they_need_quotes():
    tree = {"a.b": jnp.ones(4), "c*": {"1": jnp.ones(4)}, "c": jnp.ones(2)}
    rules = {'"a.b"': P("data"), '"c*"."1"': P("model"), '"c"': P("model")}
    assert specs(shardings(tree, MESH, rules)) == {
        '"a.b"': P("data"),
        '"c*"."1"': P("model"),
        "c": P("model"),
    }
    assert shardings(jnp.ones(4), MESH, {"": P("data")}).spec == P("data")


def test_one_error_tells_everything_that_does_not_fit():
    rules = {
        "layers.0.*": P("model", "data"),
        "layers.0.bias": P("data"),
        "layers.1.weight": P("wide", "data"),
        "layers.1.bias": P(("data", "data")),
        "layers.2.weight": P("data"),
        "*.2": P(),
        "layer.2.bias": P(),
    }
    with pytest.raises(ValueError, match="the paths do not match the tree") as caught:
        shardings(MODEL, MESH, rules)
    for line in [
        "where: shardings(tree, mesh, rules)",
        "(data=4, model=2)",
        "layers.0.bias: more than one path matches it, 'layers.0.*' and 'layers.0.bias'",
        "layers.1.weight, f32[8,8]: the mesh has no axis 'wide', in 'layers.1.weight': P(",
        "layers.1.bias, f32[8]: 'data' twice, in",
        "layers.2.weight, f32[6,8]: an axis of 6 does not divide into 4 parts, in 'layers.2.weight'",
        "layers.2.bias: no path matches it",
        "'*.2': a part, not a leaf; for the leaves in it, write '*.2.**'",
        "'layer.2.bias': no leaf there; did you mean 'layers.2.bias'?",
        "`default=jax.P()`",
    ]:
        assert line in str(caught.value), line
    assert "layers.0.weight" not in str(caught.value)


def test_a_spec_is_no_longer_than_its_array_and_many_lines_are_cut_short():
    tree = [jnp.ones(4)] * 12 + [jnp.ones(())]
    with pytest.raises(ValueError, match="the paths do not match the tree") as caught:
        shardings(tree, MESH, {"*": P(None, "data")})
    text = str(caught.value)
    assert "0, f32[4]: 2 entries for 1 axes, in '*': P(None, 'data')" in text
    assert "and 3 more" in text
    with pytest.raises(
        ValueError, match=r"(?s)paths do not match.*12, f32\[\]: 1 entries for 0 axes"
    ):
        shardings(tree, MESH, {"12": P("data")}, default=P())
    with pytest.raises(
        ValueError, match=r"(?s)paths do not match.*0, f32\[4\].*in default=P\(None"
    ):
        shardings(tree, MESH, {}, default=P(None, "data"))


def test_an_idle_rule_is_told_with_the_names_that_there_are():
    with pytest.raises(ValueError, match=r"(?s)'weights': no leaf there; did you mean 'weight'"):
        shardings({"weight": jnp.ones(4)}, MESH, {"weight": P(), "weights": P()})
    # The state of plain gradient descent has no arrays: there is nothing that a rule could miss.
    assert shardings((), MESH, data_parallel()) == ()


def test_a_rule_gives_a_spec():
    with pytest.raises(
        TypeError, match=r"(?s)a rule does not give a jax.P.*the rule '\*\*'.*'data'"
    ):
        inspect.unwrap(shardings)(MODEL, MESH, {"**": "data"})
    with pytest.raises(
        TypeError, match=r"(?s)a rule does not give a jax.P.*the rule 'default'.*'data'"
    ):
        inspect.unwrap(shardings)(MODEL, MESH, RULES, default="data")


def followed(factory, *args, model=MODEL, rules=RULES, **settings):
    optimizer = vernal.Optimizer(factory, *args, **settings)
    state = vernal.filter_eval_shape(optimizer.init, model)
    return state, specs(shardings(state, MESH, rules, like=model))


def test_the_state_of_an_optimiser_follows_its_parameters():
    clip = vernal.Optimizer(optax.clip_by_global_norm, 1.0)
    _, found = followed(optax.chain, clip, vernal.Optimizer(optax.adamw, 1e-3))
    expected = specs(shardings(MODEL, MESH, RULES))
    for name, spec in expected.items():
        assert found.pop(f"1.0.mu.{name}") == found.pop(f"1.0.nu.{name}") == spec
    assert set(found.values()) == {P()}


def test_a_history_follows_and_statistics_of_another_shape_are_whole():
    model = {"inner": {"w": jnp.ones((256, 128))}, "w": jnp.ones(4)}
    rules = {"inner.w": P("data", "model"), "w": P("model")}
    state, found = followed(optax.scale_by_lbfgs, memory_size=3, model=model, rules=rules)
    assert found["diff_params_memory.inner.w"] == P(None, "data", "model")
    assert found["diff_params_memory.w"] == P(None, "model")
    assert found["params.w"] == P("model") and found["weights_memory"] == P()
    state, found = followed(optax.scale_by_factored_rms, model=model, rules=rules)
    assert state.v_row["inner"]["w"].shape == (128,)
    assert found["v_row.inner.w"] == P() and found["v.w"] == P("model")


def test_models_and_states_are_spread_together_and_frozen_arrays_have_no_state():
    model = vernal.freeze(nn.Linear(2, 4, key=jax.random.key(0)), "bias")
    rules = {"weight": P("data"), "bias": P()}
    state = vernal.Optimizer(optax.adam, 1e-3).init(model)
    found = specs(shardings((model, state, jnp.ones(3)), MESH, rules, like=model))
    assert {name for name, spec in found.items() if spec == P("data")} == {
        "0.weight",
        "1.0.mu.weight",
        "1.0.nu.weight",
    }


def test_a_state_that_follows_another_model_is_refused():
    state = vernal.Optimizer(optax.adam, 1e-3).init({"w": jnp.ones(4)})
    with pytest.raises(
        ValueError, match=r"(?s)no array of the tree is named after.*layers.0.weight.*0.mu.w"
    ):
        shardings(state, MESH, RULES, like=MODEL)
    assert shardings({"step": jnp.ones(())}, MESH, RULES, like=MODEL)["step"].spec == P()
