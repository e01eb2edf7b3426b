"""`apply_updates` adds, keeps types, and says which update does not fit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vernal import Module, filter_grad
from vernal.nn import MLP
from vernal.optim import apply_updates


def test_it_agrees_with_the_peer(getkey):
    model = MLP(3, 2, 5, 3, key=getkey())
    updates = jax.tree.map(lambda p: jax.random.normal(getkey(), p.shape), model)
    ours = jax.tree.leaves(apply_updates(model, updates))
    theirs = eqx.apply_updates(jax.tree.leaves(model), jax.tree.leaves(updates))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_none_leaves_a_leaf_or_a_whole_part_as_it_is():
    model = {"a": [jnp.ones(2), jnp.arange(3)], "b": {"name": "text", "w": jnp.ones(())}, "c": None}
    new = apply_updates(model, {"a": [jnp.ones(2), None], "b": None, "c": None})
    np.testing.assert_array_equal(new["a"][0], 2 * np.ones(2))
    assert new["a"][1] is model["a"][1]
    assert new["b"]["w"] is model["b"]["w"] and new["b"]["name"] == "text"
    assert apply_updates(model, None)["a"][0] is model["a"][0]


def test_gradients_of_a_module_with_integers_and_functions_are_updates(getkey):
    class Model(Module):
        mlp: MLP
        count: jax.Array
        name: str = "m"

    model = Model(MLP(2, "scalar", 4, 1, key=getkey()), jnp.arange(3))
    grads = filter_grad(lambda m, x: m.mlp(x))(model, jnp.ones(2))
    new = apply_updates(model, grads)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    np.testing.assert_array_equal(new.count, model.count)
    want = model.mlp.layers[0].weight + grads.mlp.layers[0].weight
    np.testing.assert_array_equal(new.mlp.layers[0].weight, want)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("update", [np.float32(0.5), 0.5, jnp.float32(0.5), 1])
def test_the_dtype_of_the_model_is_kept(jit, update):
    apply = jax.jit(apply_updates) if jit else apply_updates
    new = apply({"w": jnp.ones(2, jnp.bfloat16)}, {"w": update})["w"]
    assert new.dtype == jnp.bfloat16
    np.testing.assert_array_equal(new.astype(jnp.float32), np.full(2, 1 + float(update), "float32"))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("update", [0.5, jnp.array(0.5), jnp.float32(0.5), jnp.bfloat16(0.5)])
def test_weak_types_are_kept(jit, shape, update):
    """Another type compiles the second step again. (`optax.apply_updates` loses it always, Equinox's where the update
    is strongly typed.)"""
    p = jnp.broadcast_to(jnp.array(1.0), shape)
    assert jax.typeof(p).weak_type and p.shape == shape
    new = (jax.jit(apply_updates) if jit else apply_updates)({"w": p}, {"w": update})["w"]
    assert jax.typeof(new) == jax.typeof(p)
    np.testing.assert_array_equal(new, np.full(shape, 1.5, "float32"))
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(new, optax.apply_updates(p, jnp.asarray(update)))
        np.testing.assert_array_equal(new, eqx.apply_updates(p, jnp.asarray(update)))
    kept = jax.typeof(apply_updates(p.astype(jnp.bfloat16), jnp.asarray(update)))
    assert kept == jax.typeof(p.astype(jnp.bfloat16))


def test_a_compiled_step_is_not_compiled_again():
    step = jax.jit(lambda p: apply_updates(p, jax.tree.map(jnp.ones_like, p)))
    for p in (jnp.array(1.0), jnp.ones(2, jnp.bfloat16), jnp.ones(2)):
        step.clear_cache()
        for _ in range(3):
            p = step(p)
        assert step._cache_size() == 1


def test_a_sum_is_made_in_the_wider_dtype():
    p = jnp.asarray([256.0], jnp.bfloat16)  # the next number of bfloat16 is 258
    new = apply_updates(p, jnp.asarray([1.9], jnp.float32))
    assert float(new[0]) == 258.0


def test_it_works_inside_transformations(getkey):
    w = jax.random.normal(getkey(), (3,))
    grad = jax.grad(lambda u: jnp.sum(apply_updates({"w": w}, {"w": u})["w"] ** 2))(w)
    np.testing.assert_allclose(grad, 4 * w, rtol=1e-6)
    batched = jax.vmap(apply_updates)(jnp.ones((4, 2)), jnp.ones((4, 2)))
    np.testing.assert_array_equal(batched, 2 * np.ones((4, 2)))
    text = str(jax.make_jaxpr(apply_updates)([w, w], [w, w]))
    assert "jit" not in text and text.count("add") == 2


def test_arrays_of_one_model_may_live_on_different_devices():
    first, second = jax.devices()[:2]
    model = [jax.device_put(jnp.ones(2), first), jax.device_put(jnp.ones(2), second)]
    new = apply_updates(model, model)
    assert [x.devices() for x in new] == [{first}, {second}]
    np.testing.assert_array_equal(new[1], 2 * np.ones(2))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("p", "u", "expected"),
    [
        (jnp.ones(3), jnp.ones(2), r"shape \(3,\)"),
        (jnp.ones(3), jnp.ones((3, 3)), r"shape \(3,\)"),
        (jnp.arange(3), jnp.ones(3), "int32 array can hold"),
        (jnp.ones(3), jnp.ones(3, complex), "float32 array can hold"),
        (jnp.ones(3, bool), jnp.ones(3, bool), "booleans have no updates"),
        (jax.random.key(0), jnp.ones(()), "random keys"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_with_its_path(jit, p, u, expected):
    apply = jax.jit(apply_updates) if jit else apply_updates
    model, updates = {"a": [jnp.ones(1), p]}, {"a": [jnp.ones(1), u]}
    with pytest.raises(TypeError, match="does not fit the value that it updates") as info:
        apply(model, updates)
    assert "updates['a'][1]" in str(info.value)
    with pytest.raises(TypeError, match=expected):
        apply(model, updates)


def test_a_leaf_that_is_no_array_cannot_be_updated():
    with pytest.raises(TypeError, match=r"an array of numbers(.|\n)*for 'text'"):
        apply_updates({"a": "text"}, {"a": jnp.ones(())})


@pytest.mark.parametrize("updates", [{"b": 1.0}, {"a": [1.0, 2.0, 3.0]}, {"a": 1.0}, {"a": [1.0]}])
def test_updates_of_another_structure_are_refused(updates):
    with pytest.raises(ValueError, match="the updates do not have the structure of the model"):
        apply_updates({"a": [jnp.ones(2), jnp.ones(2)]}, updates)
