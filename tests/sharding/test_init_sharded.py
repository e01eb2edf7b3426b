"""`init_sharded`: the same model, and never whole on any device."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import NamedSharding

import vernal
from vernal import nn
from vernal.sharding import fsdp, gather, init_sharded, make_mesh, shardings
from vernal.trees import named_leaves

MESHES = {"explicit": make_mesh(data=8), "automatic": make_mesh(data=8, automatic=True)}
by_mesh = pytest.mark.parametrize("kind", MESHES)


class Net(vernal.Module):
    table: nn.Embedding
    blocks: nn.Stack
    scale: jax.Array

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.table = nn.Embedding(512, 64, key=key1)
        self.blocks = nn.Stack(lambda key: nn.MLP(64, 64, 256, depth=1, key=key), 4, key=key2)
        self.scale = jnp.ones(())


@pytest.mark.parametrize(("kind", "inside"), [("explicit", True), ("automatic", False)])
def test_no_device_ever_holds_the_whole_and_the_numbers_are_the_same(kind, inside, monkeypatch):
    mesh = MESHES[kind]
    memory = []
    filter_jit = vernal.sharding._init.filter_jit

    def measured(fn, **options):
        def run(key):
            compiled = filter_jit(fn, **options).lower(key).compile()
            memory.append(compiled.memory_analysis())
            return compiled(key)

        return run

    monkeypatch.setattr(vernal.sharding._init, "filter_jit", measured)
    key = jax.random.key(0)

    def rules(model):
        return fsdp(model, mesh, "data", min_bytes=1024)

    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        model = init_sharded(Net, key, mesh, rules)
    whole = jax.jit(Net)(key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), gather(model), whole)
    assert jax.tree.map(lambda x: x.sharding, model) == shardings(model, mesh, rules)
    names = named_leaves(model)
    assert names["blocks.layers.layers.0.weight"].sharding.spec == P(None, "data", None)
    # What is left whole is small: a hundredth of the model.
    size = sum(x.nbytes for x in jax.tree.leaves(model))
    assert memory[0].output_size_in_bytes < size / 8 + size / 100
    # Making numbers from random bits takes some more memory: of a part, not of the whole.
    assert memory[0].output_size_in_bytes + memory[0].temp_size_in_bytes < size / 2


@by_mesh
def test_the_state_of_an_optimiser_is_made_in_its_place(kind):
    mesh = MESHES[kind]
    rules = {"weight": P("data"), "bias": P()}
    model = init_sharded(lambda key: nn.Linear(4, 8, key=key), jax.random.key(0), mesh, rules)
    optimizer = vernal.Optimizer(optax.adam, 1e-3)
    state = init_sharded(optimizer.init, model, mesh, rules, like=model)
    assert state[0].mu.weight.sharding == NamedSharding(mesh, P("data"))
    assert vernal.tree_equal(gather(state), jax.tree.map(np.asarray, optimizer.init(gather(model))))


def test_a_model_may_hold_more_than_arrays():
    made = init_sharded(
        lambda key: {"f": jnp.sin, "x": jax.random.normal(key, (8,))},
        jax.random.key(0),
        MESHES["explicit"],
        {"x": P("data")},
    )
    assert made["f"] is jnp.sin and made["x"].sharding.spec == P("data")
