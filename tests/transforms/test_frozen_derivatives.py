"""What is frozen is not differentiated, and nothing is computed for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import (
    NoGradient,
    filter_grad,
    filter_hessian,
    filter_jacfwd,
    filter_jacrev,
    filter_jit,
    filter_value_and_grad,
    filter_vjp,
    freeze,
    params,
    trainable,
    unfreeze,
)
from vernal.nn import MLP, Linear


def make():
    return MLP(3, 2, 4, 1, key=jax.random.key(0))


X = np.ones(3, np.float32)


def loss(model, x=X):
    return jnp.sum(model(x) ** 2)


def test_a_frozen_part_has_no_gradient_and_the_others_have_theirs():
    model = make()
    want = jax.grad(loss)(model)
    frozen = freeze(model, "layers.0")
    for derivative in (filter_grad(loss), filter_jacrev(loss), filter_jacfwd(loss)):
        got = derivative(frozen)
        assert jax.tree.structure(got) == jax.tree.structure(params(frozen))
        assert (got.layers[0].weight, got.layers[0].bias) == (NoGradient(), NoGradient())
        np.testing.assert_allclose(got.layers[1].weight, want.layers[1].weight, rtol=1e-5)
    value, again = filter_value_and_grad(loss)(frozen)
    np.testing.assert_allclose(value, loss(model), rtol=1e-6)
    assert again.layers[0].weight == NoGradient() and again.layers[1].bias.shape == (2,)


def test_a_gradient_goes_through_a_frozen_part_to_what_is_before_it():
    model = make()
    got = filter_grad(loss)(freeze(model, "layers.1"))
    np.testing.assert_allclose(
        got.layers[0].weight, jax.grad(loss)(model).layers[0].weight, rtol=1e-5
    )


def test_second_derivatives_leave_out_what_is_frozen():
    def square(layer):
        return jnp.sum(layer.weight**2) * jnp.sum(layer.bias)

    layer = Linear(2, 1, key=jax.random.key(0))
    hessian = filter_hessian(square)(freeze(layer, "bias"))
    assert hessian.bias == NoGradient() and hessian.weight.bias == NoGradient()
    np.testing.assert_allclose(
        hessian.weight.weight.reshape(2, 2), 2 * float(layer.bias[0]) * np.eye(2), rtol=1e-6
    )


def test_a_pullback_leaves_out_what_is_frozen_in_every_argument():
    frozen = freeze(make(), "**.weight")
    _, pullback = filter_vjp(lambda m, n, x: jnp.sum(m(x) + n(x)), frozen, make(), X)
    first, second, x = pullback(jnp.ones(()))
    assert first.layers[0].weight == NoGradient() and first.layers[0].bias.shape == (4,)
    assert second.layers[0].weight.shape == (4, 3) and x.shape == (3,)


class BackwardError(Exception):
    pass


@jax.custom_vjp
def guarded(weight):
    return weight


def fail(residual, cotangent):
    raise BackwardError("the backward pass ran")


guarded.defvjp(lambda weight: (weight, None), fail)


def test_the_backward_pass_of_a_frozen_array_never_runs():
    def guarded_loss(layer):
        return jnp.sum(guarded(layer.weight) @ jnp.ones(2) + layer.bias)

    layer = freeze(Linear(2, 3, key=jax.random.key(0)), "weight")
    np.testing.assert_allclose(filter_grad(guarded_loss)(layer).bias, np.ones(3))
    with pytest.raises(BackwardError, match="the backward pass ran"):
        filter_grad(guarded_loss)(unfreeze(layer))


def test_the_compiled_program_has_no_product_for_a_frozen_weight():
    def products(model):
        return str(jax.make_jaxpr(filter_grad(loss))(model)).count("dot_general")

    model = make()
    # Forward: two products. Backward: one for each weight, and one to reach the first layer.
    assert products(model) == 5
    assert products(freeze(model, "layers.1")) == 4
    assert products(freeze(model, "layers.0")) == 3


@pytest.mark.parametrize("wrt", [0, "model", (0,), lambda m: m.layers])
def test_what_is_frozen_stays_so_whatever_wrt_says(wrt):
    frozen = freeze(make(), "**.bias")
    got = filter_grad(loss, wrt=wrt)(frozen)
    got = got[0] if isinstance(wrt, tuple) else got
    assert got.layers[1].bias == NoGradient() and got.layers[1].weight.shape == (2, 4)


def test_differentiating_only_what_is_frozen_is_refused():
    frozen = freeze(make(), "layers.0")
    for wrt, model in [
        (None, freeze(make(), "**")),
        (lambda m: m.layers[0], frozen),
        (lambda m: (m.layers[0].bias, m.layers[1].bias), frozen),
    ]:
        with pytest.raises(
            TypeError, match=r"every floating-point array is frozen[\s\S]*vernal\.unfreeze"
        ):
            filter_grad(loss, wrt=wrt)(model)


def test_the_trace_is_reused_while_the_marks_are_the_same():
    step = filter_jit(filter_grad(loss))
    before = step.trace_count  # of all gradients: they are functions of one class
    for model in (freeze(make(), "layers.0"), freeze(make(), "layers.0.**")):
        step(model, X)
    assert step.trace_count == before + 1
    step(freeze(make(), "layers.1"), X)
    assert step.trace_count == before + 2


# --- masks


def test_a_tree_of_bools_says_what_to_differentiate():
    model = make()
    mask = trainable(model, "**.bias")
    assert callable(mask)
    for derivative in (filter_grad, filter_jacrev):
        got = derivative(loss, wrt=mask)(model)
        assert got.layers[0].weight == NoGradient()
        np.testing.assert_allclose(
            got.layers[0].bias, jax.grad(loss)(model).layers[0].bias, rtol=1e-5
        )


@pytest.mark.parametrize("make_tree", [dict, lambda p: [*p.values()], lambda p: (*p.values(),)])
def test_a_mask_may_be_of_any_container_and_stop_above_the_leaves(make_tree):
    tree = make_tree({"a": {"x": jnp.ones(2), "y": jnp.ones(2)}, "b": jnp.ones(2)})
    mask = make_tree({"a": False, "b": True})
    got = filter_grad(lambda p: sum(map(jnp.sum, jax.tree.leaves(p))), wrt=mask)(tree)
    a, b = got.values() if isinstance(got, dict) else got
    assert a == {"x": NoGradient(), "y": NoGradient()} and b.shape == (2,)


def test_a_mask_that_chooses_nothing_or_does_not_fit_is_refused():
    model = make()
    mask = jax.tree.map(lambda _: False, model)
    with pytest.raises(TypeError, match="nothing to differentiate"):
        filter_grad(loss, wrt=mask)(model)
    with pytest.raises(ValueError, match="the tree of bools in `wrt` does not match"):
        filter_grad(loss, wrt={"weight": True})(model)
    with pytest.raises(TypeError, match="`wrt` must name or pick what to differentiate"):
        filter_grad(loss, wrt={"weight": 1})


def test_a_mask_of_another_marking_does_not_fit_either():
    with pytest.raises(ValueError, match=r"does not match the argument[\s\S]*__frozen__"):
        filter_grad(loss, wrt=trainable(make()))(freeze(make(), "layers.0"))


def test_plain_jax_differentiates_everything():
    frozen = freeze(make(), "**")
    grads = jax.grad(loss)(frozen)
    assert [g.shape for g in jax.tree.leaves(grads)] == [x.shape for x in jax.tree.leaves(frozen)]
    assert vernal.modules.frozen_leaves(grads) == [True] * 4
