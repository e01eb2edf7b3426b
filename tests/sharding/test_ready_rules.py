"""The ready rules: data parallel, fully sharded, tensor parallel, and two of them together."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import P

import vernal
from vernal import nn
from vernal.sharding import data_parallel, fsdp, make_mesh, shardings, tensor_parallel

MESH = make_mesh(data=4, model=2)


class Block(vernal.Module):
    attention: nn.MultiheadAttention
    mlp: nn.MLP

    def __init__(self, key):
        self.attention = nn.MultiheadAttention(
            4, 8, num_key_value_heads=2, use_query_bias=True, use_output_bias=True, key=key
        )
        self.mlp = nn.MLP(8, 8, 32, depth=1, key=key)


def shapes(make):
    return vernal.filter_eval_shape(make, jax.random.key(0))


def test_data_parallel_leaves_everything_whole():
    model = shapes(Block)
    specs = {s.spec for s in jax.tree.leaves(shardings(model, MESH, data_parallel()))}
    assert specs == {P()}


def test_fsdp_cuts_the_longest_axis_that_divides_and_leaves_small_arrays():
    model = {
        "long": jnp.ones((8, 16)),
        "first": jnp.ones((16, 16)),
        "divides": jnp.ones((18, 8)),
        "odd": jnp.ones((17, 19)),
        "small": jnp.ones(16),
        "number": jnp.ones(()),
        "none": jnp.ones((0, 16)),
        "f": abs,
        "keys": jax.random.split(jax.random.key(0), 64),
    }
    found = fsdp(model, MESH, "data", min_bytes=512)
    assert found == {
        "long": P(None, "data"),
        "first": P("data", None),
        "divides": P(None, "data"),
        "odd": P(),
        "small": P(),
        "number": P(),
        "none": P(),
        "keys": P("data"),
    }
    both = fsdp({"x": jnp.ones((4, 8, 8))}, MESH, ("data", "model"), min_bytes=0)
    assert both == {"x": P(None, ("data", "model"), None)}
    assert all(spec == P() for spec in fsdp(model, MESH, "data").values())


def test_fsdp_does_not_cut_the_axis_of_stacked_layers():
    # A stack of 16 in a stack of 4, a stack that is the whole model, and the hidden layers of a perceptron.
    def inner(key):
        return nn.Stack(lambda key: nn.Linear(8, 8, key=key), 16, key=key)

    model = shapes(lambda key: {"a": nn.Stack(inner, 4, key=key), "b": nn.Linear(8, 8, key=key)})
    assert fsdp(model, MESH, "data", min_bytes=256) == {
        "a.layers.layers.weight": P(None, None, "data", None),
        "a.layers.layers.bias": P(),
        "b.weight": P("data", None),
        "b.bias": P(),
    }
    assert fsdp(model["a"], MESH, "data", min_bytes=0)["layers.layers.bias"] == P(
        None, None, "data"
    )
    mlp = shapes(lambda key: nn.MLP(8, 8, 8, 17, scan=True, key=key))
    assert fsdp(mlp, MESH, "data", min_bytes=0)["layers.1.weight"] == P(None, "data", None)
    lstm = shapes(lambda key: nn.Stack(lambda key: nn.Linear(3, 3, key=key), 8, key=key))
    assert set(fsdp(lstm, MESH, "data", min_bytes=0).values()) == {P()}


def test_tensor_parallel_pairs_columns_with_rows():
    model = shapes(lambda key: {"block": Block(key), "norm": nn.LayerNorm(8)})
    assert {k: v for k, v in tensor_parallel(model, MESH, "model").items() if v != P()} == {
        **{
            f"block.attention.{name}_proj.weight": P("model", None)
            for name in ("query", "key", "value")
        },
        "block.attention.query_proj.bias": P("model"),
        "block.attention.output_proj.weight": P(None, "model"),
        "block.mlp.layers.0.weight": P("model", None),
        "block.mlp.layers.0.bias": P("model"),
        "block.mlp.layers.1.weight": P(None, "model"),
    }
    stacked = shapes(lambda key: nn.Stack(Block, 3, key=key))
    found = tensor_parallel(stacked, MESH, "model")
    assert found["layers.attention.output_proj.weight"] == P(None, None, "model")
    assert found["layers.attention.output_proj.bias"] == P()
    assert found["layers.mlp.layers.0.bias"] == P(None, "model")


def linears(rules):
    weights = [spec for name, spec in rules.items() if name.endswith("weight")]
    return ["whole" if not any(s) else "rows" if s[-1] else "columns" for s in weights]


@pytest.mark.parametrize(
    ("depth", "scan", "cuts"),
    [
        (1, False, ["columns", "rows"]),
        (2, False, ["columns", "rows", "whole"]),
        (3, False, ["columns", "rows", "columns", "rows"]),
        (3, True, ["columns", "columns", "rows"]),
    ],
)
def test_tensor_parallel_of_deep_perceptrons(depth, scan, cuts):
    model = shapes(lambda key: nn.MLP(4, 4, 8, depth, scan=scan, key=key))
    assert linears(tensor_parallel(model, MESH, "model")) == cuts


def test_fsdp_cuts_what_tensor_parallel_left():
    model = shapes(lambda key: nn.Stack(Block, 4, key=key))
    rules = fsdp(model, MESH, "data", min_bytes=128, rules=tensor_parallel(model, MESH, "model"))
    assert rules["layers.mlp.layers.0.weight"] == P(None, "model", "data")
    assert rules["layers.mlp.layers.1.weight"] == P(None, "data", "model")
    assert rules["layers.mlp.layers.0.bias"] == P(None, "model")
    parts = [
        math.prod(leaf.shape) // math.prod(s.shard_shape(leaf.shape))
        for leaf, s in zip(
            jax.tree.leaves(model), jax.tree.leaves(shardings(model, MESH, rules)), strict=True
        )
    ]
    assert parts.count(8) == 6
    # Rules by pattern leave the other arrays whole, to be cut.
    by_hand = {"layers.mlp.layers.0.weight": P(None, None, "model")}
    found = fsdp(model, MESH, "data", min_bytes=128, rules=by_hand)
    assert found["layers.mlp.layers.0.weight"] == P(None, "data", "model")
    assert found["layers.mlp.layers.1.weight"] == P(None, None, "data")


def test_what_the_ready_rules_cannot_do_is_refused():
    model = shapes(Block)
    with pytest.raises(ValueError, match=r"(?s)the mesh does not have this axis.*fsdp.*'rows'"):
        fsdp(model, MESH, "rows")
    with pytest.raises(
        ValueError, match=r"(?s)the mesh does not have this axis.*tensor_parallel.*'rows'"
    ):
        tensor_parallel(model, MESH, "rows")
    with pytest.raises(ValueError, match=r"(?s)the paths do not match.*fsdp\(tree, mesh, rules\)"):
        fsdp(model, MESH, "data", rules={"*.mlp": P()})
    with pytest.raises(
        ValueError, match="heads or features do not divide into equal parts"
    ) as caught:
        tensor_parallel({"a": model, "b": nn.MLP(2, 2, 6, 1, key=jax.random.key(0))}, MESH, "data")
    assert "a.attention.num_key_value_heads=2\n" in str(caught.value)
    assert "b.width_size=6" in str(caught.value)
    with pytest.raises(
        ValueError, match=r"(?s)the model has no layers that tensor_parallel.*got: bias|weight"
    ):
        tensor_parallel(nn.Linear(2, 2, key=jax.random.key(0)), MESH, "model")
