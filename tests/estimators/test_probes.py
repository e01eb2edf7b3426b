"""Probes: second moments, how forms vary, dtypes, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import estimators, linalg
from vernal.estimators import Normal, Probes, Rademacher, Sphere, Steinhaus

REAL = [Rademacher(), Normal(), Sphere()]
COMPLEX = [*REAL, Steinhaus()]
CASES = [(p, jnp.float32) for p in REAL] + [(p, jnp.complex64) for p in COMPLEX]


def names(case):
    return type(case).__name__ if isinstance(case, Probes) else jnp.dtype(case).name


def many(probes, size, count, dtype):
    return np.asarray(probes.draw(jax.random.key(0), size, count, dtype))


@pytest.mark.parametrize(("probes", "dtype"), CASES, ids=names)
@pytest.mark.sample(3)
def test_elements_are_uncorrelated_and_of_unit_variance(probes, dtype):
    w = many(probes, 5, 20_000, dtype).astype(np.complex128)
    products = w[:, None, :] * w[None, :, :].conj()
    error = np.abs(products.mean(axis=-1) - np.eye(5))
    assert np.all(error <= 4.5 * products.std(axis=-1) / 20_000**0.5 + 1e-6)
    # Each half of the distribution has half of the weight.
    assert np.all(np.abs(w.mean(axis=-1)) < 4.5 / 20_000**0.5)


def variance_of_forms(probes, matrix, dtype):
    """The formulas of the docstrings, for Hermitian matrices; real signs see the real part."""
    n, all_of_it = len(matrix), np.sum(np.abs(matrix) ** 2)
    degree = 1 if np.issubdtype(dtype, np.complexfloating) else 2
    if isinstance(probes, Rademacher):
        return 2 * (np.sum(matrix.real**2) - np.sum(np.diagonal(matrix.real) ** 2))
    if isinstance(probes, Steinhaus):
        return all_of_it - np.sum(np.abs(np.diagonal(matrix)) ** 2)
    if isinstance(probes, Sphere):
        return degree * n / (n + degree) * (all_of_it - np.trace(matrix).real ** 2 / n)
    return degree * all_of_it


@pytest.mark.parametrize(("probes", "dtype"), CASES, ids=names)
@pytest.mark.sample(3)
def test_forms_and_their_slopes_vary_as_the_formula_says(probes, dtype):
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=(6, 6))
    if dtype == jnp.complex64:
        matrix = matrix + 1j * rng.normal(size=(6, 6))
    matrix = (matrix + matrix.conj().T) / 2 + np.eye(6)
    w = many(probes, 6, 20_000, dtype)
    products = matrix.astype(w.dtype) @ w
    forms = np.sum(w.conj() * products, axis=0).real
    slopes = np.asarray(probes.slopes(jnp.asarray(w), jnp.asarray(products)))
    truth = variance_of_forms(probes, matrix, dtype)
    np.testing.assert_allclose(forms.var(), truth, rtol=0.07)
    seen = np.sum(slopes.var(axis=1))
    if isinstance(probes, Rademacher) and dtype == jnp.complex64:
        # They see the imaginary part of the matrix, too.
        assert seen > truth
    else:
        np.testing.assert_allclose(seen, truth, rtol=0.03)


@pytest.mark.parametrize("size", [1, 31, 32, 100])
def test_signs_are_one_or_minus_one_for_every_size(size):
    signs = np.asarray(Rademacher().draw(jax.random.key(0), size, 7, jnp.float32))
    assert signs.shape == (size, 7) and np.all(np.abs(signs) == 1)


def test_bits_of_signs_are_independent():
    # Products of four different elements of a vector, two of them from one word of random bits.
    signs = np.asarray(Rademacher().draw(jax.random.key(1), 64, 10_000, jnp.float32))
    for four in ([0, 1, 2, 3], [0, 31, 32, 63], [5, 6, 37, 38], [0, 8, 16, 24]):
        assert abs(np.prod(signs[four], axis=0).mean()) < 4.5 / 10_000**0.5
    assert abs(signs.mean()) < 4.5 / signs.size**0.5


@pytest.mark.parametrize("probes", [Rademacher(), Normal(), Sphere()], ids=names)
def test_the_first_columns_are_the_same_however_many_are_drawn(probes):
    draw = jax.jit(probes.draw, static_argnums=(1, 2, 3))
    many, few = (draw(jax.random.key(2), 50, k, jnp.float32) for k in (20, 7))
    np.testing.assert_allclose(many[:, :7], few, atol=1e-5)


@pytest.mark.parametrize("probes", COMPLEX, ids=names)
def test_probes_have_the_dtype_of_the_operator(probes):
    dtypes = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128]
    with jax.enable_x64(True):
        for dtype in dtypes[0 if probes in REAL else 4 :]:
            key = jax.random.key(0)
            drawn = jax.eval_shape(lambda key, dtype=dtype: probes.draw(key, 40, 3, dtype), key)
            assert drawn.dtype == dtype and drawn.shape == (40, 3)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=names)
def test_probes_of_low_precision_are_drawn_in_single(dtype):
    low, single = (Normal().draw(jax.random.key(3), 400, 3, d) for d in (dtype, jnp.float32))
    assert jnp.array_equal(low, single.astype(dtype))


def test_probes_have_double_precision_where_it_is_on():
    with jax.enable_x64(True):
        lengths = jnp.sum(Sphere().draw(jax.random.key(0), 50, 2, jnp.float64) ** 2, axis=0)
        np.testing.assert_allclose(lengths, 50, rtol=1e-14)


@pytest.mark.parametrize("probes", [Steinhaus()], ids=names)
def test_complex_probes_are_refused_for_a_real_operator(probes):
    with pytest.raises(TypeError, match="Steinhaus probes are complex, but the operator is real"):
        probes.draw(jax.random.key(0), 5, 2, jnp.float32)
    with pytest.raises(TypeError, match="Steinhaus probes are complex, but the operator is real"):
        method = estimators.Hutchinson(probes)
        estimators.trace(jnp.ones((50, 50)), jax.random.key(0), matvecs=10, method=method)


def test_a_distribution_of_ones_own_needs_only_draw():
    class Sparse(Probes):
        """Elements of one of three values; the forms say how they vary."""

        def draw(self, key, size, count, dtype):
            kinds = jax.random.randint(key, (size, count), 0, 6)
            return jnp.sqrt(jnp.asarray(3, dtype)) * jnp.asarray([1, -1, 0, 0, 0, 0], dtype)[kinds]

    matrix = jnp.diag(jnp.arange(1.0, 101)) + 1.0
    operator = linalg.MatrixOperator(matrix, symmetric=True)
    method = estimators.Hutchinson(Sparse())
    estimate = estimators.trace(operator, jax.random.key(0), matvecs=60, method=method)
    assert abs(float(estimate.value) - 5150) < 4 * float(estimate.standard_error)
