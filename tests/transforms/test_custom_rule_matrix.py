"""Custom rules in every surrounding, under every derivative: the same numbers as without a rule.

The rules state the true derivative, so that the function without a rule is the reference. They are
written naively: nothing in them asks what is differentiated.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.loops import while_loop
from vernal.transforms import filter_checkpoint, filter_custom_jvp, filter_custom_vjp


def free(w, x, y):
    return jnp.sin(w * x) * y


@filter_custom_jvp
def with_jvp(w, x, y):
    return jnp.sin(w * x) * y


@with_jvp.def_jvp
def jvp_rule(primals, tangents):
    (w, x, y), (w_dot, x_dot, y_dot) = primals, tangents
    inner_dot = w_dot * x + w * x_dot
    return jnp.sin(w * x) * y, jnp.cos(w * x) * inner_dot * y + jnp.sin(w * x) * y_dot


@filter_custom_vjp
def tuple_with_vjp(args):
    w, x, y = args
    return jnp.sin(w * x) * y


@tuple_with_vjp.def_fwd
def fwd_rule(perturbed, args):
    w, x, y = args
    return jnp.sin(w * x) * y, {"slope": jnp.cos(w * x) * y, "text": "any object"}


@tuple_with_vjp.def_bwd
def bwd_rule(residuals, grad_out, perturbed, args):
    w, x, _ = args
    slope = residuals["slope"] * grad_out
    return slope * x, slope * w, jnp.sin(w * x) * grad_out


def with_vjp(w, x, y):
    return tuple_with_vjp((w, x, y))


class Model(vernal.Module):
    w: jax.Array
    core: Callable[..., Any]

    def plain(self, x, y):
        return self.core(self.w, x, y)

    @filter_custom_jvp
    def jvp_method(self, x, y):
        return self.core(self.w, x, y)

    @jvp_method.def_jvp
    def jvp_method_rule(primals, tangents):
        (self, x, y), (self_dot, x_dot, y_dot) = primals, tangents
        return jvp_rule((self.w, x, y), (self_dot.w, x_dot, y_dot))


def plain(model, x, y):
    return model.core(model.w, x, y)


def in_scan(model, x, y):
    def body(carry, _):
        return 0.5 * carry + model.core(model.w, carry, y), None

    return jax.lax.scan(body, x, length=3)[0]


def in_method(model, x, y):
    if model.core is with_jvp:
        # The rule is that of the method; the function inside has none.
        return Model(model.w, free).jvp_method(x, y)
    return model.plain(x, y)


def in_checkpoint(model, x, y):
    return jnp.tanh(filter_checkpoint(model.core)(model.w, jnp.tanh(x), y))


def while_loop_of(loop):
    def around(model, x, y):
        def body(state):
            i, carry = state
            return i + 1, 0.5 * carry + model.core(model.w, carry, y)

        return loop(lambda state: state[0] < 3, body, (jnp.array(0), x))[1]

    return around


in_lax_while_loop = while_loop_of(jax.lax.while_loop)
in_while_loop = while_loop_of(functools.partial(while_loop, max_steps=4, kind="checkpointed"))


def gradient(which):
    return lambda f: jax.grad(f, which)


def directional(f):
    def run(*at):
        return jax.jvp(f, at, jax.tree.map(lambda x: 0.5 * x, at))

    return run


def forward_over_reverse(f):
    return directional(jax.grad(f, (0, 1, 2)))


def batched_gradient(f):
    per_example = jax.vmap(jax.grad(f, (0, 1, 2)), in_axes=(None, 0, None))
    return lambda model, x, y: per_example(model, x + jnp.arange(3.0), y)


REVERSE = {
    "grad_of_one": gradient(1),
    "grad_of_both": gradient((1, 2)),
    "grad_of_field": gradient(0),
    "jvp_of_vjp": forward_over_reverse,
    "vmap_of_grad": batched_gradient,
}
FORWARD = {"jvp": directional}
AROUND = {
    "plain": plain,
    "scan": in_scan,
    "method": in_method,
    "checkpoint": in_checkpoint,
    "while_loop": in_while_loop,
}
FUNCTIONS = {"custom_jvp": (with_jvp, REVERSE | FORWARD), "custom_vjp": (with_vjp, REVERSE)}
CELLS = {
    "-".join((name, place, derivative)): (core, AROUND[place], transforms[derivative])
    for name, (core, transforms) in FUNCTIONS.items()
    for place in AROUND
    for derivative in transforms
}
REFUSED = [(with_vjp, around, directional) for around in AROUND.values()]
in_bounded_while_loop = while_loop_of(
    functools.partial(while_loop, max_steps=4, kind="bounded", base=2)
)
CELLS["custom_vjp-bounded_while_loop-jvp_of_vjp"] = (
    with_vjp,
    in_bounded_while_loop,
    forward_over_reverse,
)
CELLS["custom_jvp-lax_while_loop-jvp"] = (with_jvp, in_lax_while_loop, directional)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("core", "around", "transform"), REFUSED)
def test_a_rule_for_reverse_mode_has_no_forward_mode(core, around, transform, jit):
    run = transform(around)
    with pytest.raises(TypeError, match="has no derivative in forward mode"):
        (jax.jit(run) if jit else run)(
            Model(jnp.float32(0.7), core), jnp.float32(0.4), jnp.float32(1.3)
        )


def assert_same(got, want, rtol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def without_core(tree):
    """Models as their field: the function is structure, and differs from the reference."""

    def is_model(x):
        return isinstance(x, Model)

    return jax.tree.map(lambda x: x.w if is_model(x) else x, tree, is_leaf=is_model)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(("core", "around", "transform"), CELLS.values(), ids=CELLS.keys())
@pytest.mark.sample(12)
def test_a_custom_rule_gives_the_derivative_of_the_function_without_one(
    core, around, transform, jit
):
    w, x, y = jnp.float32(0.7), jnp.float32(0.4), jnp.float32(1.3)
    results = []
    for function in (free, core):
        run = transform(around)
        with jax.checking_leaks():
            results.append((jax.jit(run) if jit else run)(Model(w, function), x, y))
    assert_same(*map(without_core, reversed(results)))
