"""The exception of failed checks, the mailbox, the place, and the operation itself."""

import pickle
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal._ground import (
    RuntimeCheckError,
    batch_text,
    check,
    fail_if,
    failure_of,
    poison,
    reports_in,
)
from vernal._ground._failure import post
from vernal._ground._place import here


def test_the_error_is_known_by_the_room_that_raises_it_and_survives_pickling():
    error = RuntimeCheckError("too big", '  File "a.py", line 1, in f')
    assert type(error).__module__ == "vernal.runtime"
    assert vernal.runtime.RuntimeCheckError is RuntimeCheckError
    assert isinstance(error, RuntimeError)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is RuntimeCheckError
    assert (again.message, again.place, str(again)) == (error.message, error.place, str(error))


def test_the_text_is_the_message_and_then_the_place():
    assert str(RuntimeCheckError("too big")) == "too big"
    text = str(RuntimeCheckError("too big", '  File "a.py", line 1, in f'))
    assert text.startswith("too big\n")
    assert text.endswith('(most recent call last):\n  File "a.py", line 1, in f')


def test_a_letter_is_collected_once_by_the_mark_that_the_mailbox_gave():
    first, second = RuntimeCheckError("first"), RuntimeCheckError("second")
    marks = post(first), post(second)
    assert failure_of(RuntimeError(f"noise {marks[1]} noise")) is second
    assert failure_of(RuntimeError(f"noise {marks[0]} noise")) is first
    assert failure_of(RuntimeError(f"noise {marks[0]} noise")) is None


def test_of_several_failures_the_first_is_told_and_none_is_kept():
    errors = [RuntimeCheckError(str(i)) for i in range(3)]
    text = " and ".join(map(post, errors))
    assert failure_of(RuntimeError(text)) is errors[0]
    assert failure_of(RuntimeError(text)) is None


@pytest.mark.parametrize("error", [RuntimeError("boom"), TypeError("[vernal check 1]")])
def test_other_errors_are_nobodys_letter(error):
    assert failure_of(error) is None


def test_letters_that_nobody_collects_are_thrown_away():
    mark = post(RuntimeCheckError("old"))
    for _ in range(300):
        post(RuntimeCheckError("new"))
    assert failure_of(RuntimeError(mark)) is None


def test_the_mailbox_is_right_under_threads():
    wrong = []

    def work(name):
        for i in range(100):
            error = RuntimeCheckError(f"{name} {i}")
            if failure_of(RuntimeError(post(error))) is not error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_place_names_the_users_frames_and_none_of_jax_or_of_ours():
    def user_function(x):
        places.append(here())
        return x

    places = []
    jax.eval_shape(vernal.filter_jit(jax.vmap(user_function)), jnp.ones(2))
    text = str(places[0])
    lines = text.splitlines()
    assert lines[-2].endswith("in user_function")
    assert lines[-1].strip() == "places.append(here())"
    assert "test_failure.py" in text
    assert "site-packages/jax/" not in text
    assert "/vernal/" not in text


def test_a_deep_place_is_cut_at_the_outer_end():
    def recurse(n):
        return here() if n == 0 else recurse(n - 1)

    lines = str(recurse(30)).splitlines()
    assert re.fullmatch(r"  \.\.\. \(\d+ outer frames\)", lines[0])
    assert "in recurse" in lines[1]
    assert len(recurse(30).entries) == 20


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
