"""Every kind of loop against the unrolled one: values and derivatives, single and double precision,
stopped after every number of steps, with and without `vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.loops import while_loop

KINDS = "lax", "checkpointed", "bounded"
MAX_STEPS = 9
# Beside the exact tolerance a little for what is nearly zero.
PRECISIONS = {"float32": 1e-6, "float64": 1e-12}


class Field(vernal.Module):
    """What is iterated: x becomes tanh(weight x) + shift."""

    weight: jax.Array
    shift: jax.Array

    def __call__(self, x):
        return jnp.tanh(self.weight @ x) + self.shift


def problem(dtype):
    rng = np.random.default_rng(0)
    weight, shift, x = (jnp.asarray(rng.normal(size=s) / 2, dtype) for s in ((2, 2), 2, 2))
    return Field(weight, shift), x


def looped(kind):
    """The end of the iteration that stops after `stop` steps, by its own counting."""

    def run(field, x, stop):
        x, _ = while_loop(
            lambda carry: carry[1] < stop,
            lambda carry: (field(carry[0]), carry[1] + 1),
            (x, 0),
            kind=kind,
            max_steps=MAX_STEPS,
        )
        return x

    return run


def unrolled(field, x, stop):
    for _ in range(min(int(stop), MAX_STEPS)):
        x = field(x)
    return x


def loss(run):
    def of(field, x, stop):
        end = run(field, x, stop)
        return jnp.sum(jnp.sin(end) * end)

    return of


def close(a, b, tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


STOPS = range(MAX_STEPS + 1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_values_and_derivatives_after_every_number_of_steps(kind, precision):
    tolerance = PRECISIONS[precision]
    with jax.enable_x64(precision == "float64"):
        field, x = problem(precision)
        dots = jax.tree.map(jnp.cos, (field, x))

        def derivatives(run, stop):
            def at(field, x):
                return run(field, x, stop)

            def total(field, x):
                return loss(run)(field, x, stop)

            out = at(field, x), jax.jvp(at, (field, x), dots)[1]
            return out if kind == "lax" else (*out, jax.grad(total, (0, 1))(field, x))

        ours = jax.jit(lambda stop: derivatives(looped(kind), stop))
        wants = [derivatives(unrolled, stop) for stop in STOPS]
        for stop, want in zip(STOPS, wants, strict=True):
            close(ours(stop), want, tolerance)
        close(ours(MAX_STEPS + 5), wants[-1], tolerance)
        # All numbers of steps in one batch.
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *wants)
        close(jax.jit(jax.vmap(ours))(jnp.arange(MAX_STEPS + 1)), stacked, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_derivatives_of_derivatives(kind):
    with jax.enable_x64(True):
        field, x = problem("float64")
        dots = jax.tree.map(jnp.cos, (field, x))

        def derivatives(run, stop):
            def total(field, x):
                return loss(run)(field, x, stop)

            grad = jax.grad(total, (0, 1))
            return (
                # jvp of vjp, vjp of jvp, and the Hessian, which is both at once.
                jax.jvp(grad, (field, x), dots)[1],
                jax.grad(lambda x: jax.jvp(total, (field, x), (dots[0], x))[1])(x),
                jax.hessian(lambda x: total(field, x))(x),
                jax.jacrev(jax.grad(lambda x: total(field, x)))(x),
            )

        ours = jax.jit(lambda stop: derivatives(looped(kind), stop))
        stops = 0, 1, 5, MAX_STEPS
        wants = [derivatives(unrolled, stop) for stop in stops]
        for stop, want in zip(stops, wants, strict=True):
            close(ours(stop), want, 1e-12)
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *wants)
        close(jax.jit(jax.vmap(ours))(jnp.array(stops)), stacked, 1e-12)


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_gradients_of_a_batch_of_loops_that_share_a_field(kind):
    field, x = problem("float32")
    xs, stops = jnp.stack([x, 2 * x, -x, x + 1]), jnp.array([3, 0, 9, 4])

    def ours(field, xs):
        return jnp.sum(jax.vmap(loss(looped(kind)), in_axes=(None, 0, 0))(field, xs, stops))

    def want(field, xs):
        return sum(loss(unrolled)(field, x, n) for x, n in zip(xs, stops, strict=True))

    close(jax.jit(jax.grad(ours, (0, 1)))(field, xs), jax.grad(want, (0, 1))(field, xs), 1e-5)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
@pytest.mark.parametrize(
    "kind", [{"kind": "lax"}, {"kind": "checkpointed"}, {"kind": "bounded", "max_steps": 4}]
)
def test_collectives_over_an_axis_of_which_nothing_is_mapped(kind, around):
    def summed(x):
        def body(c):
            i, c, at = c
            return i + 1, jax.lax.psum(c, "q"), at + jax.lax.axis_index("q")

        return while_loop(lambda c: c[0] < 3, body, (0, 1.0, 0), **kind)[1:]

    total, at = around(jax.vmap(summed, axis_name="q"))(jnp.arange(3.0))
    np.testing.assert_array_equal(total, [27, 27, 27])
    np.testing.assert_array_equal(at, [0, 3, 6])
