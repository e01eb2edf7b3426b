"""As many products as a tolerance needs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from vernal import estimators
from vernal.estimators import Hutchinson, HutchPlusPlus, Normal, XNysTrace, XTrace
from vernal.estimators._adaptive_run import _DEGREES, _QUANTILES
from vernal.estimators._exact import completed_trace
from vernal.estimators._growing import CHUNK, Nested, Stream
from vernal.linalg import FunctionOperator, MatrixOperator

KEY = jax.random.key(0)


def spectral(eigenvalues: np.ndarray, seed: int = 0) -> np.ndarray:
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((eigenvalues.size,) * 2))
    return (basis * eigenvalues) @ basis.T


def adaptive(matrix, *, positive, rtol=0.0, atol=0.0, most=60, method=None, key=KEY):
    """One size and one budget wherever they do: what was compiled for one test serves the others."""
    operator = MatrixOperator(
        jnp.asarray(matrix, jnp.float32), symmetric=True, positive_semidefinite=positive
    )
    return estimators.trace(
        operator,
        key,
        rtol=jnp.asarray(rtol),
        atol=jnp.asarray(atol),
        max_matvecs=most,
        method=method,
    )


@pytest.mark.parametrize("method", [None, XNysTrace()])
def test_a_decaying_spectrum_needs_few_products(method):
    matrix = spectral(0.7 ** np.arange(100))
    got = adaptive(matrix, positive=True, rtol=1e-4, method=method)
    assert got.tolerance_met and got.matvecs <= 64
    assert abs(got.value - np.trace(matrix)) <= 1e-4 * np.trace(matrix)


@pytest.mark.parametrize("method", [None, XTrace()])
def test_deflation_pays_without_a_semidefinite_operator_too(method):
    matrix = spectral(0.7 ** np.arange(100) * np.where(np.arange(100) % 3, 1, -0.5))
    got = adaptive(matrix, positive=False, rtol=1e-2, method=method)
    assert got.tolerance_met and got.matvecs <= 60
    assert abs(got.value - np.trace(matrix)) <= 1e-2 * abs(np.trace(matrix))


@pytest.mark.parametrize("positive", [True, False])
def test_a_flat_spectrum_stops_after_the_first_chunks(positive):
    matrix = spectral(np.linspace(3, 1, 100))
    got = adaptive(matrix, positive=positive, rtol=0.05)
    assert got.tolerance_met and got.matvecs <= 2 * CHUNK
    assert abs(got.value - 200) <= 0.05 * 200


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("method", [None, Hutchinson()])
def test_where_nothing_helps_the_answer_is_exact(positive, method):
    matrix = spectral(np.linspace(3, 1, 100))
    got = adaptive(matrix, positive=positive, rtol=1e-5, most=100, method=method)
    assert got.tolerance_met and got.standard_error == 0
    np.testing.assert_allclose(got.value, 200, rtol=2e-6)
    # What was made before is part of the basis, looks included; Hutchinson alone keeps none.
    assert got.matvecs == (100 if method is None else 100 + CHUNK)


def test_a_look_at_a_grown_sketch_is_xtrace_of_its_probes():
    n, method, stream = 90, XTrace(resphered=False), Stream(KEY, Normal(), 90, jnp.complex64)
    factor = jax.random.normal(KEY, (n, n), jnp.complex64)
    operator = MatrixOperator((factor + factor.conj().T) / 2, symmetric=True)
    sketch = Nested(operator, 80, 40, method)

    @jax.jit
    def extended(kept, used, most):
        probes, count = stream.after(used, most)
        return sketch.added(kept, probes, operator.matmul(probes), used, count), used + count

    ready = jax.jit(sketch.ready)
    kept, used = extended(sketch.start(), jnp.asarray(0), jnp.asarray(16))
    kept = ready(kept, used)
    # A chunk that ends early, and one that begins in the middle.
    for most in (7, 16):
        kept, used = extended(kept, used, jnp.asarray(most))
    kept = ready(kept, used)
    assert used == 32 and kept.columns == 64 and kept.sound
    basis = kept.vectors[:, :64]
    np.testing.assert_allclose(basis.conj().T @ basis, np.eye(64), atol=1e-5)
    np.testing.assert_allclose(kept.images[:, :64], operator.matmul(basis), atol=1e-3)

    probes, products = sketch.probes(kept, used)
    drawn = jnp.concatenate([stream.chunk(0), stream.chunk(1)], axis=1)
    np.testing.assert_allclose(probes[:, :32], drawn, atol=1e-4)
    here = jax.jit(lambda kept, used: sketch.look(kept, used, 40))(kept, used)
    there = jax.jit(lambda *known: method.from_sketch(operator, *known))(probes, products, used)
    np.testing.assert_allclose(here.value, there.value, atol=1e-2)
    np.testing.assert_allclose(here.variance, there.variance, rtol=1e-2)
    assert here.consistent and there.consistent


def test_without_success_the_best_is_returned():
    matrix = spectral(np.linspace(3, 1, 100))
    got = adaptive(matrix, positive=True, rtol=1e-6)
    assert not got.tolerance_met and got.matvecs == 60
    assert abs(got.value - 200) <= 5 * got.standard_error


def test_an_absolute_tolerance_is_met():
    matrix = spectral(np.concatenate([np.ones(50), -np.ones(50)]))
    got = adaptive(matrix, positive=False, atol=10.0)
    assert got.tolerance_met and abs(got.value) <= 10
    assert adaptive(matrix, positive=False, rtol=0.1, atol=10.0).matvecs == got.matvecs


@pytest.mark.parametrize("positive", [True, False])
def test_zero_and_multiples_of_the_identity_are_exact_at_once(positive):
    for scale in (0.0, 3.0):
        got = adaptive(scale * np.eye(100), positive=positive, rtol=1e-3)
        np.testing.assert_allclose(got.value, 100 * scale, rtol=1e-5)
        assert got.tolerance_met and got.matvecs == CHUNK


def test_a_small_operator_is_known_exactly_and_a_small_budget_is_kept():
    got = estimators.trace(jnp.eye(3), KEY, rtol=0.1)
    assert got.value == 3 and got.matvecs == 3 and got.tolerance_met
    got = adaptive(spectral(np.linspace(3, 1, 100)), positive=False, rtol=1e-6, most=5)
    assert got.matvecs == 5 and not got.tolerance_met


def test_a_false_tag_is_reported():
    matrix = spectral(np.concatenate([np.full(50, 2.0), np.full(50, -1.0)]))
    got = adaptive(matrix, positive=True, rtol=0.01)
    assert not got.tags_hold and abs(got.value - 50) <= 5 * got.standard_error


# Not captured by the function: functions with equal captured values stand for each other.
TRACES: list[None] = []


def traced_product(vector: jax.Array) -> jax.Array:
    TRACES.append(None)
    return vector * jnp.arange(1.0, 101)


def test_one_compilation_serves_every_tolerance():
    operator = FunctionOperator(traced_product, jnp.zeros(100), positive_semidefinite=True)
    estimators.trace(operator, KEY, rtol=1e-2, max_matvecs=40)
    count = len(TRACES)
    estimators.trace(operator, KEY, rtol=0.5, atol=2.0, max_matvecs=40)
    assert len(TRACES) == count > 0


@pytest.mark.parametrize("positive", [True, False])
def test_the_gradient_in_the_direction_of_the_operator_is_the_value(positive):
    matrix = jnp.asarray(
        spectral(np.concatenate([np.linspace(20, 10, 4), np.full(96, 1e-2)])), jnp.float32
    )

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def value(scale, rtol):
        operator = MatrixOperator(scale * matrix, symmetric=True, positive_semidefinite=positive)
        found = estimators.trace(operator, KEY, rtol=rtol, max_matvecs=100)
        return found.value, found

    # Hutchinson is enough; deflation; the exact answer.
    for rtol, least, most in ((2.0, 16, 16), (0.02, 16, 64), (1e-6, 100, 100)):
        (got, found), gradient = value(jnp.asarray(1.0), jnp.asarray(rtol))
        assert least <= found.matvecs <= most and (found.standard_error > 0) == (most < 100)
        np.testing.assert_allclose(gradient, got, rtol=1e-3)


@pytest.mark.parametrize("used", [0, 7, 30])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
def test_a_sketch_is_completed_to_the_exact_trace(used, dtype):
    keys = jax.random.split(KEY, 2)
    matrix, probes = (
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, ((40, 40), (40, 44)), strict=True)
    )
    probes = jnp.where(jnp.arange(44)[None, :] < used, probes, 0)
    sketch = probes, matrix @ probes, jnp.asarray(used)
    got = completed_trace(MatrixOperator(matrix), KEY, sketch, jnp.asarray(True))
    np.testing.assert_allclose(got.value, jnp.trace(matrix), atol=2e-4)
    assert got.matvecs == 40


def test_a_sketch_with_equal_probes_is_made_anew():
    matrix = jax.random.normal(KEY, (40, 40))
    probes = jnp.ones((40, 5))
    got = completed_trace(
        MatrixOperator(matrix), KEY, (probes, matrix @ probes, jnp.asarray(5)), jnp.asarray(True)
    )
    np.testing.assert_allclose(got.value, jnp.trace(matrix), atol=2e-4)
    assert got.matvecs == 45


def test_the_table_of_quantiles_is_that_of_students_distribution():
    np.testing.assert_allclose(
        _QUANTILES, scipy.stats.t.ppf(0.995, 1 / np.maximum(_DEGREES, 1e-30)), rtol=1e-4
    )


def test_a_method_that_cannot_go_on_is_refused():
    with pytest.raises(
        TypeError, match=r"HutchPlusPlus cannot run until a tolerance is met[\s\S]*`standard_error`"
    ):
        estimators.trace(jnp.eye(50), KEY, rtol=0.1, method=HutchPlusPlus())


def test_too_few_products_are_refused():
    with pytest.raises(ValueError, match=r"`max_matvecs` is too small[\s\S]*max_matvecs >= 2"):
        estimators.trace(jnp.eye(50), KEY, rtol=0.1, max_matvecs=1)


@pytest.mark.slow
@pytest.mark.parametrize(("positive", "n", "seeds"), [(True, 200, 200), (False, 300, 20)])
def test_tolerances_are_met_with_no_more_products_than_hutchinson_needs(positive, n, seeds):
    sign = 1 if positive else np.where(np.arange(n) % 3, 1, -0.5)
    spectra = {
        "flat": np.linspace(3, 1, n) * sign,
        "poly": np.arange(1, n + 1.0) ** -2 * sign,
        "exp": 0.7 ** np.arange(n) * sign,
        "step": np.concatenate([np.ones(n // 20), np.full(n - n // 20, 1e-3)]) * sign,
    }
    rtols = (1e-2, 1e-4)
    if not positive:
        # Neither decays enough for a basis to pay, nor is flat enough for Hutchinson.
        spectra["slow"] = np.arange(1, n + 1.0) ** -0.5 * sign
        rtols = (1e-1, *rtols)
    keys = jax.random.split(KEY, seeds)

    def run(method):
        def one(matrix, rtol, key):
            operator = MatrixOperator(matrix, symmetric=True, positive_semidefinite=positive)
            got = estimators.trace(operator, key, rtol=rtol, max_matvecs=n, method=method)
            return got.value, got.standard_error, got.matvecs, got.tolerance_met

        return jax.jit(lambda matrix, rtol: jax.lax.map(lambda key: one(matrix, rtol, key), keys))

    with jax.enable_x64(True):
        best, plain = run(None), run(Hutchinson())
        exact = 0
        for name, eigenvalues in spectra.items():
            matrix, truth = jnp.asarray(spectral(eigenvalues)), eigenvalues.sum()
            for rtol in rtols:
                value, error, made, met = map(np.asarray, best(matrix, jnp.asarray(rtol)))
                _, _, most, _ = map(np.asarray, plain(matrix, jnp.asarray(rtol)))
                assert met.all(), (name, rtol)
                inside = np.abs(value - truth) <= rtol * abs(truth)
                assert inside.mean() >= 0.95, (name, rtol)
                assert (made <= most + CHUNK).all(), (name, rtol)
                exact += np.sum(error == 0)
        # Where the end is the exact answer, all that was made on the way is part of it.
        assert exact >= seeds


def test_the_exact_answer_is_no_work_where_it_is_not_wanted():
    run = jax.jit(lambda matrix: adaptive(matrix, positive=True, rtol=0.1, most=100).value)
    program = run.lower(jnp.eye(100)).compile().as_text()
    # XLA puts whatever does not depend on a loop in front of it.
    assert "geqrf" in program
    assert "geqrf" not in program[program.index("ENTRY") :]
