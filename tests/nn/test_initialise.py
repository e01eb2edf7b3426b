"""`initialise`: which rule is for which array, what the initialiser is asked for, and which key it gets."""

import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import initializers as init

import vernal
from tests.nn._filled import filled
from vernal import nn


class Model(vernal.Module):
    embed: nn.Embedding
    conv: nn.Conv2d
    blocks: object
    norm: nn.LayerNorm
    steps: jax.Array

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.embed = nn.Embedding(5, 4, key=k1)
        self.conv = nn.Conv2d(2, 3, 2, key=k2)
        self.blocks = [nn.MLP(4, 4, 6, 1, key=k) for k in (k3, k4)]
        self.norm = nn.LayerNorm(4)
        self.steps = jnp.array(3)


def test_a_rule_is_for_the_arrays_that_it_names_and_for_no_other(getkey):
    model = vernal.freeze(filled(Model, getkey()), "norm")
    rules = {
        nn.Conv: init.constant(1.0),
        nn.Linear: init.constant(2.0),
        (nn.MLP, "layers.*.bias"): init.constant(3.0),
        "norm.*": init.constant(4.0),
        "blocks.1.layers.0.weight": init.constant(5.0),
    }
    new = nn.initialise(model, rules, getkey())
    # The frozen marks are part of the structure.
    assert jax.tree.structure(new) == jax.tree.structure(model)
    expected = {"conv.weight": 1.0, "norm.weight": 4.0, "norm.bias": 4.0}
    for name in (
        "blocks.0.layers.0",
        "blocks.0.layers.1",
        "blocks.1.layers.0",
        "blocks.1.layers.1",
    ):
        expected |= {f"{name}.weight": 2.0, f"{name}.bias": 3.0}
    expected["blocks.1.layers.0.weight"] = 5.0
    old = vernal.trees.named_leaves(model)
    for name, leaf in vernal.trees.named_leaves(new).items():
        assert leaf.dtype == old[name].dtype
        np.testing.assert_array_equal(
            leaf, np.broadcast_to(expected.get(name, old[name]), leaf.shape)
        )


def test_fans_count_what_enters_and_leaves_an_output(getkey):
    def make(key):
        return {
            "wide": nn.Linear(200, 50, key=key),
            "conv": nn.Conv2d(16, 32, 5, key=key),
            "grouped": nn.Conv1d(32, 64, 5, groups=4, key=key),
            "stack": nn.Stack(lambda key: nn.Linear(60, 90, key=key), 3, key=key),
            "scanned": nn.MLP(3, 3, 70, 4, scan=True, key=key),
        }

    fans = {"wide": 50, "conv": 16 * 25, "grouped": 64 * 5, "stack": 60, "scanned": 70}

    @jax.jit
    def statistics(key):
        # In an abstract model nothing is drawn but what a rule asks for.
        model = jax.eval_shape(make, key)
        into = init.variance_scaling(1.0, "fan_in", "uniform")
        out = init.variance_scaling(1.0, "fan_out", "uniform")
        rules = {
            "{wide,grouped}.weight": out,
            "{conv,stack.layers,scanned.layers.*}.weight": into,
        }
        drawn = nn.initialise(model, rules, key)
        drawn |= {"stack": drawn["stack"].layers, "scanned": drawn["scanned"].layers[1]}
        weights = (drawn[name].weight for name in fans)
        return [jnp.stack([weight.std(), weight.mean()]) for weight in weights]

    for (std, mean), fan in zip(statistics(getkey()), fans.values(), strict=True):
        np.testing.assert_allclose(std * math.sqrt(fan), 1, rtol=0.05)
        assert abs(mean) * math.sqrt(fan) < 0.1


def test_an_initialiser_sees_inputs_and_outputs_last(getkey):
    seen = []

    def counted(key, shape, dtype):
        seen.append(shape)
        return jnp.arange(math.prod(shape), dtype=dtype).reshape(shape)

    abstract = jax.eval_shape(lambda key: nn.Conv2d(2, 5, (3, 4), key=key), getkey())
    conv = nn.initialise(abstract, {nn.Conv: counted}, getkey())
    [shape] = seen
    assert shape == (3, 4, 2, 5) and conv.weight.shape == (5, 2, 3, 4)
    expected = np.arange(120.0).reshape(shape).transpose(3, 2, 0, 1)
    np.testing.assert_array_equal(conv.weight, expected)


def test_the_recipe_of_pytorch_is_the_default_of_the_layer(getkey):
    layer = nn.Linear(300, 200, key=getkey())
    recipe = {nn.Linear: init.variance_scaling(1 / 3, "fan_in", "uniform")}
    again = nn.initialise(layer, recipe, getkey())
    limit = 1 / math.sqrt(300)
    for weight in (layer.weight, again.weight):
        assert abs(weight).max() <= limit
        np.testing.assert_allclose(weight.std(), limit / math.sqrt(3), rtol=0.02)
    assert (again.weight != layer.weight).any() and (again.bias == layer.bias).all()


def test_an_array_has_the_same_values_alone_in_a_list_and_in_a_stack(getkey):
    def make(key):
        # What an array is given depends on its name in the model, and not on what else is in there.
        linear = lambda key: nn.Linear(3, 3, key=key)  # noqa: E731 (named for its two uses)
        return (
            {"a": [linear(key), linear(key)]},
            {"a": nn.Stack(linear, 2, key=key), "b": nn.MLP(2, 2, 3, 3, key=key)},
            {"b": nn.MLP(2, 2, 3, 3, scan=True, key=key)},
        )

    def drawn(key, rule):
        models = jax.eval_shape(make, key)
        listed, stacked, scanned = (nn.initialise(m, {nn.Linear: rule}, key) for m in models)
        deep, scanned = ([layer.weight for layer in m["b"].layers] for m in (stacked, scanned))
        return [layer.weight for layer in listed["a"]], stacked["a"].layers.weight, deep, scanned

    @jax.jit
    def both(key):
        return drawn(key, init.truncated_normal()), drawn(key, init.orthogonal())[1]

    (listed, stacked, deep, scanned), orthogonal = both(getkey())
    np.testing.assert_allclose(stacked, listed, rtol=1e-5, atol=1e-6)
    for weight, other in zip(scanned, [deep[0], jnp.stack(deep[1:3]), deep[3]], strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)
    assert len({float(weight[0, 0]) for weight in (*listed, *deep)}) == 6
    for q in orthogonal:
        np.testing.assert_allclose(q @ q.T, jnp.eye(3), atol=1e-5)


def test_abstract_models_become_real_where_a_rule_says_so():
    make = lambda key: nn.Linear(3, 2, dtype=jnp.bfloat16, key=key)  # noqa: E731 (used twice)
    abstract = jax.eval_shape(make, jax.random.key(0))
    half = nn.initialise(abstract, {nn.Linear: init.normal()}, jax.random.key(1))
    assert half.weight.dtype == jnp.bfloat16 and isinstance(half.weight, jax.Array)
    assert isinstance(half.bias, jax.ShapeDtypeStruct)
    rules = {nn.Linear: init.normal(), "**.bias": init.zeros}
    whole = jax.jit(lambda key: nn.initialise(abstract, rules, key))(jax.random.key(1))
    assert (whole.weight == half.weight).all() and (whole.bias == 0).all()
    shapes = jax.eval_shape(lambda m: nn.initialise(m, rules, jax.random.key(0)), whole)
    assert jax.tree.leaves(shapes) == jax.tree.leaves(abstract)


def refuses(error, text, rules):
    model = {"mlp": nn.MLP(2, 2, 3, 1, key=jax.random.key(0))}
    with pytest.raises(error, match=f"(?s){text}"):
        # Without beartype, which would answer first where a rule or an initialiser is none.
        inspect.unwrap(nn.initialise)(model, rules, jax.random.key(0))


def test_rules_that_would_be_ignored_are_refused_and_say_what_is_near():
    refuses(
        ValueError, r"paths do not match.*bais'.*did you mean '\*\*\.bias'", {"**.bais": init.ones}
    )
    refuses(ValueError, r"the leaves are:\s+mlp\.layers\.0\.weight", {"**.gamma": init.ones})
    refuses(ValueError, r"'mlp\.\*'.*a part.*write 'mlp\.\*\.\*\*'", {"mlp.*": init.ones})
    refuses(
        ValueError,
        r"got: Conv: no such module; the classes with arrays are MLP, Linear",
        {nn.Conv: init.ones},
    )
    wrong = {(nn.Linear, "kernel"): init.ones}
    refuses(ValueError, r"got: \(Linear, 'kernel'\).*arrays of Linear are weight, bias", wrong)


def test_two_rules_of_one_kind_for_one_array_are_refused():
    both = {"**.weight": init.ones, "mlp.**": init.zeros}
    refuses(
        ValueError,
        r"mlp\.layers\.0\.weight: more than one path.*'\*\*\.weight' and 'mlp\.\*\*'",
        both,
    )
    classes = {nn.Linear: init.ones, (nn.MLP, "**.weight"): init.zeros}
    refuses(
        ValueError, r"more than one path matches it, Linear and \(MLP, '\*\*\.weight'\)", classes
    )


def test_initialisers_that_do_not_fit_are_refused_and_the_array_is_named():
    refuses(ValueError, r"does not fit.*0\.bias.*at least 2D", {"**.bias": init.he_normal()})
    half = {"**.bias": lambda key, shape, dtype: jnp.zeros(shape, jnp.bfloat16)}
    refuses(ValueError, r"does not fit.*float32\[3\].*got: bfloat16\[3\]", half)
    small = {"**.bias": lambda key, shape, dtype: jnp.zeros((), dtype)}
    refuses(ValueError, r"does not fit.*float32\[3\].*got: float32\[\]", small)


def test_what_is_no_rule_is_refused():
    refuses(TypeError, r"an initialiser must be a function.*got: 0\.0", {"**.bias": 0.0})
    refuses(
        TypeError,
        r"must say which arrays.*got: \(.*\"\*\*\.bias\"",
        {("**.bias", nn.Linear): init.ones},
    )


def test_a_path_that_means_weights_passes_over_buffers():
    model = nn.Sequential([nn.Linear(3, 4, key=jax.random.key(0)), nn.BatchNorm(4)])
    drawn = nn.initialise(model, {"**": jax.nn.initializers.constant(3.0)}, jax.random.key(1))
    assert drawn[1].weight[0] == 3.0 and drawn[0].weight[0, 0] == 3.0
    assert drawn[1].running_var.value[0] == 1.0 and drawn[1].num_batches_tracked.value == 0.0
    rule = {"**.running_var": jax.nn.initializers.constant(2.0)}
    assert nn.initialise(model, rule, jax.random.key(1))[1].running_var.value[0] == 2.0


@pytest.mark.parametrize("rule", ["**", "norms", (nn.WeightNorm, "**"), (nn.WeightNorm, "layer")])
def test_the_length_of_a_weight_norm_follows_a_rule_that_means_its_weight_too(rule, getkey):
    class Model(vernal.Module):
        norms: list
        stack: nn.Stack

    def normed(key):
        return nn.WeightNorm(nn.Linear(3, 3, use_bias=False, key=key))

    model = Model([normed(getkey())], nn.Stack(normed, 2, key=getkey()))
    drawn = nn.initialise(model, {rule: jax.nn.initializers.normal(0.02)}, getkey())
    norms = [drawn.norms[0]] + ([] if rule == "norms" else list(drawn.stack))
    for norm in norms:
        assert jnp.abs(norm.layer.weight).max() < 0.2
        np.testing.assert_allclose(nn.resolve(norm).weight, norm.layer.weight, rtol=1e-5)
    # A rule that means nothing but the length draws it.
    drawn = nn.initialise(model, {"**.g": jax.nn.initializers.constant(2.0)}, getkey())
    np.testing.assert_array_equal(drawn.norms[0].g, np.full((3, 1), 2.0))
    assert (drawn.norms[0].layer.weight == model.norms[0].layer.weight).all()
