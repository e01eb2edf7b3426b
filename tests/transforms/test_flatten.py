"""Arguments are taken apart once, and results are put together when they are looked at."""

import collections
import copy
import dataclasses
import gc
import pickle
import threading
import weakref
from typing import NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import vernal
from vernal import Module, filter_jit
from vernal.modules import Flat


class Layer(Module):
    weight: jax.Array
    activation: object = jax.nn.relu

    def __call__(self, x):
        return self.activation(self.weight * x)


class Net(Module):
    layers: list[Layer]
    scale: jax.Array
    name: str

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale

    @property
    def total(self):
        return sum(layer.weight for layer in self.layers)

    def twice(self, x):
        return 2 * self(x)


def net(scale=2.0):
    return Net(
        [Layer(jnp.asarray(1.0)), Layer(jnp.asarray(3.0))],
        jnp.asarray(scale, jnp.float32),
        "net",
    )


@filter_jit
def same(model):
    return model


def flat_of(module):
    """What a module remembers, without looking at it as its users do."""
    return module._vernal_flat


def is_lazy(module):
    flat = flat_of(module)
    return type(flat) is Flat and flat.unflatten is not None


X = np.float32(1.5)
WAYS = {
    "attribute": lambda m: float(m.scale) == 2.0,
    "attribute of an attribute": lambda m: float(m.layers[1].weight) == 3.0,
    "property": lambda m: float(m.total) == 4.0,
    "call": lambda m: float(m(X)) == 9.0,
    "method": lambda m: float(m.twice(X)) == 18.0,
    "getattr": lambda m: float(getattr(m, "scale", 0.0)) == 2.0,
    "hasattr": lambda m: hasattr(m, "scale") and not hasattr(m, "nothing"),
    "vars": lambda m: {"layers", "scale", "name"} <= set(vars(m)),
    "dir": lambda m: {"layers", "scale", "name"} <= set(dir(m)),
    "dataclasses.replace": lambda m: float(dataclasses.replace(m, name="other").scale) == 2.0,
    "dataclasses.asdict": lambda m: (
        float({f.name: getattr(m, f.name) for f in dataclasses.fields(m)}["scale"]) == 2.0
    ),
    "leaves": lambda m: [float(x) for x in jax.tree.leaves(m)] == [1.0, 3.0, 2.0],
    "paths": lambda m: (
        [jtu.keystr(path, simple=True, separator=".") for path, _ in jtu.tree_leaves_with_path(m)]
        == ["layers.0.weight", "layers.1.weight", "scale"]
    ),
    "tree.map": lambda m: float(jax.tree.map(lambda x: x + 1, m).scale) == 3.0,
    "equality": lambda m: m == net() and net() == m,
    "hash": lambda m: hash(m) == hash(m) and m in {m},
    "repr": lambda m: repr(m) == repr(net()),
    "copy": lambda m: copy.copy(m) == net(),
    "deepcopy": lambda m: copy.deepcopy(m) == net(),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)) == net(),
    "cloudpickle": lambda m: cloudpickle.loads(cloudpickle.dumps(m)) == net(),
    "tree_at": lambda m: float(vernal.tree_at(lambda n: n.scale, m, jnp.float32(5.0)).scale) == 5.0,
    "partition": lambda m: vernal.combine(*vernal.partition(m, vernal.is_array)) == net(),
    "plain jit": lambda m: float(jax.jit(lambda n: n.scale)(m)) == 2.0,
    "vmap": lambda m: jax.vmap(m)(jnp.ones(2)).shape == (2,),
    "grad": lambda m: float(vernal.filter_grad(lambda n: n(X))(m).scale) == 4.5,
    "field of another module": lambda m: float(Net([], m, "outer").scale.scale) == 2.0,
    "match": lambda m: _matched(m) == 2.0,
    "setattr is refused": lambda m: _refused(m),
}


def _matched(m):
    match m:
        case Net(scale=scale):
            return float(scale)


def _refused(m):
    with pytest.raises(dataclasses.FrozenInstanceError):
        m.scale = jnp.asarray(0.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        del m.scale
    return float(m.scale) == 2.0


@pytest.mark.parametrize("look", WAYS.values(), ids=WAYS)
def test_a_result_is_whole_for_whoever_looks_at_it(look):
    out = same(net())
    assert is_lazy(out)
    assert look(out)
    assert look(out), "at the second look as well"


def test_a_result_that_nobody_looks_at_goes_on_as_it_is():
    out = same(net())
    for _ in range(3):
        arrays = flat_of(out).arrays
        out = same(out)
        assert is_lazy(out) and flat_of(out).arrays is not arrays
    assert out == net()
    assert same.trace_count == 1


def test_what_is_not_an_array_is_there_without_a_look():
    out = same(net())
    assert out.name == "net" and type(out) is Net and isinstance(out, Module)
    assert is_lazy(out)


def test_results_in_tuples_and_named_tuples_wait_too_and_other_trees_are_made_at_once():
    class Pair(NamedTuple):
        model: Net
        loss: jax.Array

    @filter_jit
    def step(pair, extra):
        return (
            Pair(pair.model, pair.loss + 1),
            (pair.model, "text", 3),
            {"model": pair.model},
            extra,
        )

    pair, triple, table, extra = step(Pair(net(), jnp.float32(0.0)), None)
    assert type(pair) is Pair and is_lazy(pair.model) and float(pair.loss) == 1.0
    assert type(triple) is tuple and is_lazy(triple[0]) and triple[1:] == ("text", 3)
    assert not is_lazy(table["model"]) and table["model"] == net()
    assert extra is None
    again = step(pair, None)[0]
    assert step.trace_count == 1 and again.model == net()


def test_a_class_whose_looks_cannot_be_seen_is_made_at_once():
    class Default(Module):
        x: jax.Array | None = None

    class Own(Module):
        x: jax.Array

        def __getattr__(self, name):
            return f"no {name}"

    class Strange(Module):
        x: jax.Array

        def __getattribute__(self, name):
            return object.__getattribute__(self, name)

    for cls in (Default, Strange):
        out = same(cls(jnp.asarray(1.0)))
        assert not is_lazy(out) and float(out.x) == 1.0
    out = same(Own(jnp.asarray(1.0)))
    assert is_lazy(out) and out.y == "no y" and float(out.x) == 1.0 and not is_lazy(out)


def test_a_subclass_may_still_define_getattr():
    class Base(Module):
        x: jax.Array

    assert is_lazy(same(Base(jnp.asarray(1.0))))

    class Child(Base):
        def __getattr__(self, name):
            return f"no {name}"

    out = same(Child(jnp.asarray(1.0)))
    assert is_lazy(out) and float(out.x) == 1.0 and out.y == "no y"


def test_a_missing_attribute_is_missed_in_the_words_of_python():
    out = same(net())
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'missing'"):
        out.missing  # noqa: B018 (the access is the test)
    assert is_lazy(out)


def test_a_property_that_raises_is_evaluated_once():
    class Raises(Module):
        x: jax.Array
        seen = []

        @property
        def broken(self):
            self.seen.append(1)
            raise AttributeError("something inside is missing")

    same(Raises(jnp.asarray(1.0))).x  # noqa: B018 (the class has lazy instances from now on)
    with pytest.raises(AttributeError, match="something inside is missing"):
        same(Raises(jnp.asarray(1.0))).broken  # noqa: B018
    assert Raises.seen == [1]


def test_static_values_that_cannot_be_hashed_are_returned():
    class Odd(Module, layout="fields"):
        x: jax.Array
        thing: object = vernal.field(static=True)

    out = filter_jit(lambda x: Odd(x, [1, 2]))(jnp.asarray(1.0))
    assert out.thing == [1, 2] and float(out.x) == 1.0


def test_arrays_in_a_list_may_be_exchanged_between_two_calls():
    class Mutable(Module):
        arrays: list
        table: dict
        deep: tuple

    model = Mutable([jnp.asarray(1.0)], {"a": jnp.asarray(10.0)}, ([jnp.asarray(100.0)],))

    @filter_jit
    def total(model):
        return sum(jax.tree.leaves(model))

    for _ in range(3):
        assert float(total(model)) == 111.0
    assert type(flat_of(model)) is Flat
    model.arrays[0] = jnp.asarray(2.0)
    assert float(total(model)) == 112.0
    model.table["a"] = jnp.asarray(20.0)
    assert float(total(model)) == 122.0
    model.deep[0][0] = jnp.asarray(200.0)
    assert float(total(model)) == 222.0
    assert total.trace_count == 1
    model.arrays.append(jnp.asarray(1000.0))
    assert float(total(model)) == 1222.0
    model.table["b"] = model.table.pop("a")
    assert float(total(model)) == 1222.0
    assert total.trace_count == 3
    moved = model.deep[0].pop()
    model.arrays.append(moved)
    assert float(total(model)) == 1222.0
    del model.arrays[:]
    assert float(total(model)) == 20.0


def test_a_list_of_a_result_may_be_changed_after_a_look():
    out = same(net())
    out.layers[0] = Layer(jnp.asarray(7.0))
    assert float(same(out).layers[0].weight) == 7.0
    out.layers.pop()
    assert len(same(out).layers) == 1


def test_trees_whose_nodes_nobody_knows_are_flattened_at_every_call():
    class Odd(Module):
        queue: collections.OrderedDict

    model = Odd(collections.OrderedDict(a=jnp.asarray(1.0)))
    total = filter_jit(lambda m: sum(jax.tree.leaves(m)))
    for _ in range(3):
        assert float(total(model)) == 1.0
    model.queue["a"] = jnp.asarray(2.0)
    assert float(total(model)) == 2.0
    assert type(flat_of(model)) is not Flat


def test_a_module_is_remembered_at_its_second_call():
    model = net()
    assert flat_of(model) is None
    same(model)
    assert type(flat_of(model)) is not Flat
    same(model)
    assert type(flat_of(model)) is Flat
    assert same(model) == net()


def test_what_is_remembered_is_not_copied_nor_seen():
    model = net()
    for _ in range(3):
        same(model)
    other = jax.tree.map(lambda x: x + 1, model)
    assert flat_of(other) is None
    assert flat_of(vernal.tree_at(lambda m: m.scale, model, jnp.float32(9.0))) is None
    assert float(same(vernal.tree_at(lambda m: m.scale, model, jnp.float32(9.0))).scale) == 9.0
    assert "form" not in repr(model)
    assert flat_of(pickle.loads(pickle.dumps(model))) is None


def test_tuples_are_taken_apart_item_by_item():
    class Point(NamedTuple):
        x: object
        y: object

    f = filter_jit(lambda t: jax.tree.map(lambda a: a, t))
    trees = [
        (1, jnp.asarray(1.0)),
        (1.0, jnp.asarray(1.0)),
        (jnp.asarray(1.0), 1),
        Point(1, jnp.asarray(1.0)),
        (1, (jnp.asarray(1.0),)),
        (1, [jnp.asarray(1.0)]),
        (),
        ((), jnp.asarray(1.0)),
        (None, jnp.asarray(1.0)),
        (net(), jnp.asarray(1.0)),
    ]
    for count, tree in enumerate(trees, start=1):
        for _ in range(2):
            out = f(tree)
            assert jtu.tree_structure(out) == jtu.tree_structure(tree)
            assert out == tree
        assert f.trace_count == count


def test_a_tuple_with_a_flattening_of_its_own_is_left_to_it():
    class Reversed(tuple):
        pass

    jtu.register_pytree_node(
        Reversed, lambda r: (tuple(reversed(r)), None), lambda _, c: Reversed(reversed(tuple(c)))
    )
    out = filter_jit(lambda r: r)(Reversed((jnp.asarray(1.0), jnp.asarray(2.0))))
    assert type(out) is Reversed and [float(x) for x in out] == [1.0, 2.0]


def test_a_tuple_that_jax_does_not_know_is_a_static_value():
    class Label(tuple):
        pass

    f = filter_jit(lambda label, x: (label, x))
    out = f(Label((1, 2)), jnp.asarray(1.0))
    assert type(out[0]) is Label and out[0] == (1, 2)


def test_numpy_and_jax_arrays_in_a_module_share_a_program():
    class Pair(Module):
        a: object
        b: object

    f = filter_jit(lambda p: p.a + p.b)
    a, b = np.float32([1.0]), jnp.asarray([2.0])
    for pair in (Pair(a, b), Pair(b, a), Pair(a, a), Pair(b, b)):
        assert float(f(pair)[0]) == float(pair.a[0] + pair.b[0])
    assert f.trace_count == 1


def test_keyword_only_arguments_are_taken_apart_by_name():
    @filter_jit
    def f(x, *, model, flag, **more):
        return x * model.scale if flag else more["y"]

    x = jnp.asarray(1.0)
    assert float(f(x, model=net(), flag=True)) == 2.0
    assert float(f(x, flag=True, model=net(3.0))) == 3.0
    assert f.trace_count == 1
    assert float(f(x, flag=False, y=jnp.asarray(8.0), model=net())) == 8.0
    assert f.trace_count == 2


def test_two_threads_that_look_first_see_the_same_objects():
    for _ in range(50):
        out = same(net())
        barrier = threading.Barrier(4, timeout=60)
        seen = []

        def look(out=out, barrier=barrier, seen=seen):
            barrier.wait()
            seen.append(out.layers)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 4 and all(layers is seen[0] for layers in seen)


def test_no_form_outlives_its_module():
    model = net()
    for _ in range(3):
        out = same(model)
    watch = [weakref.ref(flat_of(module).arrays[0]) for module in (model, out)]
    del model, out
    gc.collect()
    assert [ref() for ref in watch] == [None, None]


def test_inside_other_transformations_results_are_whole_too():
    def loss(model, x):
        return same(model)(x)

    x = jnp.asarray(1.5)
    gradient = jax.grad(loss)(net(), x)
    assert float(gradient.scale) == 4.5
    assert float(jax.jit(loss)(net(), x)) == 9.0
    assert jax.vmap(loss, in_axes=(None, 0))(net(), jnp.ones(3)).shape == (3,)
    with jax.checking_leaks():
        assert float(jax.jit(lambda m, x: loss(m, x))(net(), x)) == 9.0


def test_donated_results_are_used_once():
    @filter_jit(donate="all")
    def step(model):
        return jax.tree.map(lambda x: x + 1, model)

    first = step(net())
    second = step(first)
    assert is_lazy(second) and float(second.scale) == 4.0
    assert first.scale.is_deleted()
