"""The exception of failed checks, and the mailbox."""

import pickle
import threading

import pytest

import vernal
from vernal._ground import RuntimeCheckError, failure_of, post


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
