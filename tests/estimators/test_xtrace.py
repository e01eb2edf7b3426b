"""`XTrace`: leave-one-out as defined, exact where it can be, unbiased, honest, differentiable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.estimators._naive import left_out, mean_and_variance, with_basis
from tests.estimators._spectra import SPECTRA, errors_of, rotated, symmetric
from vernal.estimators import Budget, MatrixOperator, Orthogonal, Signs, XNysTrace, XTrace, trace

METHOD = XTrace()
SEEDS = 200


def matrix_of_kind(kind, n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n)) * 0.8 ** np.arange(n)
    if "complex" in kind:
        x = x + 1j * rng.normal(size=(n, n)) * 0.8 ** np.arange(n)
    return x if "any" in kind else x + x.conj().T


def probes_for(matrix, k, seed=1):
    rng = np.random.default_rng(seed)
    real = rng.normal(size=(len(matrix), k))
    if not np.iscomplexobj(matrix):
        return real
    return (real + 1j * rng.normal(size=real.shape)) / 2**0.5


@jax.jit
def from_sketch(operator, probes):
    return METHOD.from_sketch(operator, probes, operator.matmul(probes), probes.shape[1])


@pytest.mark.parametrize("kind", ["real any", "real Hermitian", "complex any", "complex Hermitian"])
def test_value_and_variance_are_those_of_one_factorisation_for_every_estimate(kind):
    matrix = matrix_of_kind(kind, 40)
    probes = probes_for(matrix, 7)
    value, variance = mean_and_variance(*left_out(with_basis, matrix, probes))
    with jax.enable_x64(True):
        operator = MatrixOperator(jnp.asarray(matrix), symmetric="Hermitian" in kind)
        outcome = from_sketch(operator, jnp.asarray(probes))
        np.testing.assert_allclose(outcome.value, value, rtol=1e-10)
        np.testing.assert_allclose(outcome.variance, variance, rtol=1e-8)
        assert bool(outcome.consistent)
        assert outcome.matvecs == 14
        assert jnp.iscomplexobj(outcome.value) == (kind == "complex any")


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8], ids=["one", "small", "large"])
def test_low_rank_zero_and_multiples_of_the_identity_are_exact_at_every_scale(scale):
    n, rng = 60, np.random.default_rng(0)
    u, v = rng.normal(size=(2, n, 4))
    low = u @ v.T
    truth = np.trace(low)
    probes = jnp.asarray(probes_for(low, 9), jnp.float32)
    for matrix, exact, size in (
        (low, truth, np.linalg.norm(low, "nuc")),
        (np.eye(n), n, n),
        (-3 * np.eye(n), -3 * n, 3 * n),
        (np.zeros((n, n)), 0, 0),
    ):
        outcome = from_sketch(MatrixOperator(jnp.asarray(scale * matrix, jnp.float32)), probes)
        assert abs(outcome.value - scale * exact) <= 2e-6 * scale * size
        assert jnp.sqrt(outcome.variance) <= 2e-6 * scale * size


def test_the_scale_of_the_operator_changes_nothing():
    matrix = matrix_of_kind("real any", 40)
    probes = probes_for(matrix, 7)
    with jax.enable_x64(True):
        outcomes = [
            from_sketch(MatrixOperator(jnp.asarray(matrix * scale)), jnp.asarray(probes))
            for scale in (1.0, 1e-100, 1e100)
        ]
        values = [o.value * s for o, s in zip(outcomes, (1.0, 1e100, 1e-100), strict=True)]
        errors = [o.variance**0.5 * s for o, s in zip(outcomes, (1.0, 1e100, 1e-100), strict=True)]
        np.testing.assert_allclose(values, values[0], rtol=1e-12)
        np.testing.assert_allclose(errors, errors[0], rtol=1e-10)


def test_probes_that_are_not_used_change_nothing():
    operator = MatrixOperator(jnp.asarray(matrix_of_kind("real any", 40), jnp.float32))
    key = jax.random.key(3)

    @jax.jit
    def shared(used):
        return METHOD.estimate(operator, key, Budget(20, used))

    alone = jax.jit(lambda: METHOD.estimate(operator, key, Budget(11, 11)))()
    outcome = shared(11)
    assert outcome.matvecs == alone.matvecs == 10
    np.testing.assert_allclose(outcome.value, alone.value, rtol=1e-5)
    np.testing.assert_allclose(outcome.variance, alone.variance, rtol=1e-4)
    np.testing.assert_allclose(outcome.degrees_of_freedom, alone.degrees_of_freedom, rtol=1e-3)
    assert bool(jnp.isfinite(shared(4).variance))


@pytest.mark.parametrize(
    "method", [METHOD, XTrace(probes=Signs(), resphered=False)], ids=["normal", "signs"]
)
def test_the_estimate_is_unbiased_for_a_nonsymmetric_operator(method):
    matrix = matrix_of_kind("real any", 24)
    operator = MatrixOperator(jnp.asarray(matrix, jnp.float32))
    keys = jax.random.split(jax.random.key(0), 2000)
    budget = Budget(8, 8)
    run = jax.jit(
        lambda keys: lax.map(lambda key: method.estimate(operator, key, budget).value, keys)
    )
    errors = np.asarray(run(keys)) - np.trace(matrix)
    assert abs(errors.mean()) < 3.5 * errors.std() / len(errors) ** 0.5


def test_a_tag_that_is_false_gives_the_plain_estimate_from_the_same_products():
    matrix = matrix_of_kind("real any", 40)
    probes = probes_for(matrix, 7)
    operator = MatrixOperator(jnp.asarray(matrix, jnp.float32), symmetric=True)
    outcome = from_sketch(operator, jnp.asarray(probes, jnp.float32))
    forms = np.sum(probes * (matrix @ probes), axis=0)
    assert not outcome.consistent
    np.testing.assert_allclose(outcome.value, forms.mean(), rtol=1e-4)
    np.testing.assert_allclose(outcome.variance, forms.var(ddof=1) / 7, rtol=1e-4)
    assert outcome.degrees_of_freedom == 6


def test_the_derivative_is_unbiased_and_as_good_as_the_estimate_where_the_direction_is_the_operator():
    n, m, seeds = 40, 16, 300
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(symmetric(0.7 ** np.arange(n)), jnp.float32)
    other = jnp.asarray(rng.normal(size=(n, n)), jnp.float32)

    def value(weights, key):
        operator = MatrixOperator(matrix + weights[0] * matrix + weights[1] * other)
        return trace(operator, key, matvecs=m, method=METHOD).value

    zero = jnp.zeros(2)
    keys = jax.random.split(jax.random.key(0), seeds)
    gradient = jax.jit(lambda keys: lax.map(lambda key: jax.grad(value)(zero, key), keys))(keys)
    errors = np.asarray(gradient) - np.array([np.trace(matrix), np.trace(other)])
    spread = errors.std(axis=0)
    assert np.all(np.abs(errors.mean(axis=0)) < 3.5 * spread / seeds**0.5)
    plain = (2 / m * np.sum(np.asarray(other + other.T) ** 2) / 4) ** 0.5
    assert spread[1] < 1.7 * plain
    assert spread[0] < 0.05 * np.trace(matrix)
    direction = jax.jit(
        lambda key: jax.jvp(lambda w: value(w, key), (zero,), (jnp.asarray([0.0, 1.0]),))[1]
    )
    np.testing.assert_allclose(direction(keys[0]), gradient[0, 1], rtol=1e-3)


def test_it_works_for_a_batch_of_keys_and_of_operators():
    matrices = jnp.stack(
        [jnp.asarray(matrix_of_kind("real any", 24, seed), jnp.float32) for seed in range(2)]
    )
    keys = jax.random.split(jax.random.key(0), 2)

    def value(matrix, key):
        return trace(matrix, key, matvecs=8, method=METHOD).value

    both = jax.jit(jax.vmap(value))(matrices, keys)
    one = [value(matrix, key) for matrix, key in zip(matrices, keys, strict=True)]
    np.testing.assert_allclose(both, jnp.stack(one), rtol=1e-4)


def test_signs_cannot_be_resphered():
    with pytest.raises(ValueError, match="signs cannot be resphered"):
        XTrace(probes=Signs())


@pytest.mark.parametrize("method", [XTrace, XNysTrace])
def test_probes_that_depend_on_each_other_are_refused(method):
    with pytest.raises(ValueError, match="(?s)the probes depend on each other.*Orthogonal"):
        method(probes=Orthogonal())


@pytest.mark.slow
def test_the_error_is_honest_on_every_spectrum():
    operators = {}
    for name in SPECTRA:
        operator = rotated(name, 200, jnp.float32)
        operators[name] = operator, float(np.sum(np.asarray(operator.eigenvalues, np.float64)))
    # 93%, less two standard deviations of the number of intervals.
    least = 0.93 - 2 * (0.07 / SEEDS) ** 0.5
    for matvecs in (20, 60):
        for name, errors in errors_of(METHOD, operators, matvecs, SEEDS, most=60).items():
            assert 0.8 <= errors.ratio <= 1.5, (name, matvecs, errors)
            assert errors.inside >= least, (name, matvecs, errors)
            assert abs(errors.bias) < 4, (name, matvecs, errors)
