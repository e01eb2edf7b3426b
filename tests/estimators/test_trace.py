"""The entry: exact answers, the choice of a method, refusals, transformations."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import estimators
from vernal.estimators import Hutchinson, XNysTrace, XTrace, _exact
from vernal.estimators._trace import _choose as choose
from vernal.linalg import FunctionOperator, MatrixOperator
from vernal.transforms import TracedShapeError, filter_eval_shape, filter_jit, filter_vmap

KEY = jax.random.key(0)


def positive(n: int, seed: int = 0) -> np.ndarray:
    """A positive semidefinite matrix with eigenvalues that decay."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))
    return ((basis * np.arange(1, n + 1.0) ** -1) @ basis.T).astype(np.float32)


def test_as_many_products_as_rows_give_the_exact_trace():
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((30, 30)).astype(np.float32)
    for matvecs in (30, 31, 10**6):
        got = estimators.trace(matrix, KEY, matvecs=matvecs)
        np.testing.assert_allclose(got.value, np.trace(matrix), rtol=1e-6)
        assert got.standard_error == 0 and got.matvecs == 30 and got.tags_hold
        assert got.degrees_of_freedom == jnp.inf


def test_the_exact_trace_of_a_complex_operator_is_complex_and_of_a_hermitian_one_real():
    rng = np.random.default_rng(0)
    matrix = (rng.standard_normal((9, 9)) + 1j * rng.standard_normal((9, 9))).astype(np.complex64)
    got = estimators.trace(matrix, KEY, matvecs=9)
    np.testing.assert_allclose(got.value, np.trace(matrix), rtol=1e-5)
    assert got.standard_error.dtype == jnp.float32
    hermitian = matrix + matrix.conj().T
    got = estimators.trace(MatrixOperator(hermitian, symmetric=True), KEY, matvecs=9)
    assert got.value.dtype == jnp.float32
    np.testing.assert_allclose(got.value, np.trace(hermitian).real, rtol=1e-5)


def test_the_exact_trace_is_made_in_blocks_that_fit_into_memory(monkeypatch):
    monkeypatch.setattr(_exact, "_BYTES", 7 * 30 * 4)
    weights = jnp.arange(30.0)

    def trace(weights):
        operator = FunctionOperator(lambda v: weights * v + v.sum(), jnp.zeros(30))
        return estimators.trace(operator, KEY, matvecs=30).value

    value, gradient = jax.value_and_grad(trace)(weights)
    np.testing.assert_allclose(value, 435 + 30, rtol=1e-6)
    np.testing.assert_allclose(gradient, np.ones(30), rtol=1e-6)


def test_the_gradient_of_the_exact_trace_is_exact():
    gradient = jax.grad(lambda a: estimators.trace(a, KEY, matvecs=12).value)(
        jnp.asarray(positive(12))
    )
    np.testing.assert_array_equal(gradient, np.eye(12))


def test_vectors_may_be_any_tree():
    def product(v):
        return {"a": 2 * v["a"] + v["b"], "b": 3 * v["b"] - v["a"].sum()}

    operator = FunctionOperator(product, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(())})
    np.testing.assert_allclose(estimators.trace(operator, KEY, matvecs=7).value, 15)


def test_an_empty_operator_has_trace_zero():
    got = estimators.trace(jnp.zeros((0, 0)), KEY, matvecs=3)
    assert got.value == 0 and got.matvecs == 0


def test_a_negative_diagonal_shows_that_an_operator_is_not_positive_semidefinite():
    matrix = jnp.diag(jnp.asarray([1.0, -2.0, 3.0]))
    got = estimators.trace(MatrixOperator(matrix, positive_semidefinite=True), KEY, matvecs=3)
    assert got.value == 2 and not got.tags_hold
    assert estimators.trace(MatrixOperator(matrix, symmetric=True), KEY, matvecs=3).tags_hold


def test_the_method_is_chosen_by_tags_and_budget():
    free = MatrixOperator(jnp.eye(100), positive_semidefinite=True)
    other = MatrixOperator(jnp.eye(100), symmetric=True)
    assert [type(choose(free, m)) for m in (1, 7, 8, 90)] == [
        Hutchinson,
        Hutchinson,
        XNysTrace,
        XNysTrace,
    ]
    assert [type(choose(other, m)) for m in (1, 19, 20, 90)] == [
        Hutchinson,
        Hutchinson,
        XTrace,
        XTrace,
    ]
    large = FunctionOperator(lambda v: v, jax.ShapeDtypeStruct((10**9,), jnp.float32))
    assert isinstance(choose(large, 100), Hutchinson)


def test_the_chosen_method_is_the_one_that_does_the_work():
    operator = MatrixOperator(positive(60), positive_semidefinite=True)
    chosen = estimators.trace(operator, KEY, matvecs=30)
    named = estimators.trace(operator, KEY, matvecs=30, method=XNysTrace())
    assert chosen.value == named.value and chosen.matvecs == 30
    assert abs(chosen.value - np.trace(positive(60))) < 5 * chosen.standard_error


def test_fewer_products_than_the_method_can_do_with_are_refused():
    with pytest.raises(
        ValueError, match=r"`matvecs` is too small[\s\S]*matvecs >= 10[\s\S]*matvecs=9"
    ):
        estimators.trace(jnp.eye(50), KEY, matvecs=9, method=XTrace())
    with pytest.raises(ValueError, match=r"`max_matvecs` is too small[\s\S]*max_matvecs >= 10"):
        estimators.trace(jnp.eye(50), KEY, matvecs=9, max_matvecs=9, method=XTrace())
    with pytest.raises(ValueError, match=r"`matvecs` is too small[\s\S]*matvecs >= 5"):
        estimators.trace(jnp.eye(50), KEY, matvecs=4)


def test_a_tiny_operator_needs_no_more_products_than_it_has_rows():
    for n in (1, 2, 3):
        assert estimators.trace(2 * jnp.eye(n), KEY, matvecs=n, method=XTrace()).value == 2 * n


def test_a_method_for_semidefinite_operators_refuses_any_other():
    text = r"XNysTrace needs a positive semidefinite operator[\s\S]*instead: [\s\S]*positive_semidefinite=True"
    with pytest.raises(ValueError, match=text):
        estimators.trace(jnp.eye(50), KEY, matvecs=10, method=XNysTrace())
    with pytest.raises(ValueError, match=text):
        estimators.trace(jnp.eye(50), KEY, rtol=0.1, method=XNysTrace())


def clamped_by_jax(matrix, k):
    """The line that made a tracer of a Python int."""
    k = jnp.minimum(jnp.maximum(k, 1), matrix.shape[0])
    return inspect.unwrap(estimators.trace)(matrix, KEY, matvecs=k)


def clamped_by_python(matrix, k):
    """As it should be."""
    k = min(max(k, 1), matrix.shape[0])
    return estimators.trace(matrix, KEY, matvecs=k)


@pytest.mark.parametrize(
    "transform", [filter_jit, lambda f: lambda *args: filter_eval_shape(f, *args)]
)
def test_a_budget_clamped_by_jax_is_explained_and_one_clamped_by_python_works(transform):
    matrix = jnp.asarray(positive(40))
    with pytest.raises(
        TracedShapeError, match=r"Python's `min`, `max` and `int` instead of `jnp.minimum`"
    ):
        transform(clamped_by_jax)(matrix, 1000)
    assert transform(clamped_by_python)(matrix, 1000).value.shape == ()
    np.testing.assert_allclose(
        filter_jit(clamped_by_python)(matrix, 1000).value, np.trace(matrix), rtol=1e-5
    )


def test_outside_of_a_transformation_a_budget_clamped_by_jax_is_a_number():
    assert clamped_by_jax(jnp.eye(40), 1000).value == 40


def test_shapes_are_known_without_any_work():
    got = filter_eval_shape(estimators.trace, jnp.eye(40), KEY, matvecs=7)
    assert got.value.shape == () and got.value.dtype == jnp.float32
    got = filter_eval_shape(estimators.trace, jnp.eye(40, dtype=complex), KEY, matvecs=7)
    assert got.value.dtype == jnp.complex64 and got.standard_error.dtype == jnp.float32


def test_jit_and_vmap_over_keys_and_operators_agree_with_single_calls():
    matrices = jnp.stack([jnp.asarray(positive(40, seed)) for seed in range(3)])
    keys = jax.random.split(KEY, 3)

    def estimate(matrix, key):
        return estimators.trace(matrix, key, matvecs=10).value

    single = jnp.stack([estimate(a, k) for a, k in zip(matrices, keys, strict=True)])
    for mapped in (jax.vmap(estimate), jax.jit(jax.vmap(estimate)), filter_vmap(estimate)):
        np.testing.assert_allclose(mapped(matrices, keys), single, rtol=1e-5)
    over_keys = jax.vmap(estimate, in_axes=(None, 0))(matrices[0], keys)
    np.testing.assert_allclose(over_keys[0], single[0], rtol=1e-5)
    assert len(set(np.asarray(over_keys))) == 3


def test_what_is_no_operator_is_refused():
    with pytest.raises(
        TypeError, match=r"a function needs an example[\s\S]*trace\(operator, key\)"
    ):
        estimators.trace(lambda v: v, KEY, matvecs=3)
