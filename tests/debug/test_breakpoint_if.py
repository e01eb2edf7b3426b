"""`breakpoint_if` stops where its condition holds."""

import io

import jax
import jax.numpy as jnp
import pytest

from vernal import loops
from vernal.debug import breakpoint_if


def stops(run) -> int:
    """How often the debugger was entered."""
    out = io.StringIO()
    run(dict(backend="cli", stdin=io.StringIO("c\n" * 9), stdout=out))
    jax.effects_barrier()
    return out.getvalue().count("Entering jdb")


@pytest.mark.parametrize("pred", [True, False])
def test_it_stops_if_the_condition_holds(pred):
    def f(pred, how):
        breakpoint_if(pred, **how)
        return pred

    assert stops(lambda how: f(pred, how)) == pred
    assert stops(lambda how: f(jnp.array([False, pred]), how)) == pred
    assert stops(lambda how: jax.jit(lambda p: f(p, how))(pred)) == pred


def test_a_batch_stops_if_any_element_does():
    def f(x, how):
        breakpoint_if(x > 1, **how)
        return x

    # Once for every element, because the frames that it shows hold batches.
    assert stops(lambda how: jax.jit(jax.vmap(lambda x: f(x, how)))(jnp.arange(5))) == 5
    assert stops(lambda how: jax.vmap(lambda x: f(x, how))(jnp.zeros(5))) == 0


def test_it_stops_inside_of_loops_and_derivatives():
    def f(x, how):
        def body(c, i):
            breakpoint_if(i == 1, **how)
            return c * x, None

        return jax.lax.scan(body, x, jnp.arange(3))[0]

    assert stops(lambda how: jax.jit(jax.grad(lambda x: f(x, how)))(2.0)) == 1


@pytest.mark.parametrize("kind", ["lax", "bounded", "checkpointed"])
@pytest.mark.sample(3)
def test_elements_that_are_done_do_not_count(kind):
    bound = None if kind == "lax" else 4

    def f(x, wrong, how):
        def body(x):
            breakpoint_if(wrong, **how)
            return 2 * x

        return loops.while_loop(lambda x: x < 3, body, x, kind=kind, max_steps=bound)

    def run(start, how):
        # The second element is the one that goes wrong.
        f_of = jax.jit(jax.vmap(lambda x, wrong: f(x, wrong, how)))
        return f_of(jnp.array([1.0, start]), jnp.array([False, True]))

    assert stops(lambda how: run(5.0, how)) == 0
    assert stops(lambda how: run(2.0, how)) == 2


def test_elements_that_take_another_branch_do_not_count():
    def f(x, how):
        def log(x):
            breakpoint_if(x < 0, **how)
            return jnp.log(x)

        return loops.filter_cond(x > 0, log, lambda x: x, x)

    assert stops(lambda how: jax.jit(jax.vmap(lambda x: f(x, how)))(jnp.array([1.0, -1.0]))) == 0
