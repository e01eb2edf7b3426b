"""A frozen array is marked in the structure of its module, and nowhere else."""

import copy
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import Module, freeze, trainable, tree_at, unfreeze
from vernal.modules import frozen_leaves, module_update_wrapper
from vernal.nn import Linear, Sequential
from vernal.trees import named_leaves


class Model(Module):
    encoder: Linear
    head: Linear
    table: dict
    stack: list
    scale: jax.Array
    count: jax.Array
    activation: Any = jax.nn.relu

    def __call__(self, x):
        return self.head(self.activation(self.encoder(x))) * self.scale


def make(key=0):
    first, second, third = jax.random.split(jax.random.key(key), 3)
    return Model(
        encoder=Linear(3, 4, key=first),
        head=Linear(4, 2, key=second),
        table={"a.b": jnp.ones(2), "c": [jnp.ones(1), jnp.ones(1)]},
        stack=[Linear(2, 2, key=third), jnp.tanh, jnp.ones(3)],
        scale=jnp.ones(()),
        count=jnp.arange(2),
    )


def frozen_names(model):
    """The names of the frozen arrays, in order."""
    names = named_leaves(model)
    return [name for name, is_frozen in zip(names, frozen_leaves(model), strict=True) if is_frozen]


ENCODER = ["encoder.weight", "encoder.bias"]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("encoder", ENCODER),
        ("encoder.**", ENCODER),
        ("encoder.bias", ["encoder.bias"]),
        ("{encoder,head}.bias", ["encoder.bias", "head.bias"]),
        (["scale", "head.bias"], ["head.bias", "scale"]),
        ("**.bias", ["encoder.bias", "head.bias", "stack.0.bias"]),
        ("table", ['table."a.b"', "table.c.0", "table.c.1"]),
        ("table.c.1", ["table.c.1"]),
        ("stack.*", ["stack.0.weight", "stack.0.bias", "stack.2"]),
        ("**", list(named_leaves(make()))),
        ([], []),
        (lambda m: m.encoder, ENCODER),
        (lambda m: (m.encoder.bias, m.stack[2]), ["encoder.bias", "stack.2"]),
        (lambda m: m.table["c"], ["table.c.0", "table.c.1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pattern_or_a_function_names_arrays_or_whole_parts(where, names):
    assert frozen_names(freeze(make(), where)) == names


def test_freezing_changes_the_structure_and_nothing_else():
    model = make()
    frozen = freeze(model, "encoder")
    assert all(a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(frozen), strict=True))
    assert list(named_leaves(frozen)) == list(named_leaves(model))
    assert jax.tree.structure(frozen) != jax.tree.structure(model)
    assert repr(frozen) == repr(model)
    assert frozen.head is model.head
    assert jax.tree.structure(unfreeze(frozen)) == jax.tree.structure(model)


def test_freezing_adds_up_and_unfreezing_takes_away():
    model = freeze(freeze(make(), "encoder"), "**.bias")
    assert frozen_names(model) == [*ENCODER, "head.bias", "stack.0.bias"]
    assert frozen_names(unfreeze(model, "encoder")) == ["head.bias", "stack.0.bias"]
    assert frozen_names(unfreeze(model, ["encoder.bias", "head.weight"])) == [
        "encoder.weight",
        "head.bias",
        "stack.0.bias",
    ]
    assert freeze(model, "encoder") is model
    assert unfreeze(make(), "encoder.bias") == make()


def scanned(model):
    return jax.lax.scan(lambda m, _: (jax.tree.map(lambda x: x, m), None), model, length=2)[0]


def saved(model, path):
    vernal.save(path / "model.safetensors", model)
    return vernal.load(path / "model.safetensors", like=jax.eval_shape(lambda: model))


KEPT = {
    "tree.map": lambda m, _: jax.tree.map(lambda x: x, m),
    "jit": lambda m, _: jax.jit(lambda m: m)(m),
    "filter_jit": lambda m, _: vernal.filter_jit(lambda m: m)(m),
    "vmap": lambda m, _: jax.vmap(lambda _: m)(jnp.arange(2)),
    "scan": lambda m, _: scanned(m),
    "eval_shape": lambda m, _: jax.eval_shape(lambda: m),
    "pickle": lambda m, _: pickle.loads(pickle.dumps(m)),
    "deepcopy": lambda m, _: copy.deepcopy(m),
    "saving": saved,
    "tree_at an array": lambda m, _: tree_at(lambda m: m.encoder.weight, m, jnp.zeros((4, 3))),
    "tree_at structure": lambda m, _: tree_at(lambda m: m.activation, m, jax.nn.gelu),
    "tree_at another shape": lambda m, _: tree_at(lambda m: m.encoder.bias, m, jnp.zeros((7,))),
    "partition": lambda m, _: vernal.combine(*vernal.partition(m, trainable(m))),
    "apply_updates": lambda m, _: vernal.apply_updates(m, vernal.params(m)),
}


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
def test_the_mark_stays_with_the_model(change, tmp_path):
    assert frozen_names(change(freeze(make(), "encoder"), tmp_path)) == ENCODER


def test_the_mark_goes_with_a_part_that_is_taken_out():
    model = freeze(make(), ["encoder", "table"])
    assert frozen_names(model.encoder) == ["weight", "bias"]
    assert frozen_names({"other": [model.encoder]}) == ["other.0.weight", "other.0.bias"]
    assert frozen_names(model.table) == []


def test_a_module_in_place_of_another_brings_its_own_marks():
    fresh = Linear(3, 4, key=jax.random.key(9))
    assert frozen_names(tree_at(lambda m: m.encoder, freeze(make(), "encoder"), fresh)) == []
    other = tree_at(lambda m: m.encoder, make(), freeze(fresh, "bias"))
    assert frozen_names(other) == ["encoder.bias"]


def test_one_layer_in_two_places_is_frozen_in_the_place_that_is_named():
    layer = Linear(2, 2, key=jax.random.key(0))
    pair = freeze([layer, layer], "0")
    assert frozen_names(pair) == ["0.weight", "0.bias"]
    assert pair[0].weight is pair[1].weight


def test_wrapping_a_frozen_module_keeps_the_mark():
    class Wrapper(Module):
        fn: Any
        gain: jax.Array

        @property
        def __wrapped__(self):
            return self.fn

    wrapper = module_update_wrapper(freeze(Wrapper(jnp.sin, jnp.ones(2)), "gain"))
    assert (wrapper.__name__, frozen_names(wrapper)) == ("sin", ["gain"])


def test_a_module_that_keeps_every_field_a_child_can_be_frozen():
    class Old(Module, layout="fields"):
        weight: Any
        name: Any

    old = freeze(Old(jnp.ones(2), "text"), "weight")
    assert frozen_leaves(old) == [True, False]
    assert trainable(old).name is False


def test_a_frozen_model_runs_and_is_compiled_once_more_at_most():
    traces = []

    @jax.jit
    def run(model, x):
        traces.append(model)
        return model(x)

    x = jnp.ones(3)
    models = [make(), freeze(make(), "encoder"), freeze(make(1), lambda m: m.encoder)]
    outs = [run(model, x) for model in models]
    np.testing.assert_array_equal(outs[0], outs[1])
    assert len(traces) == 2


def test_a_mismatch_of_marks_is_named():
    model = make()
    with pytest.raises(
        ValueError, match=r"\.encoder\.__frozen__: expected \('bias', 'weight'\), got nothing"
    ):
        vernal.combine(freeze(model, "encoder"), jax.tree.map(lambda _: None, model))


def test_trainable_is_a_tree_of_bools_like_the_model():
    model = freeze(make(), "encoder")
    mask = trainable(model)
    assert jax.tree.structure(mask) == jax.tree.structure(model)
    assert (mask.encoder.weight, mask.head.weight, mask.stack[2]) == (False, True, True)
    assert mask.count is False  # integers
    only = trainable(model, ["encoder.bias", "head.bias"])
    assert [name for name, bit in named_leaves(only).items() if bit] == ["head.bias"]
    shapes = jax.eval_shape(lambda: model)
    assert jax.tree.leaves(trainable(shapes)) == jax.tree.leaves(mask)


def test_trainable_takes_any_tree():
    tree = {"a": jnp.ones(2), "b": [3, jax.random.key(0), 1.0], "c": np.float32(1)}
    assert trainable(tree) == {"a": True, "b": [False, False, False], "c": True}
    assert trainable(tree, lambda t: t["c"]) == {"a": False, "b": [False] * 3, "c": True}
    assert trainable(jnp.ones(2)) is True


@pytest.mark.parametrize("change", [freeze, unfreeze, trainable])
def test_a_name_of_no_array_is_refused_with_the_names_near_it(change):
    with pytest.raises(ValueError, match=r"got: 'encodr': no leaf there; did you mean 'encoder'"):
        change(make(), ["head", "encodr"])
    with pytest.raises(
        ValueError, match=r"paths do not match the tree[\s\S]*'xyz'[\s\S]*stack\.2\n *and 2 more"
    ):
        change(make(), "xyz")


def test_a_part_without_arrays_is_refused():
    with pytest.raises(ValueError, match=r"paths do not match the tree[\s\S]*'activation'"):
        freeze(make(), lambda m: (m.head, m.activation))
    with pytest.raises(ValueError, match=r"paths do not match the tree[\s\S]*are:\n *none"):
        freeze([], "**")


def test_an_array_in_no_module_cannot_be_frozen():
    tree = {"layer": make().encoder, "loose": jnp.ones(2)}
    assert frozen_names(freeze(tree, "layer")) == ["layer.weight", "layer.bias"]
    with pytest.raises(ValueError, match=r"only arrays in a module can be frozen[\s\S]*loose"):
        freeze(tree, "**")
    with pytest.raises(ValueError, match="where: the array itself"):
        freeze(jnp.ones(2), "**")
    assert frozen_names(unfreeze(freeze(tree, "layer"))) == []


@pytest.mark.parametrize("transform", [freeze, unfreeze, trainable])
def test_a_tree_of_bools_is_not_taken_for_a_function_that_picks_parts(transform):
    """That of a model that can be called would be called with the model."""
    model = Sequential([Linear(2, 2, key=jax.random.key(0)), jax.nn.relu])
    mask = trainable(model, "layers.0.weight")
    for where in (mask, mask.layers[0], {"encoder": True}):
        with pytest.raises(TypeError, match=r"(?s)`where` is a tree of bools.*instead: the paths"):
            inspect.unwrap(transform)(model, where)


@pytest.mark.parametrize("where", [3, None, {"encoder": 1}, [lambda m: m], b"encoder", Linear])
def test_anything_else_is_no_where(where):
    with pytest.raises(TypeError, match="`where` does not pick a part of the model"):
        inspect.unwrap(unfreeze)(make(), where)


def test_a_file_does_not_hold_marks_and_load_takes_those_of_like(tmp_path, getkey):
    model = Linear(3, 2, key=getkey())
    frozen = freeze(model, "weight")
    vernal.save(tmp_path / "model.safetensors", frozen)
    for like in (model, frozen):
        loaded = vernal.load(tmp_path / "model.safetensors", like=like)
        assert trainable(loaded).weight is (like is model)
