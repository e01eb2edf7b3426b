"""`place`, `gather` and `shard_batch` in one process; `test_several_places.py` has several."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import NamedSharding

import vernal
from vernal import nn
from vernal.sharding import data_parallel, gather, make_mesh, place, shard_batch, shardings

EXPLICIT = make_mesh(data=4, model=2)
AUTO = make_mesh(data=2, model=4, automatic=True)
RULES = {"**.weight": P("model", "data"), "**.bias": P("data")}


def model():
    return nn.MLP(4, 8, 8, depth=1, key=jax.random.key(0))


def test_arrays_come_from_anywhere_and_go_back_to_the_host():
    whole = model()
    first = place(whole, EXPLICIT, RULES)
    assert jax.tree.map(lambda x: x.sharding, first) == shardings(whole, EXPLICIT, RULES)
    assert first.layers[0].weight.addressable_shards[0].data.shape == (4, 1)
    second = place(first, AUTO, RULES)
    assert second.layers[0].weight.sharding == NamedSharding(AUTO, P("model", "data"))
    third = place(second, make_mesh(all=-1), data_parallel())
    assert third.layers[0].weight.is_fully_replicated
    fourth = place(gather(third), EXPLICIT, RULES)
    for moved in (first, second, third, fourth):
        back = gather(moved)
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(back))
        assert vernal.tree_equal(jax.tree.map(np.asarray, whole), back)


def test_the_state_of_an_optimiser_is_placed_beside_its_parameters():
    placed = place(model(), EXPLICIT, RULES)
    state = vernal.Optimizer(optax.adam, 1e-3).init(model())
    moved = place(state, EXPLICIT, RULES, like=placed)
    assert moved[0].mu.layers[1].weight.sharding == placed.layers[1].weight.sharding
    assert moved[0].count.sharding.spec == P()


def test_keys_and_other_leaves_keep_their_kind():
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {"keys": keys, "f": abs, "n": 3, "x": np.arange(4, dtype=np.int8)}
    placed = place(tree, EXPLICIT, {"keys": P("data")}, default=P())
    assert placed["f"] is abs and placed["n"] == 3
    assert placed["keys"].sharding.spec == P("data")
    back = gather(placed)
    assert back["f"] is abs and back["n"] == 3 and back["x"].dtype == np.int8
    assert back["keys"].dtype == keys.dtype and len(back["keys"].devices()) == 1
    np.testing.assert_array_equal(jax.random.key_data(back["keys"]), jax.random.key_data(keys))


def test_shapes_without_values_cannot_be_placed():
    abstract = vernal.filter_eval_shape(model)
    with pytest.raises(
        ValueError, match=r"(?s)only a shape and dtype cannot be placed.*layers.0.bias"
    ):
        place(abstract, EXPLICIT, RULES)


def test_place_works_in_compiled_code_too():
    with jax.set_mesh(EXPLICIT):
        placed = jax.jit(lambda m: place(m, EXPLICIT, RULES))(model())
    assert placed.layers[0].weight.sharding.spec == P("model", "data")


@pytest.mark.parametrize("mesh", [EXPLICIT, AUTO], ids=["explicit", "automatic"])
def test_a_batch_is_spread_along_its_leading_axis(mesh):
    keys = jax.random.split(jax.random.key(1), 8)
    batch = (np.arange(16.0, dtype=np.float32).reshape(8, 2), {"keys": keys, "name": "train"})
    x, more = shard_batch(batch, mesh, "data")
    assert more["name"] == "train"
    assert x.sharding == NamedSharding(mesh, P("data"))
    assert more["keys"].sharding == NamedSharding(mesh, P("data"))
    np.testing.assert_array_equal(x, batch[0])
    assert shard_batch(x, mesh, ("data", "model")).sharding.spec == P(("data", "model"))
    with jax.set_mesh(mesh):
        inside = jax.jit(lambda x: shard_batch(2 * x, mesh, "data"))(batch[0])
    assert inside.sharding.spec[0] == "data"


def test_a_batch_that_does_not_divide_is_refused():
    batch = {"x": jnp.zeros((6, 2)), "y": jnp.zeros(8), "n": jnp.zeros(())}
    with pytest.raises(ValueError, match="does not divide into equal parts") as caught:
        shard_batch(batch, EXPLICIT, "data")
    assert "batch['x'], f32[6,2], for 4 parts\n" in str(caught.value)
    assert "batch['n'], f32[], for 4 parts\n" in str(caught.value)
    assert "batch['y']" not in str(caught.value)
    for axis in ("rows", ("data", "rows"), ()):
        with pytest.raises(
            ValueError, match=r"(?s)the mesh does not have this axis.*shard_batch.*'data'"
        ):
            shard_batch(batch, EXPLICIT, axis)


@pytest.mark.parametrize("mesh", [EXPLICIT, AUTO, make_mesh(data=1, devices=jax.devices()[:1])])
@pytest.mark.parametrize("name", ["shard_batch", "place", "filter_shard", "on a device"])
def test_a_numpy_array_may_be_changed_afterwards(mesh, name):
    # At an address that is a multiple of 64, JAX shares the memory of an array on the CPU.
    raw = np.zeros(64 * 64 * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    buffer = raw[start : start + 64 * 64 * 4].view(np.float32).reshape(64, 64)
    ways = {
        "shard_batch": lambda: shard_batch(buffer, mesh, "data"),
        "place": lambda: place({"x": buffer}, mesh, {"x": P("data")})["x"],
        "filter_shard": lambda: vernal.filter_shard(buffer, NamedSharding(mesh, P())),
        "on a device": lambda: vernal.filter_shard(buffer, jax.devices()[0]),
    }
    placed = ways[name]()
    buffer[:] = 7
    np.testing.assert_array_equal(placed, 0)
