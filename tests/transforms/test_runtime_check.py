"""The operation that ends a compiled program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.transforms import batch_text, check, fail_if, poison
from vernal.transforms._runtime_check import reports_in


def test_failing_indices_are_listed():
    assert batch_text(np.array(True)) == ""
    assert batch_text(np.array([False, True])) == "\n  at batch index (1,) (1 of 2)"
    grid = np.array([[True, False], [False, True]])
    assert batch_text(grid) == "\n  at batch indices (0, 0), (1, 1) (2 of 4)"
    assert batch_text(np.ones(12, bool)).endswith("(9,) and 2 more (12 of 12)")


def test_a_check_is_found_wherever_it_stands_in_a_program():
    def guarded(x):
        return fail_if([x], x.sum() > 100, explain="too big")[0]

    def program(x):
        x, _ = jax.lax.scan(lambda c, _: (jax.jit(guarded)(c), None), x, length=2)
        return jax.lax.cond(x.sum() > 0, guarded, lambda x: x, x)

    found = reports_in(jax.make_jaxpr(program)(jnp.ones(2)))
    assert len(found) == 2
    assert found[0].explain == "too big"
    assert reports_in(jax.make_jaxpr(jnp.sin)(1.0)) == ()


@pytest.mark.parametrize(
    ("x", "poisoned"),
    [
        (np.float32(1), np.nan),
        (np.float16(1), np.nan),
        (np.complex64(1j), np.nan),
        (np.int8(1), 127),
        (np.uint32(1), 2**32 - 1),
        (np.bool_(False), True),
    ],
)
def test_poison_replaces_by_what_nobody_takes_for_a_value(x, poisoned):
    assert poison(x, jnp.array(False)) == x
    got = poison(x, jnp.array(True))
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, np.asarray(poisoned, x.dtype))


def test_a_random_key_can_be_poisoned():
    key = jax.random.key(0)
    assert (poison(key, jnp.array(False)) == key).all()
    assert (poison(key, jnp.array(True)) != key).all()


def test_a_check_that_only_tells_goes_on_with_the_flag_set(capfd):
    flag = check(jnp.array(True), explain="look", kind="tell")
    assert flag
    assert capfd.readouterr().err.startswith("look\n")
    flag = jax.jit(lambda x: check(x > 0, explain="here", kind="tell"))(1.0)
    assert flag
    assert capfd.readouterr().err.startswith("here\n")
