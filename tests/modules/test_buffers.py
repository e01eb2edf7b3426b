"""Arrays in a field that is declared `trainable=False` are frozen, from construction on."""

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal import Module, NoGradient, field, freeze, trainable, tree_at, unfreeze
from vernal.modules import frozen_leaves
from vernal.nn import MLP, Linear
from vernal.trees import named_leaves


class Scaler(Module):
    weight: jax.Array
    mean: Any = field(trainable=False)
    extra: Any = field(trainable=False, default=None)

    def __call__(self, x):
        return self.weight * (x - self.mean)


class Model(Module):
    scaler: Scaler
    head: Linear


def make(key=0, extra=None):
    return Model(
        Scaler(jnp.ones(3), jnp.full(3, 0.5), extra), Linear(3, 1, key=jax.random.key(key))
    )


def frozen_names(model):
    """The names of the frozen arrays, in order."""
    names = named_leaves(model)
    return [name for name, is_frozen in zip(names, frozen_leaves(model), strict=True) if is_frozen]


def test_it_is_frozen_as_by_freeze():
    class Plain(Module):
        weight: jax.Array
        mean: Any
        extra: Any = None

    built, plain = make().scaler, Plain(jnp.ones(3), jnp.ones(3))
    assert frozen_names(built) == ["mean"]
    assert jax.tree.leaves(trainable(built)) == [True, False]
    # The hidden mark is the same, so that everything that reads it treats the two alike.
    marks = [getattr(m, "__frozen__", None) for m in (built, freeze(plain, "mean"))]
    assert marks == [("mean",), ("mean",)]
    assert not hasattr(plain, "__frozen__")


class Teacher(Module):
    layers: list = field(trainable=False)
    numbers: dict = field(trainable=False)
    scale: Any = field(trainable=False, converter=jnp.asarray)
    nothing: Any = field(trainable=False)

    def __init__(self, key=None):
        key = jax.random.key(0) if key is None else key
        self.layers = [MLP(2, 2, 2, 1, key=key), jnp.tanh, (jnp.ones(2), "name")]
        self.numbers = {"a.b": np.ones(1), "c": 3, "d": jax.random.key(0), "e": jnp.arange(2)}
        self.scale = 2.0
        self.nothing = None


def test_modules_and_containers_in_such_a_field_are_frozen_as_a_whole():
    model = Teacher()
    assert frozen_names(model) == list(named_leaves(model))
    assert len(jax.tree.leaves(model)) == 4 + 1 + 3 + 1
    assert model.layers[1] is jnp.tanh and model.numbers["c"] == 3
    # Each module remembers what is frozen in it.
    assert frozen_names(model.layers[0]) == list(named_leaves(model.layers[0]))


def test_what_holds_nothing_to_freeze_has_no_mark():
    assert not hasattr(Scaler(jnp.ones(1), 0.5), "__frozen__")
    shapes = Scaler(jnp.ones(1), jax.ShapeDtypeStruct((2,), jnp.float32))
    assert frozen_leaves(shapes) == [False, True]


def saved(model, path):
    vernal.save(path / "model.safetensors", model)
    return vernal.load(path / "model.safetensors", like=jax.eval_shape(make))


KEPT = {
    "dataclasses.replace": lambda m, _: Model(
        dataclasses.replace(m.scaler, mean=jnp.zeros(3)), m.head
    ),
    "tree_at an array": lambda m, _: tree_at(lambda m: m.scaler.mean, m, jnp.zeros(3)),
    "tree_at a module": lambda m, _: tree_at(
        lambda m: m.head, m, Linear(3, 1, key=jax.random.key(1))
    ),
    "tree_at the other field": lambda m, _: tree_at(lambda m: m.scaler.weight, m, jnp.zeros(3)),
    "pickle": lambda m, _: pickle.loads(pickle.dumps(m)),
    "deepcopy": lambda m, _: copy.deepcopy(m),
    "saving": saved,
    "vmapped construction": lambda m, _: jax.vmap(make)(jnp.arange(2)),
    "construction in jit": lambda m, _: jax.jit(make)(),
    "eval_shape": lambda m, _: jax.eval_shape(make),
    "partition": lambda m, _: vernal.combine(*vernal.partition(m, trainable(m))),
    "freezing more and less": lambda m, _: unfreeze(freeze(m, "**"), "{head,scaler}.**"),
    "unfreezing all": lambda m, _: unfreeze(m),
    "unfreezing a part": lambda m, _: unfreeze(m, lambda m: m.scaler),
}


@pytest.mark.parametrize("change", KEPT.values(), ids=KEPT)
def test_it_stays_frozen(change, tmp_path):
    changed = change(make(), tmp_path)
    assert frozen_names(changed) == ["scaler.mean"]
    assert jax.tree.structure(changed) == jax.tree.structure(make())


def test_what_surgery_puts_in_such_a_field_is_frozen_too():
    linear = Linear(1, 1, key=jax.random.key(0))
    model = tree_at(lambda m: m.scaler.extra, make(), linear, is_leaf=lambda x: x is None)
    assert frozen_names(model) == ["scaler.mean", "scaler.extra.weight", "scaler.extra.bias"]
    assert jax.tree.structure(model) == jax.tree.structure(make(extra=linear))
    deeper = tree_at(lambda m: m.scaler.extra, make(extra=[linear, jnp.ones(1)]), [jnp.ones(2)])
    assert frozen_names(deeper) == ["scaler.mean", "scaler.extra.0"]
    mlp = MLP(1, 1, 1, 1, key=jax.random.key(1))
    inside = tree_at(lambda m: m.scaler.extra[0], make(extra=[mlp]), linear)
    assert frozen_names(inside.scaler.extra) == ["0.weight", "0.bias"]


def test_surgery_on_a_mask_keeps_its_structure():
    mask = tree_at(lambda m: m.scaler.mean, trainable(make()), True)
    assert mask.scaler.mean is True
    assert jax.tree.structure(mask) == jax.tree.structure(make())


def test_unfreezing_nothing_but_buffers_is_refused():
    for where in ("scaler.mean", ["head", "**.mean"], lambda m: m.scaler.mean):
        with pytest.raises(
            ValueError, match="(?s)only buffers match, which are never trained.*mean"
        ):
            unfreeze(make(), where)
    with pytest.raises(ValueError, match="only buffers match, which are never trained"):
        unfreeze(Teacher())


def test_a_module_that_is_taken_out_of_such_a_field_can_be_unfrozen():
    teacher = Teacher().layers[0]
    assert frozen_names(unfreeze(teacher)) == []
    with pytest.raises(ValueError, match="only buffers match, which are never trained"):
        unfreeze(Teacher(), "layers.0")


def test_a_subclass_and_the_old_layout_keep_buffers():
    class Sub(Scaler):
        more: Any = field(trainable=False, default=None)

    class Old(Module, layout="fields"):
        mean: Any = field(trainable=False)
        name: Any

    assert frozen_names(Sub(jnp.ones(1), jnp.ones(1), more=jnp.ones(1))) == ["mean", "more"]
    assert frozen_leaves(Old(jnp.ones(2), "text")) == [True, False]


def test_a_parent_that_is_still_being_built_is_refused_as_a_cycle_as_ever():
    class Child(Module):
        parent: Any = field(trainable=False)

    class Parent(Module):
        child: Any

        def __init__(self):
            self.child = Child(self)

    with pytest.raises(ValueError, match="(?s)child.*parent"):
        Parent()


def test_derivatives_and_optimisers_with_weight_decay_leave_it_alone():
    model, x = make(), jnp.arange(3.0)
    optimizer = vernal.optim.Optimizer(optax.adamw, 0.1, weight_decay=0.5)
    state = optimizer.init(model)

    @jax.jit
    def step(model, state):
        grads = vernal.filter_grad(lambda m: m.head(m.scaler(x))[0])(model)
        assert grads.scaler.mean == NoGradient() and grads.scaler.weight.shape == (3,)
        return optimizer.update(model, grads, state)

    trained, state = step(model, state)
    np.testing.assert_array_equal(trained.scaler.mean, model.scaler.mean)
    assert jnp.all(trained.scaler.weight != model.scaler.weight)
    assert jax.tree.structure(trained) == jax.tree.structure(model)


def test_a_static_field_cannot_be_a_buffer_and_metadata_may_not_say_it_twice():
    with pytest.raises(TypeError, match="a static field cannot be declared trainable=False"):
        field(static=True, trainable=False)
    with pytest.raises(
        TypeError, match="`trainable` was given to `field` and also in its metadata"
    ):
        field(trainable=False, metadata={"trainable": False})
    assert dict(field(trainable=False).metadata) == {"trainable": False}
    assert dict(field(trainable=True).metadata) == {}


class Known(Module):
    x: Any = field(trainable=False)
    name: str = "a"


class Fresh(Module):
    x: Any = field(trainable=False)
    name: str = "a"


def test_a_pickle_may_bring_the_first_instance_of_its_class():
    # What is known of a class used to be gathered at its first construction only.
    model = pickle.loads(pickle.dumps(Known(jnp.ones(2))).replace(b"Known", b"Fresh"))
    assert frozen_names(unfreeze([model, make()], "1")) == ["0.x", "1.scaler.mean"]
    changed = tree_at(lambda m: m.name, model, "b")
    assert (type(changed), changed.name, frozen_names(changed)) == (Fresh, "b", ["x"])
