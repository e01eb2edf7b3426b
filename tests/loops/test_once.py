"""Loops outside of compiled code: compiled once for the same functions and types, and never for others."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.loops import fori_loop, map, scan, while_loop

XS = jnp.arange(4.0)


def counted(fn):
    """The function, and how often it was traced."""
    traces = []

    @functools.wraps(fn)
    def call(*args):
        traces.append(None)
        return fn(*args)

    return call, traces


def going(carry):
    return carry[0] < 3


# For each loop: a function, the loop with that function, and what it computes.
LOOPS = {
    "while_loop": (
        lambda c: (c[0] + 1, 2 * c[1]),
        lambda f, x: while_loop(going, f, (0, x))[1],
        lambda x: 8 * x,
    ),
    "scan": (lambda c, x: (c * x, c), lambda f, x: scan(f, x, XS + 1)[0], lambda x: 24 * x),
    "fori_loop": (
        lambda i, c: c + i.astype(c.dtype),
        lambda f, x: fori_loop(0, 4, f, x),
        lambda x: x + 6,
    ),
    "map": (lambda x: x + 1, lambda f, x: map(f, jnp.stack([x, x])).sum(0), lambda x: 2 * x + 2),
}
TRANSFORMS = {
    "grad": (jax.grad, 0.5),
    "vmap": (jax.vmap, XS),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), 0.5),
    "vmap grad": (lambda f: jax.vmap(jax.grad(f)), XS),
    "hessian": (lambda f: jax.hessian(f), 0.5),
}


@pytest.mark.parametrize("fn, run, expected", LOOPS.values(), ids=LOOPS)
def test_it_is_traced_once_for_the_same_function_and_types(fn, run, expected):
    fn, traces = counted(fn)
    for value in (1.0, 2.0, 3.0):
        np.testing.assert_allclose(run(fn, jnp.float32(value)), expected(value))
    assert len(traces) == 1
    for value in (1.0, 2.0):
        np.testing.assert_allclose(run(fn, jnp.full(3, value)), np.full(3, expected(value)))
    assert len(traces) == 2


@pytest.mark.parametrize("transform, x", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
@pytest.mark.sample(3)
def test_so_it_is_for_derivatives_and_maps(transform, x, kind):
    body, traces = counted(lambda c, x: (jnp.sin(c) * x, None))
    ours = transform(lambda x: scan(body, x, XS, kind=kind)[0])
    plain = transform(lambda x: jax.lax.scan(lambda c, x: (jnp.sin(c) * x, None), x, XS)[0])
    for scale in (1.0, 2.0, 3.0):
        pairs = zip(
            *(jax.tree.leaves(f(scale * jnp.asarray(x))) for f in (ours, plain)), strict=True
        )
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-6)
    assert len(traces) == 1


def test_a_function_answers_for_no_other():
    def scale_by(k):
        return lambda c, x: (k * c, None)

    class Scale:
        def __init__(self, k):
            self.k = k

        def __call__(self, c, x):
            return self.k * c, None

        def __eq__(self, other):
            return isinstance(other, Scale)

        def __hash__(self):
            return 0

        def method(self, c, x):
            return self(c, x)

    def run(fn):
        return scan(fn, jnp.float32(1), None, length=2)[0]

    # Each is dropped before the next one is made, so that it may get the same place in memory.
    for k in range(1, 20):
        assert run(scale_by(float(k))) == k**2
        assert run(functools.partial(lambda k, c, x: (k * c, None), float(k))) == k**2
        assert run(Scale(float(k))) == k**2
        assert run(Scale(float(k)).method) == k**2


def test_a_module_is_known_by_its_structure():
    traces = []

    class Cell(vernal.Module):
        weight: jax.Array
        power: int = vernal.field(static=True)

        def step(self, c, x):
            traces.append(None)
            return self.weight * c**self.power, None

    for weight, power in [(1.0, 1), (2.0, 1), (3.0, 1), (3.0, 2)]:
        cell = Cell(jnp.array(weight), power)
        expected = weight**2 if power == 1 else weight**3
        assert scan(cell.step, jnp.float32(1), None, length=2)[0] == expected
    assert len(traces) == 2


def test_functions_and_what_they_hold_are_let_go():
    alive = []

    class Held:
        pass

    for _ in range(5):
        held = Held()

        def fn(c, x, held=held):
            return (c + x, None)

        scan(fn, 0.0, XS)
        jax.grad(lambda x, fn=fn: scan(fn, x, XS, kind="checkpointed")[0])(1.0)
        alive.append(weakref.ref(held))
        del fn, held
    gc.collect()
    assert not [x for x in alive if x() is not None]


@pytest.mark.parametrize("thing", [{1, 2}, bytearray(b"ab"), "text", jnp.sin, object()])
def test_a_carry_may_hold_anything(thing):
    (total, same), _ = scan(lambda c, x: ((c[0] + x, c[1]), None), (0.0, thing), XS)
    assert total == 6 and same is thing


def test_a_function_that_cannot_be_referred_to_weakly_is_run():
    class Slotted:
        __slots__ = ()

        def __call__(self, c, x):
            return c + x, None

    fn = Slotted()
    assert [scan(fn, 0.0, XS)[0] for _ in range(2)] == [6, 6]


def test_it_runs_without_jit_too():
    with jax.disable_jit():
        assert scan(lambda c, x: (c + x, None), 0.0, XS)[0] == 6


def test_a_function_that_closes_over_a_tracer_is_another_one_each_time():
    rebound = jnp.float32(2)

    def body(c, x):
        return c * rebound, None

    def run(value):
        nonlocal rebound
        rebound = value
        return scan(body, jnp.float32(1), None, length=2)[0]

    assert run(jnp.float32(2)) == 4
    assert jax.grad(run)(3.0) == 6
    assert jax.grad(run)(4.0) == 8
