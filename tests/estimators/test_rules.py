"""Quadrature rules: exact for polynomials of the degrees that they are known for, and bounds of logarithms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.estimators._rules import averaged, eigen, gauss, lower_end, radau
from vernal.linalg import MatrixOperator, decompose

SIZE, STEPS = 40, 5


def rules():
    """The three rules as functions of what is integrated, the exact integral, and the starting vector's norm."""
    rng = np.random.default_rng(0)
    eigenvalues, starts = np.geomspace(0.05, 1.0, SIZE), rng.normal(size=(3, SIZE))
    operator = MatrixOperator(jnp.diag(jnp.asarray(eigenvalues)), positive_semidefinite=True)
    found = decompose(operator, jnp.asarray(starts), STEPS)
    ends = lower_end(eigen(gauss(found))[0], jnp.asarray(0.02), 1e-15)

    def integral(matrix):
        nodes, vectors = eigen(matrix)
        return lambda f: found.norm**2 * jnp.sum(vectors[:, 0] ** 2 * f(nodes), axis=-1)

    made = [integral(matrix) for matrix in (gauss(found), radau(ends, found), averaged(found))]
    return made, lambda f: np.sum(starts**2 * f(eigenvalues), axis=1), ends


def test_they_are_exact_to_their_degrees():
    with jax.enable_x64(True):
        made, exact, ends = rules()
        np.testing.assert_allclose(ends, 0.02, rtol=1e-10)
        for rule, degree in zip(made, (2 * STEPS - 1, 2 * STEPS, 2 * STEPS), strict=True):
            for power in range(degree + 1):
                np.testing.assert_allclose(
                    rule(lambda x, p=power: x**p), exact(lambda x, p=power: x**p), rtol=1e-11
                )
        power = 2 * STEPS
        assert np.all(np.abs(made[0](lambda x: x**power) / exact(lambda x: x**power) - 1) > 1e-7)


@pytest.mark.parametrize("f", [jnp.log, jnp.sqrt, lambda x: -1 / x, lambda x: -jnp.exp(-x)])
@pytest.mark.sample(3)
def test_gauss_is_not_below_and_radau_not_above(f):
    with jax.enable_x64(True):
        (above, below, _), exact, _ = rules()
        truth = exact(lambda x: np.asarray(f(jnp.asarray(x))))
        slack = 1e-12 * np.abs(truth)
        assert np.all(above(f) >= truth - slack) and np.all(below(f) <= truth + slack)


def test_the_averaged_rule_knows_the_error_of_gauss():
    with jax.enable_x64(True):
        (rule, _, second), exact, _ = rules()
        error = rule(jnp.exp) - exact(np.exp)
        np.testing.assert_allclose(rule(jnp.exp) - second(jnp.exp), error, rtol=0.05)


def test_nothing_is_left_to_say_after_a_breakdown():
    with jax.enable_x64(True):
        eigenvalues = np.repeat([1.0, 2.0, 4.0], 5)
        operator = MatrixOperator(jnp.diag(jnp.asarray(eigenvalues)), symmetric=True)
        starts = np.random.default_rng(0).normal(size=(2, 15))
        found = decompose(operator, jnp.asarray(starts), STEPS)
        for matrix in (gauss(found), averaged(found)):
            nodes, vectors = eigen(matrix)
            value = found.norm**2 * jnp.sum(vectors[:, 0] ** 2 * jnp.log(nodes), axis=-1)
            np.testing.assert_allclose(value, starts**2 @ np.log(eigenvalues), rtol=1e-12)
