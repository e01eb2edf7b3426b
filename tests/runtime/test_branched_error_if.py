"""`branched_error_if`: a message chosen by a number that is known when the program runs."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.runtime import RuntimeCheckError, branched_error_if

MESSAGES = ["diverged", "step too small"]


def checked(x, pred, index):
    return branched_error_if(x, pred, index, MESSAGES)


def message_of(fn, *args):
    with pytest.raises(RuntimeCheckError) as caught:
        fn(*args)
    return caught.value.message


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("index", [0, 1])
def test_the_message_is_chosen_by_the_index(compiled, index):
    f = vernal.filter_jit(checked) if compiled else checked
    x = jnp.ones(2)
    assert message_of(f, x, jnp.array(True), jnp.array(index)) == MESSAGES[index]
    assert message_of(f, x, jnp.array(True), index) == MESSAGES[index]
    assert (f(x, jnp.array(False), jnp.array(index)) == x).all()
    assert (f(x, False, 7) == x).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_outside_of_the_messages_says_so(compiled, index):
    f = vernal.filter_jit(checked) if compiled else checked
    text = message_of(f, jnp.ones(2), jnp.array(True), jnp.array(index))
    assert text == f"branched_error_if: there is no message {index} in a list of 2"


@pytest.mark.parametrize("compiled", [False, True])
def test_every_message_of_a_batch_is_listed_with_its_indices(compiled):
    f = jax.vmap(checked)
    f = vernal.filter_jit(f) if compiled else f
    text = message_of(f, jnp.ones(4), jnp.array([1, 0, 1, 1], bool), jnp.array([1, 1, 0, 1]))
    assert text == (
        "diverged\n  at batch index (2,) (1 of 4)\n"
        "step too small\n  at batch indices (0,), (3,) (2 of 4)"
    )


def test_an_index_that_is_not_mapped_belongs_to_the_whole_batch():
    f = vernal.filter_jit(jax.vmap(checked, in_axes=(0, 0, None)))
    text = message_of(f, jnp.ones(2), jnp.array([False, True]), jnp.array(1))
    assert text == "step too small\n  at batch index (1,) (1 of 2)"


def test_axes_of_the_index_are_those_of_a_batch():
    pred, index = jnp.array([True, True]), jnp.array([1, 0])
    text = message_of(vernal.filter_jit(checked), jnp.ones(()), pred, index)
    assert (
        text
        == "diverged\n  at batch index (1,) (1 of 2)\nstep too small\n  at batch index (0,) (1 of 2)"
    )
    with pytest.raises(
        ValueError, match="must have one entry for all of `pred`, or one for each element"
    ):
        checked(jnp.ones(()), jnp.array(True), index)


def test_axes_of_the_condition_alone_are_reduced():
    assert message_of(checked, jnp.ones(()), jnp.array([False, True]), 0) == "diverged"


@pytest.mark.parametrize("index", [1.0, True, "a", jnp.array(0.5)])
def test_an_index_that_is_not_an_integer_is_refused(index):
    with pytest.raises(TypeError, match="the index of a message must be an integer"):
        checked(jnp.ones(2), False, index)


def test_no_message_is_refused():
    with pytest.raises(ValueError, match="needs at least one message"):
        branched_error_if(jnp.ones(2), False, 0, [])
    with pytest.raises(TypeError, match="must be a string"):
        inspect.unwrap(branched_error_if)(jnp.ones(2), False, 0, ["a", 3])


def test_nan_goes_by_the_condition():
    f = jax.vmap(lambda x, i: branched_error_if(x, x > 1, i, MESSAGES, on_error="nan"))
    np.testing.assert_array_equal(f(jnp.array([1.0, 2.0]), jnp.array([0, 9])), [1, np.nan])


@pytest.mark.parametrize("index", [2**40, -(2**40), 2, -1])
def test_a_python_index_of_any_size_is_outside_of_the_messages(index):
    with pytest.raises(Exception, match="there is no message -?[0-9]+ in a list of 2"):
        jax.block_until_ready(branched_error_if(jnp.ones(2), True, index, ["a", "b"]))
