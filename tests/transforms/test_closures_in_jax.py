"""Every kind of callable that holds arrays, passed straight to JAX's own control flow.

JAX hashes and compares the functions that it is given. The table: kinds of callables, holding
concrete arrays or tracers, times the functions of JAX that take functions, each against a plain
closure; eagerly, compiled, differentiated and mapped.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.transforms import closure_to_pytree, filter_closure_convert, filter_custom_jvp

A = jnp.array([1.0, 0.8])
X = jnp.array([0.9, -0.7])
ROWS = jnp.stack([A, 0.5 * A])


class Model(vernal.Module):
    a: jax.Array
    fn: Any

    def __call__(self, *args):
        return self.fn(self.a, *args)

    def method(self, *args):
        return self.fn(self.a, *args)


class Around(vernal.Module):
    """What Diffrax has in its loops: a converted function inside a module."""

    inside: Any

    def method(self, *args):
        return self.inside(*args)


def closure(fn, a, *args):
    return lambda *args: fn(a, *args)


def converted(fn, a, *args):
    return filter_closure_convert(closure(fn, a), *args)


def with_its_own_rule(fn, a, *args):
    call: Any = filter_custom_jvp(lambda a, *args: fn(a, *args))
    call.def_jvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return vernal.Partial(call, a)


KINDS = {
    "filter_custom_jvp": with_its_own_rule,
    "module": lambda fn, a, *args: Model(a, fn),
    "bound method": lambda fn, a, *args: Model(a, fn).method,
    "vernal.Partial": lambda fn, a, *args: vernal.Partial(fn, a),
    "functools.partial": lambda fn, a, *args: functools.partial(fn, a),
    "converted": converted,
    "converted module": lambda fn, a, *args: filter_closure_convert(Model(a, fn), *args),
    "closure_to_pytree": lambda fn, a, *args: closure_to_pytree(closure(fn, a)),
    "method around a converted": lambda fn, a, *args: Around(converted(fn, a, *args)).method,
    "partial around a converted": lambda fn, a, *args: vernal.Partial(converted(fn, a, *args)),
    "filter_jit": lambda fn, a, *args: vernal.filter_jit(closure(fn, a)),
    "filter_jit of a module": lambda fn, a, *args: vernal.filter_jit(Model(a, fn)),
    "filter_checkpoint": lambda fn, a, *args: vernal.filter_checkpoint(closure(fn, a)),
}
# Those that are pytrees, so that JAX sees what they hold.
TREES = [
    name for name in KINDS if name not in ("functools.partial", "filter_jit", "filter_checkpoint")
]


def step(a, x):
    return 0.6 * jnp.sin(a * x)


def go_on(a, x):
    return jnp.sum(jnp.abs(a * x)) > 0.2


def scan_step(a, carry, x):
    return jnp.sin(a * carry) + x, a * x


def while_loop(kind, a, x):
    return jax.lax.while_loop(kind(go_on, a, x), kind(step, a, x), x)


def scan(kind, a, x):
    body = kind(scan_step, a, x, x)
    xs = jnp.stack([x, 2.0 * x])
    carry, ys = jax.lax.scan(body, x, xs)
    # The same object once more.
    return jax.lax.scan(body, carry, xs)[0] + jnp.sum(ys, 0)


def cond(kind, a, x):
    fn = kind(step, a, x)
    y = jax.lax.cond(x[0] > 0, fn, fn, x)
    return jax.lax.cond(y[0] > 0, fn, kind(step, 2.0 * a, x), y)


def switch(kind, a, x):
    fn = kind(step, a, x)
    return jax.lax.switch(jnp.int32(x[0] > 0), [kind(step, 2.0 * a, x), fn, fn], x)


def checkpoint(kind, a, x):
    fn = kind(step, a, x)
    return jax.checkpoint(fn)(x) * jax.checkpoint(fn)(2.0 * x)


CONTROL_FLOW = {f.__name__: f for f in (while_loop, scan, cond, switch, checkpoint)}


def close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def derivative(fn):
    """A derivative with respect to both arguments that every control flow has."""
    return lambda a, x: jax.jvp(fn, (a, x), (x, a))[1]


@functools.cache
def expected(where):
    fn = functools.partial(CONTROL_FLOW[where], closure)
    of_sum = jax.grad(lambda *args: jnp.sum(fn(*args)), argnums=(0, 1))
    return (
        fn(A, X),
        derivative(fn)(A, X),
        None if where == "while_loop" else of_sum(A, X),
        jnp.stack([fn(row, X) for row in ROWS]),
    )


@pytest.mark.parametrize("where", CONTROL_FLOW)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(12)
def test_every_kind_of_callable_goes_into_control_flow(name, where):
    fn = functools.partial(CONTROL_FLOW[where], KINDS[name])
    of_sum = jax.grad(lambda *args: jnp.sum(fn(*args)), argnums=(0, 1))
    value, _, gradient, rows = expected(where)
    close(fn(A, X), value)
    close(jax.jit(fn)(A, X), value)
    close(jax.vmap(fn, in_axes=(0, None))(ROWS, X), rows)
    if gradient is not None:
        close(jax.jit(of_sum)(A, X), gradient)


@pytest.mark.parametrize("where", CONTROL_FLOW)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(12)
def test_derivatives_in_forward_mode_leave_no_tracer_behind(name, where):
    fn = functools.partial(CONTROL_FLOW[where], KINDS[name])
    with jax.checking_leaks():
        tangent = jax.jit(derivative(fn))(A, X)
    close(tangent, expected(where)[1])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sample(3)
def test_a_nondifferentiable_argument_of_a_custom_vjp(name):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(f, x):
        return f(x)

    call.defvjp(lambda f, x: (f(x), x), lambda f, x, ct: (2.0 * jax.vjp(f, x)[1](ct)[0],))
    fn = KINDS[name](step, A, X)
    theirs = jax.grad(lambda x: 2.0 * jnp.sum(step(A, x) * step(A, x)))(X)
    ours = jax.grad(lambda x: jnp.sum(call(fn, x) * call(fn, x)))
    close(ours(X), theirs)
    close(jax.jit(ours)(X), theirs)
    close(jax.vmap(ours)(ROWS)[0], ours(ROWS[0]))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.sample(3)
def test_a_differentiable_argument_of_a_custom_vjp(name):
    @jax.custom_vjp
    def call(f, x):
        return f(x)

    def backward(residuals, ct):
        return jax.vjp(lambda f, x: f(x), *residuals)[1](2.0 * ct)

    call.defvjp(lambda f, x: (f(x), (f, x)), backward)

    def ours(a, x):
        fn = KINDS[name](step, a, x)
        return jnp.sum(call(fn, x) + call(fn, 2.0 * x))

    theirs = jax.grad(lambda a, x: 2.0 * jnp.sum(step(a, x) + step(a, 2.0 * x)), (0, 1))(A, X)
    close(jax.grad(ours, (0, 1))(A, X), theirs)
    with jax.checking_leaks():
        gradient = jax.jit(jax.grad(ours, (0, 1)))(A, X)
    close(gradient, theirs)


@pytest.mark.parametrize("name", KINDS)
def test_a_host_callback(name):
    fn = KINDS[name](step, A, X)

    def call(x):
        return jax.pure_callback(
            fn, jax.ShapeDtypeStruct((2,), x.dtype), x, vmap_method="sequential"
        )

    close(call(X), step(A, X))
    close(jax.jit(lambda x: call(x) + call(2.0 * x))(X), step(A, X) + step(A, 2.0 * X))
    close(jax.vmap(call)(ROWS), jnp.stack([step(A, row) for row in ROWS]))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.sample(6)
def test_they_are_carries_and_arguments(name):
    def ours(a, x):
        fn = KINDS[name](step, a, x)
        fn, x = jax.jit(lambda fn, x: (fn, fn(x)))(fn, x)
        (fn, x), _ = jax.lax.scan(lambda c, _: ((c[0], c[0](c[1])), None), (fn, x), None, length=2)
        _, fn, x = jax.lax.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1], c[1](c[2])), (0, fn, x)
        )
        out = jax.eval_shape(lambda fn, x: fn(x), fn, x)
        return fn(x).astype(out.dtype)

    def theirs(a, x):
        for _ in range(5):
            x = step(a, x)
        return x

    close(jax.vmap(ours, in_axes=(0, None))(ROWS, X)[1], theirs(ROWS[1], X))
    with jax.checking_leaks():
        tangent = jax.jit(derivative(ours))(A, X)
    close(tangent, derivative(theirs)(A, X))


class FixedPoint(vernal.Module):
    """Iterates a function until it stands still."""

    function: Any
    tolerance: float = vernal.field(static=True)

    def moving(self, state):
        old, new = state
        return jnp.max(jnp.abs(new - old)) > self.tolerance

    def advance(self, state):
        return state[1], self.function(state[1])

    def solve(self, x):
        frozen = jax.lax.stop_gradient(self)
        state = jax.lax.while_loop(frozen.moving, frozen.advance, (x, frozen.function(x)))
        # One more step carries the derivative, and its inverse makes it that of the solution.
        solution = jax.lax.stop_gradient(state[1])
        jacobian = jax.jacobian(frozen.function)(solution)
        out = self.function(solution)
        return solution + jnp.linalg.solve(jnp.eye(2) - jacobian, out - jax.lax.stop_gradient(out))


def test_a_solver_whose_function_holds_tracers_loops_on_its_own_methods():
    """JAX 0.4.30 hashes the functions given to `while_loop`, with the tracers in them."""

    def through(fn, a, x):
        weight = 0.3 * a
        function = filter_closure_convert(fn(weight), x)
        return jnp.sum(FixedPoint(function, 1e-6).solve(x) ** 2)

    def function(weight):
        return lambda x: jnp.cos(weight * x)

    def layered(weight):
        inner = filter_closure_convert(function(weight), X)
        return vernal.Partial(Around(inner).method)

    def unrolled(a):
        x = X
        for _ in range(25):
            x = jnp.cos(0.3 * a * x)
        return jnp.sum(x**2)

    theirs = jax.jit(jax.grad(unrolled))(A)
    for make in (function, layered):
        ours = functools.partial(through, make)
        close(jax.grad(ours)(A, X), theirs)
        close(jax.jit(jax.vmap(jax.grad(ours), (0, None)))(ROWS, X)[0], theirs)
        with jax.checking_leaks():
            ours = jax.jit(jax.grad(ours))(A, X)
        close(ours, theirs)


def test_the_same_function_is_traced_once():
    traced = []

    def counted(a, x):
        traced.append(x)
        return step(a, x)

    model = Model(A, counted)
    for fn in (
        model,
        model.method,
        vernal.Partial(counted, A),
        closure_to_pytree(closure(counted, A)),
    ):
        traced.clear()
        call = jax.jit(lambda fn, x: fn(x))
        for _ in range(3):
            call(fn, X)
            call(jax.tree.map(lambda x: 2.0 * x, fn), X)
        assert len(traced) == 1, fn
    converted = filter_closure_convert(closure(counted, A), X)
    traced.clear()
    for _ in range(3):
        jax.lax.scan(lambda c, _: (converted(c), None), X, None, length=2)
    assert traced == []
