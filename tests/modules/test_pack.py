"""`pack`: the same numbers to the bit, whatever is in the tree, wherever it is packed and unpacked."""

import copy
import dataclasses
import gc
import inspect
import io
import os
import pickle
import tempfile
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vernal
from vernal import nn


def bits(tree):
    """What `pack` must not change: structure, and of each leaf type, dtype, weak type and bytes."""
    leaves, structure = jax.tree.flatten(tree)
    told = []
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            told.append(np.asarray(jax.random.key_data(leaf)).tobytes())
        elif isinstance(leaf, jax.Array):
            shape = (leaf.shape, leaf.dtype, leaf.weak_type, leaf.committed)
            told.append((*shape, np.asarray(leaf).tobytes()))
        else:
            told.append((type(leaf), np.asarray(leaf).tobytes()))
    return structure, told


def everything():
    return {
        "f32": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45]),
        "scalar": jnp.asarray(2.5, jnp.float32),
        "again": jnp.arange(6.0).reshape(3, 2),
        "empty": jnp.zeros((0, 3)),
        "bf16": jnp.arange(3, dtype=jnp.bfloat16),
        "f8": jnp.arange(3, dtype=jnp.float8_e4m3fn),
        "i8": jnp.arange(4, dtype=jnp.int8),
        "i4": jnp.arange(4, dtype=jnp.int4),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j]),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(3), 4),
        "weak": jnp.asarray(3.0),
        "large": jnp.arange(5000.0),
        "numbers": (1, 2.5, True, None),
    }


def model():
    keys = jax.random.split(jax.random.key(0), 3)
    net = nn.Sequential(
        [
            nn.Linear(3, 8, key=keys[0]),
            nn.BatchNorm(8),
            jax.nn.relu,
            nn.Dropout(0.1),
            nn.WeightNorm(nn.Linear(8, 8, key=keys[1])),
            nn.Linear(8, 2, key=keys[2]),
        ]
    )
    return vernal.freeze(net, "layers[0].bias")


def test_a_tree_of_everything_is_the_same_to_the_bit():
    tree = everything()
    packed = vernal.pack(tree)
    assert {x.ndim for x in packed.buffers} == {1}
    assert len({x.dtype for x in packed.buffers}) == len(packed.buffers) == 7
    assert bits(packed.unpack()) == bits(tree)


def test_what_stays_as_it_is_is_the_same_object():
    tree = everything()
    new = vernal.pack(tree).unpack()
    for name in ("key", "keys", "weak", "large"):
        assert new[name] is tree[name]


@pytest.mark.parametrize("inside", ["pack", "unpack", "both"])
def test_inside_jit_it_is_the_same_to_the_bit(inside):
    tree = {name: leaf for name, leaf in everything().items() if name != "numbers"}
    if inside == "pack":
        new = jax.jit(vernal.pack)(tree).unpack()
    elif inside == "unpack":
        new = jax.jit(vernal.Packed.unpack)(vernal.pack(tree))
    else:
        new = jax.jit(lambda tree: vernal.pack(tree).unpack())(tree)
    assert bits(new) == bits(tree)


def test_with_64_bits():
    with jax.enable_x64(True):
        tree = {"a": jnp.arange(3, dtype=jnp.float64) / 3, "b": jnp.arange(2), "c": jnp.float32(1)}
        assert bits(vernal.pack(tree).unpack()) == bits(tree)


def training():
    optimiser = vernal.Optimizer(optax.adamw, learning_rate=1e-2)
    net, key = model(), jax.random.key(1)
    x = jax.random.normal(jax.random.key(2), (16, 3))

    def loss(net, key):
        y, net = nn.apply(net, x, key=key)
        return jnp.mean((y - x[:, :2]) ** 2), net

    def step(net, state, key):
        key, now = jax.random.split(key)
        (value, net), slopes = vernal.filter_value_and_grad(loss, has_aux=True)(net, now)
        net, state = optimiser.update(net, slopes, state)
        return value, (net, state, key)

    return step, (net, optimiser.init(net), key)


def test_a_thousand_steps_with_frozen_parts_and_statistics_are_equal_to_the_bit():
    step, start = training()
    plain = vernal.filter_jit(step)

    @vernal.filter_jit(donate="all")
    def short(packed):
        value, new = step(*packed.unpack())
        return value, vernal.pack(new)

    now, packed = start, vernal.pack(start)
    for i in range(1000):
        value, now = plain(*now)
        packed_value, packed = short(packed)
        assert packed_value == value
        if i % 300 == 0:
            looked = packed.unpack()
            assert bits(looked) == bits(now)
            assert looked[0].layers[1].eps == start[0].layers[1].eps
    assert bits(packed.unpack()) == bits(now)
    assert short.trace_count == 1


def test_packing_outside_and_inside_is_one_layout():
    tree = model()
    eager, traced = vernal.pack(tree), jax.jit(vernal.pack)(tree)
    assert eager.layout == traced.layout
    assert hash(eager.layout) == hash(traced.layout)
    assert hash(eager.layout) == hash(vernal.pack(tree, max_size=500).layout)
    assert vernal.pack(tree, max_size=500).layout == eager.layout
    assert vernal.pack(tree, max_size=1).layout != eager.layout
    assert eager.layout != "layout"


def test_layouts_are_dropped():
    packed = vernal.pack({"a unique name": jnp.ones(7)})
    hash(packed.layout)
    gone = [weakref.ref(packed.layout), weakref.ref(packed.layout._token)]
    del packed
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@jax.tree_util.register_pytree_node_class
class Node:
    def __init__(self, x, fixed):
        self.x, self.fixed = x, fixed

    def tree_flatten(self):
        return (self.x,), self.fixed

    @classmethod
    def tree_unflatten(cls, fixed, children):
        return cls(*children, fixed)


class Scale:
    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Scale) and self.scale == other.scale

    def __hash__(self):
        return hash(self.scale)


class Scaled(vernal.Module):
    w: jax.Array
    scale: Any = vernal.field(static=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 1.0), (1.0, True), (0.0, -0.0), ((1, 2), (1.0, 2)), (np.dtype("f4"), jnp.float32)],
)
def test_a_tree_keeps_its_own_structure_beside_an_equal_one(first, second):
    alive = [vernal.pack(Node(jnp.arange(3), value)) for value in (first, second)]
    assert [hash(packed.layout) for packed in alive]
    for packed, value in zip(alive, (first, second), strict=True):
        assert repr(packed.unpack().fixed) == repr(value)
    keys = [vernal.pack({key: jnp.arange(3)}) for key in (1, True)]
    assert keys[0].layout == keys[1].layout
    assert [repr(list(packed.unpack())) for packed in keys] == ["[1]", "[True]"]


def test_a_tree_keeps_its_own_objects_beside_equal_ones():
    scales = Scale(1.0), Scale(1.0)
    first, second = (vernal.pack(Scaled(jnp.arange(3), scale)) for scale in scales)
    assert first.layout == second.layout
    scales[0].scale = 9.0
    assert second.unpack().scale is scales[1]


def test_a_new_tree_is_not_answered_for_by_one_that_has_changed():
    f = vernal.filter_jit(lambda packed: packed.unpack().w * packed.unpack().scale.scale)
    scale = Scale(1.0)
    f(vernal.pack(Scaled(jnp.arange(3.0), scale)))
    scale.scale = 3.0
    assert f(vernal.pack(Scaled(jnp.arange(3.0), Scale(3.0)))).tolist() == [0.0, 3.0, 6.0]


def test_structure_that_cannot_be_compared_can_be_packed():
    trees = [Node(jnp.arange(3.0), np.ones(3)) for _ in range(3)]
    for packed in [vernal.pack(tree) for tree in trees]:
        assert packed.unpack().fixed.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "leaf",
    [
        np.ma.masked_array(np.float32([1, 2, 3]), mask=[0, 1, 0]),
        np.arange(3, dtype=">f4"),
        np.longdouble(1),
    ],
    ids=["masked", "byte order", "long double"],
)
def test_numpy_s_arrays_that_jax_does_not_take_stay(leaf):
    packed = vernal.pack([leaf, jnp.ones(2)])
    assert packed.others[0] is leaf
    assert packed.unpack()[0] is leaf


def test_what_was_unpacked_from_numpy_s_buffers_is_its_own():
    packed = jax.tree.map(np.array, vernal.pack([jnp.arange(3.0)]))
    packed.unpack()[0][0] = 5.0
    assert packed.unpack()[0].tolist() == [0.0, 1.0, 2.0]


def test_packed_trees_are_equal_by_identity_and_print_as_trees():
    first, second = (vernal.pack([jnp.arange(3000.0)]) for _ in range(2))
    assert first == first
    assert first != second
    assert len({first, second}) == 2
    assert "f32[3000]" in repr(first)
    assert "999" not in repr(first)


@pytest.mark.parametrize("changes", [{"buffers": ()}, {"others": (1.0,)}])
def test_parts_that_do_not_fit_are_refused(changes):
    packed = dataclasses.replace(vernal.pack([jnp.arange(3.0)]), **changes)
    with pytest.raises(ValueError, match="the buffers of a packed tree have changed"):
        packed.unpack()


def test_another_memory_is_refused():
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="unpinned_host")
    if device.default_memory().kind == "unpinned_host":
        host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    with pytest.raises(ValueError, match="(?s)cannot be packed.*in one memory.*pinned_host"):
        vernal.pack([jnp.ones(2), jax.device_put(jnp.ones(2), host)])


def test_gradients_reach_the_arrays():
    tree = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2)), "large": jnp.ones(5000)}

    def f(tree):
        return jnp.sum(tree["a"] ** 2) + jnp.sum(tree["b"]) * tree["large"][3]

    through = jax.grad(lambda packed: f(packed.unpack()))(vernal.pack(tree)).unpack()
    assert vernal.tree_equal(through, jax.grad(f)(tree))
    packing = jax.grad(lambda tree: f(vernal.pack(tree).unpack()))(tree)
    assert vernal.tree_equal(packing, jax.grad(f)(tree))


def test_vmap_sees_one_tree_at_a_time():
    trees = {"a": jnp.arange(12.0).reshape(4, 3), "b": jnp.arange(4.0)}
    packed = jax.vmap(vernal.pack)(trees)
    assert packed.buffers[0].shape == (4, 4)
    assert vernal.tree_equal(jax.vmap(vernal.Packed.unpack)(packed), trees)
    with pytest.raises(
        ValueError, match=r"(?s)buffers of a packed tree have changed.*\(4,\).*vmap"
    ):
        packed.unpack()


def test_a_scan_carries_it():
    packed = vernal.pack(everything() | {"numbers": None})

    def step(packed, _):
        tree = packed.unpack()
        return vernal.pack(tree | {"again": tree["again"] * 2}), None

    new, _ = jax.lax.scan(step, packed, None, length=3)
    assert vernal.tree_equal(new.unpack()["again"], everything()["again"] * 8)
    assert vernal.tree_equal(new.unpack()["bf16"], everything()["bf16"])


def test_donating_the_buffers_leaves_what_was_unpacked_alone():
    packed = vernal.pack({"a": jnp.arange(64.0)})
    looked = packed.unpack()
    jax.jit(lambda packed: jax.tree.map(lambda x: x + 1, packed), donate_argnums=0)(packed)
    assert looked["a"].tolist() == list(range(64))


def test_arrays_of_a_device_stay_there():
    device = jax.devices()[3]
    tree = {"a": jax.device_put(jnp.ones(3), device), "b": jnp.zeros(2)}
    packed = vernal.pack(tree)
    assert packed.buffers[0].devices() == {device}
    new = packed.unpack()
    assert new["a"].devices() == new["b"].devices() == {device}
    with pytest.raises(ValueError, match=r"(?s)on different devices cannot be packed.*device_put"):
        vernal.pack(tree | {"b": jax.device_put(tree["b"], jax.devices()[1])})
    # Also where they would not be joined.
    other = jax.device_put(jnp.ones(2, int), jax.devices()[1])
    with pytest.raises(ValueError, match=r"(?s)on different devices cannot be packed.*device_put"):
        vernal.pack(tree | {"b": other})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_of_one_device_is_one_device(kind):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(kind,))
    tree = {
        "a": jax.device_put(jnp.ones(2), NamedSharding(mesh, PartitionSpec("x"))),
        "b": jax.device_put(jnp.ones((2, 3)), NamedSharding(mesh, PartitionSpec(None, "x"))),
    }

    @jax.jit
    def step(packed):
        return vernal.pack(jax.tree.map(lambda x: x + 1, packed.unpack()))

    packed = vernal.pack(tree)
    for _ in range(3):
        packed = step(packed)
    new = packed.unpack()
    assert new["a"].tolist() == [4, 4] and new["b"].tolist() == [[4, 4, 4], [4, 4, 4]]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_on_several_devices_are_refused(kind):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(kind,))
    array = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("batch")))
    with pytest.raises(ValueError, match=r"(?s)more than one device cannot be packed.*f32\[8"):
        vernal.pack({"a": array})
    if kind is AxisType.Explicit:
        with pytest.raises(ValueError, match="more than one device cannot be packed"):
            jax.jit(vernal.pack)({"a": array})
    assert vernal.pack({"a": array}, max_size=4).unpack()["a"] is array


def test_a_check_inside_still_raises():
    @vernal.filter_jit
    def step(packed):
        tree = packed.unpack()
        tree["a"] = vernal.error_if(tree["a"], tree["a"][0] > 2, "too large")
        return vernal.pack({"a": tree["a"] + 1})

    packed = step(vernal.pack({"a": jnp.ones(2)}))
    packed = step(packed)
    with pytest.raises(vernal.runtime.RuntimeCheckError, match="too large"):
        jax.block_until_ready(step(packed))


def test_threads_get_their_own_numbers():
    @vernal.filter_jit
    def step(packed):
        return vernal.pack(jax.tree.map(lambda x: x * 2, packed.unpack()))

    found = {}

    def work(i):
        packed = vernal.pack({"a": jnp.full(3, float(i)), "b": jnp.full((2, 2), float(i))})
        for _ in range(20):
            packed = step(packed)
        found[i] = packed.unpack()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, tree in found.items():
        assert all((leaf == i * 2.0**20).all() for leaf in tree.values())


def test_shared_arrays_stay_shared():
    layer = nn.Linear(2, 2, key=jax.random.key(0))
    shared = nn.Shared(
        (layer, layer), where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight
    )
    new = vernal.pack(shared).unpack()
    assert vernal.tree_equal(new, shared)
    assert len(jax.tree.leaves(new)) == len(jax.tree.leaves(shared))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_pickles(way):
    packed = vernal.pack({"a": jnp.arange(3.0), "b": jnp.arange(9)}, max_size=5)
    new = way(packed)
    assert new.layout == packed.layout
    assert bits(new.unpack()) == bits(packed.unpack())


class Held(vernal.Module):
    packed: vernal.Packed


SEALED = {
    "filter_grad": lambda p: vernal.filter_grad(lambda p: p.unpack().layers[0].weight.sum())(p),
    "Optimizer": lambda p: vernal.Optimizer(optax.lamb, 0.1).init(p),
    "unfreeze": vernal.unfreeze,
    "trainable": vernal.trainable,
    "params": vernal.params,
    "inference_mode": nn.inference_mode,
    "keys": lambda p: nn.keys(p, jax.random.key(0)),
    "initialise": lambda p: nn.initialise(p, {"**": jax.nn.initializers.ones}, jax.random.key(0)),
    "tree_at": lambda p: vernal.tree_at("buffers.0", p, jnp.ones(2)),
    "save": lambda p: vernal.save("unused", p),
    "load": lambda p: vernal.load(saved(), p),
    "export": lambda p: vernal.saving.export(lambda p: p.unpack(), p),
    "export of a result": lambda p: vernal.saving.export(lambda: p),
    "serialise": lambda p: vernal.tree_serialise_leaves(io.BytesIO(), p),
    "deserialise": lambda p: vernal.tree_deserialise_leaves(io.BytesIO(), p),
}


def saved():
    path = os.path.join(tempfile.mkdtemp(), "tree")
    vernal.save(path, {"a": jnp.ones(2)})
    return path


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("tool", SEALED)
def test_what_looks_into_a_tree_wants_the_tree(tool, inside):
    packed = vernal.pack(model())
    with pytest.raises(TypeError, match=r"(?s)no layers, names or gradients.*packed.unpack\(\)"):
        SEALED[tool]([packed] if inside else packed)


def test_a_module_that_holds_it_has_no_gradient_either():
    held = Held(vernal.pack(model()))
    with pytest.raises(ValueError, match="only arrays in a module can be frozen|no layers, names"):
        vernal.freeze(vernal.pack(model()), "**")
    for module in (held, vernal.freeze(held, "packed.buffers.0")):
        for tool in (vernal.trainable, vernal.params, nn.inference_mode, vernal.unfreeze):
            with pytest.raises(TypeError, match="no layers, names or gradients"):
                tool(module)
        with pytest.raises(TypeError, match="no layers, names or gradients"):
            vernal.filter_grad(lambda held: held.packed.unpack().layers[0].weight.sum())(module)


def test_the_size_is_an_integer():
    for wrong in ("small", -1, True):
        with pytest.raises(ValueError, match=r"(?s)`max_size` is not a size.*at least 0"):
            inspect.unwrap(vernal.pack)({}, max_size=wrong)
    assert vernal.pack({}).unpack() == {}


def test_64_bits_are_not_cut():
    with jax.enable_x64(True):
        tree = [jnp.array([2**40 + 7]), jnp.array([1e300]), jnp.arange(3, dtype=jnp.int32)]
        packed = vernal.pack(tree)
        told = bits(tree)
    with pytest.raises(ValueError, match="(?s)cannot be unpacked without them.*i64"):
        packed.unpack()
    assert bits(vernal.pack(tree).unpack()) == told
    assert bits(vernal.filter_jit(lambda tree: vernal.pack(tree))(tree).unpack()) == told
    again = vernal.filter_jit(lambda packed: packed.unpack())(packed)
    assert bits(again) == told


def test_shapes_alone():
    tree = model()
    shapes = jax.eval_shape(lambda: vernal.pack(tree)).unpack()
    assert jax.tree.map(jnp.shape, tree) == jax.tree.map(lambda x: x.shape, shapes)


def test_arrays_of_numpy():
    tree = {"a": np.ones((2, 2), np.float32), "b": jnp.ones(2), "c": np.float64(2.5)}
    double = vernal.filter_jit(
        lambda packed: vernal.pack(jax.tree.map(lambda x: x * 2, packed.unpack()))
    )
    packed = vernal.pack(tree)
    for _ in range(3):
        packed = double(packed)
    assert double.trace_count == 1
    assert packed.unpack()["a"].tolist() == [[8.0, 8.0], [8.0, 8.0]]
    on_host = jax.device_get(packed).unpack()
    assert isinstance(on_host["a"], np.ndarray) and on_host["b"].tolist() == [8.0, 8.0]


def test_another_structure_is_named_by_the_log(capsys):
    same = vernal.filter_jit(lambda packed: packed)
    with vernal.debug.log_retraces():
        same(vernal.pack({"a": jnp.ones(4)}))
        same(vernal.pack({"b": jnp.ones(4)}))
    text = "".join(capsys.readouterr())
    assert "packed.layout" in text and "{'a': Shape" in text and "{'b': Shape" in text


def test_it_prints_what_is_inside():
    text = repr(vernal.pack({"a": jnp.ones((2, 3))}).layout)
    assert text == "Layout({'a': ShapeDtypeStruct(shape=(2, 3), dtype=float32)})"


@pytest.mark.parametrize("size", [16, 8192])
def test_what_numpy_writes_later_is_not_seen(size):
    memory = np.ones(size + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4  # where JAX could share it
    array = memory[start : start + size]
    packed = vernal.pack({"a": array})
    array[:] = 7
    assert (packed.unpack()["a"] == 1).all()
