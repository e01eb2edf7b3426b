"""What is not a number of products, or not a tolerance."""

import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import estimators, linalg
from vernal.linalg._arguments import positive_int, tolerance, whole_number
from vernal.transforms import TracedShapeError, filter_jit


def test_whole_numbers_of_every_library_become_python_ints():
    for value in (3, np.int8(3), np.int64(3), jnp.asarray(3)):
        number = positive_int(value, "matvecs", "f()")
        assert type(number) is int and number == 3


@pytest.mark.parametrize("value", [True, np.True_, 3.0, float("nan"), "3", jnp.asarray(3.0), None])
def test_what_is_not_a_whole_number_is_refused(value):
    with pytest.raises(TypeError, match=r"`matvecs` is not a whole number\n  where: f\(\)"):
        positive_int(value, "matvecs", "f()")


@pytest.mark.parametrize("value", [0, -3])
def test_a_number_that_is_not_positive_is_refused(value):
    with pytest.raises(ValueError, match=rf"`matvecs` is too small[\s\S]*matvecs={value}"):
        positive_int(value, "matvecs", "f()")


def test_a_traced_number_is_refused_with_what_to_write_instead():
    text = r"`matvecs` is traced[\s\S]*traced value int32\[\][\s\S]*`min` and `max`[\s\S]*`max_matvecs`"
    with pytest.raises(TypeError, match=text):
        jax.jit(lambda k: positive_int(k, "matvecs", "f()"))(3)


def test_filter_jit_says_which_argument_a_traced_number_came_from():
    @filter_jit
    def total(count):
        return jnp.ones(positive_int(jnp.minimum(count, 5), "matvecs", "f()")).sum()

    text = r"traced value was used as a shape[\s\S]*test_arguments.py[\s\S]*argument `count`"
    with pytest.raises(TracedShapeError, match=text):
        total(jnp.asarray(3))


def test_a_shared_number_is_an_array_whatever_it_was():
    values = [
        whole_number(x, "matvecs", "f()", minimum=2, most=9)
        for x in (4, np.int8(4), jnp.asarray(4))
    ]
    assert all(
        isinstance(x, jax.Array) and x == 4 and x.dtype == jnp.arange(1).dtype for x in values
    )


@pytest.mark.parametrize(
    ("value", "clamped"),
    [
        (jnp.asarray(-5), 2),
        (jnp.asarray(1000), 300),
        (jnp.asarray(7, jnp.int8), 7),
        (jnp.asarray(-128, jnp.int8), 2),
        (jnp.asarray(255, jnp.uint8), 255),
        (jnp.asarray(2**31 - 1), 300),
    ],
)
def test_an_array_is_clamped(value, clamped):
    assert whole_number(value, "matvecs", "f()", minimum=2, most=300) == clamped


@pytest.mark.parametrize("value", [jnp.asarray(3.0), jnp.asarray([3]), jnp.asarray(True)])
def test_an_array_that_is_not_one_integer_is_refused(value):
    with pytest.raises(
        TypeError, match=r"`matvecs` is not a whole number[\s\S]*an integer array of shape \(\)"
    ):
        whole_number(value, "matvecs", "f()", minimum=1, most=9)


def test_a_python_int_that_is_out_of_bounds_is_refused():
    with pytest.raises(ValueError, match=r"greater than `max_matvecs`[\s\S]*matvecs <= 9"):
        whole_number(10, "matvecs", "f()", minimum=2, most=9)
    with pytest.raises(ValueError, match=r"`matvecs` is too small[\s\S]*matvecs >= 2"):
        whole_number(1, "matvecs", "f()", minimum=2, most=9)


def test_a_tolerance_is_a_real_number_of_any_library():
    for value in (1, 1.0, np.float64(1), np.asarray(1.0), jnp.asarray(1)):
        made = tolerance(value, "rtol", "f()", jnp.float32)
        assert made == 1 and made.dtype == jnp.float32
    assert tolerance(None, "rtol", "f()", jnp.float32) == 0


@pytest.mark.parametrize(
    "value", [True, "1", 1j, np.True_, np.ones(2), jnp.ones(2), jnp.asarray(1j), [1.0]]
)
def test_what_is_no_number_is_no_tolerance(value):
    with pytest.raises(TypeError, match=r"`rtol` is not a number"):
        tolerance(value, "rtol", "f()", jnp.float32)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), jnp.asarray(-1.0)])
def test_a_tolerance_is_finite_and_not_negative(value):
    with pytest.raises(ValueError, match=r"`rtol` is not a tolerance[\s\S]*0 <= rtol < inf"):
        tolerance(value, "rtol", "f()", jnp.float32)


def test_a_tolerance_may_be_traced():
    assert jax.jit(lambda x: tolerance(x, "rtol", "f()", jnp.float32) * 2)(0.5) == 1


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"max_matvecs": 5},
        {"matvecs": 5, "rtol": 0.1},
        {"matvecs": 5, "atol": 0.1, "max_matvecs": 9},
    ],
)
def test_a_trace_is_asked_for_in_one_way(given):
    text = "both a number" if "matvecs" in given else "neither a number"
    with pytest.raises(
        ValueError,
        match=rf"{text}[\s\S]*got: [\s\S]*instead: `trace\(operator, key, matvecs=100\)`",
    ):
        estimators.trace(jnp.eye(50), jax.random.key(0), **given)


@pytest.mark.parametrize("value", [True, 20.0, float("nan")])
def test_the_entry_refuses_what_is_not_a_number_of_products(value):
    with pytest.raises(
        TypeError, match=r"`matvecs` is not a whole number\n  where: trace\(operator, key\)"
    ):
        inspect.unwrap(estimators.trace)(jnp.eye(50), jax.random.key(0), matvecs=value)
    with pytest.raises(TypeError, match=r"`max_matvecs` is not a whole number"):
        inspect.unwrap(estimators.trace)(
            jnp.eye(50), jax.random.key(0), rtol=0.1, max_matvecs=value
        )


OPERATOR = linalg.MatrixOperator(jnp.eye(8), positive_semidefinite=True)
# Every function that takes a key, of an operator and a key.
KEYED = {
    "trace": lambda a, k: estimators.trace(a, k, matvecs=6),
    "diagonal": lambda a, k: estimators.diagonal(a, k, matvecs=6),
    "logdet": lambda a, k: estimators.logdet(a, k, matvecs=6),
    "trace_of_function": lambda a, k: estimators.trace_of_function(jnp.exp, a, k, matvecs=6),
    "schatten_norm": lambda a, k: estimators.schatten_norm(a, k, 3, matvecs=9),
    "frobenius_norm": lambda a, k: estimators.frobenius_norm(a, k, matvecs=6),
    "spectral_density": lambda a, k: estimators.spectral_density(a, k, matvecs=20),
    "eigsh": lambda a, k: linalg.eigsh(a, 1, key=k),
    "svds": lambda a, k: linalg.svds(a, 1, key=k),
}


def test_what_is_no_random_key_is_refused():
    # In a process of its own: the checks of annotations that the tests run under would answer first.
    subprocess.run([sys.executable, __file__], check=True, timeout=500)


def _refuse_keys() -> None:
    for name, call in KEYED.items():
        optional = name in ("eigsh", "svds")
        for key in (jax.random.split(jax.random.key(0), 3), 0, "key", None):
            try:
                call(OPERATOR, key)
            except TypeError as error:
                assert f"`{name}` was not given a random key" in str(error), (name, key, error)
            else:
                assert key is None and optional, (name, key)


@pytest.mark.parametrize(
    "name", ["logdet", "trace_of_function", "schatten_norm", "spectral_density"]
)
def test_functions_of_an_empty_operator_are_refused(name):
    empty = linalg.MatrixOperator(jnp.zeros((0, 0)), positive_semidefinite=True)
    with pytest.raises(ValueError, match="the operator is empty"):
        KEYED[name](empty, jax.random.key(0))


def test_too_few_products_for_a_norm_are_told_as_they_were_given():
    matrix = jnp.eye(5)
    for operator, least in ((linalg.MatrixOperator(matrix, symmetric=True), 6), (matrix, 11)):
        with pytest.raises(ValueError, match=rf"matvecs >= {least}\n  got: matvecs=5"):
            estimators.schatten_norm(operator, jax.random.key(0), 3, matvecs=5)
        estimators.schatten_norm(operator, jax.random.key(0), 3, matvecs=least)


if __name__ == "__main__":
    _refuse_keys()
