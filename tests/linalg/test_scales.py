"""Operators and vectors of extreme size, and vectors that do not belong to the operator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import linalg

A = np.random.default_rng(0).normal(size=(20, 30))
P = np.random.default_rng(1).normal(size=(60, 60))
P = P @ P.T / 60 + np.eye(60)
SINGLE = [1e-30, 1e-25, 1e-15, 1e15, 1e30]
DOUBLE = [1e-170, 1e-20, 1e20, 1e170]


def near(bits, scale):
    return {"rtol": 1e-4 if bits == 32 else 1e-8, "atol": 1e-4 * scale}


CASES = [*((32, scale) for scale in SINGLE), *((64, scale) for scale in DOUBLE)]


@pytest.mark.parametrize(("bits", "scale"), CASES)
def test_singular_values_of_any_size(bits, scale):
    with jax.enable_x64(bits == 64):
        matrix = jnp.asarray(A * scale, f"float{bits}")
        found = linalg.svds(matrix, 3)
        want = np.linalg.svd(A, compute_uv=False)[:3] * scale
        assert found.tolerance_met and found.is_finite
        np.testing.assert_allclose(found.values, want, rtol=1e-4)
        assert np.all(np.abs(found.values - want) <= np.asarray(found.errors, float))
        assert np.all(np.asarray(found.errors, float) < 1e-3 * want)
        left, values, right = map(np.asarray, (found.left, found.values, found.right))
        back = (left.T * values) @ right
        u, s, v = np.linalg.svd(A)
        np.testing.assert_allclose(
            back / scale, (u[:, :3] * s[:3]) @ v[:3], atol=2e-2 if bits == 32 else 1e-2
        )


@pytest.mark.parametrize(("bits", "scale"), CASES)
def test_the_derivative_of_a_singular_value_does_not_depend_on_the_size(bits, scale):
    with jax.enable_x64(bits == 64):
        matrix = jnp.asarray(A * scale, f"float{bits}")
        found = jax.grad(lambda m: linalg.svds(m, 1).values[0])(matrix)
        u, _, v = np.linalg.svd(A)
        np.testing.assert_allclose(found, np.outer(u[:, 0], v[0]), atol=2e-3)


@pytest.mark.parametrize(("bits", "scale"), CASES)
@pytest.mark.parametrize("positive", [True, False])
def test_right_sides_of_any_size(bits, scale, positive):
    with jax.enable_x64(bits == 64):
        operator = linalg.MatrixOperator(
            jnp.asarray(P, f"float{bits}"), positive_semidefinite=positive
        )
        right = jnp.asarray(np.arange(1.0, 61.0) * scale, f"float{bits}")
        found = linalg.solve(operator, right)
        assert found.tolerance_met and found.is_finite
        want = np.linalg.solve(P, np.arange(1.0, 61.0))
        np.testing.assert_allclose(np.asarray(found.value, float) / scale, want, rtol=1e-2)
        assert 0 <= found.error < 1e-3 * np.linalg.norm(np.arange(1.0, 61.0)) * scale


@pytest.mark.parametrize(("bits", "scale"), CASES)
@pytest.mark.parametrize("positive", [True, False])
def test_the_derivative_by_a_right_side_does_not_depend_on_the_size(bits, scale, positive):
    with jax.enable_x64(bits == 64):
        operator = linalg.MatrixOperator(
            jnp.asarray(P, f"float{bits}"), positive_semidefinite=positive
        )
        right = jnp.full(60, scale, f"float{bits}")
        want = np.linalg.solve(P, np.ones(60))
        for cotangent in (1.0, scale):

            def total(b, cotangent=cotangent):
                return cotangent * linalg.solve(operator, b).value.sum()

            found = np.asarray(jax.grad(total)(right), float)
            np.testing.assert_allclose(found / cotangent, want, rtol=1e-2)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", ["line", "counted", "dense", "repeated"])
def test_exactly_symmetric_operators_hold_their_tags(name, bits):
    dense = np.random.default_rng(2).normal(size=(100, 100))
    matrices = {
        "line": np.diag(np.linspace(1, 2, 60)),
        "counted": np.diag(np.arange(100.0)),
        "dense": (dense + dense.T) / 2,
        "repeated": np.diag(np.repeat(np.arange(20.0), 5)),
    }
    with jax.enable_x64(bits == 64):
        matrix = jnp.asarray(matrices[name], f"float{bits}")
        skew = jnp.asarray(dense - dense.T, f"float{bits}")[: len(matrix), : len(matrix)]
        find = jax.jit(
            lambda m, key: linalg.eigsh(linalg.MatrixOperator(m, symmetric=True), 3, key=key)
        )
        for seed in range(10):
            assert find(matrix, jax.random.key(seed)).tags_hold
        for part in (1e-2, 1e-5 if bits == 64 else 1e-2):
            assert not find(matrix + part * skew, jax.random.key(0)).tags_hold


def test_a_vector_that_is_not_the_operators_is_refused():
    operator = linalg.MatrixOperator(jnp.diag(jnp.arange(1.0, 4.0)), symmetric=True)
    for wrong in (jnp.ones(3, complex), jnp.ones(4), jnp.ones((3, 2))):
        with pytest.raises(TypeError, match="not one of those that the operator multiplies"):
            operator.mv(wrong)
        with pytest.raises(TypeError, match="not one of those that the operator multiplies"):
            operator.adjoint_mv(wrong)
    with pytest.raises(TypeError, match="not one of those that the operator multiplies"):
        operator.matmul(jnp.ones((3, 2), complex))


def test_a_numpy_array_is_no_factor_of_an_operator():
    operator = linalg.MatrixOperator(jnp.eye(3))
    with pytest.raises(
        TypeError, match=r"multiplied by, or shifted by, a number(.|\n)*operator.mv"
    ):
        np.ones(3) * operator
    np.testing.assert_array_equal((np.float32(2) * operator).mv(jnp.ones(3)), 2 * np.ones(3))


def test_a_diagonal_of_no_operators_is_refused():
    with pytest.raises(TypeError, match="no operator to put on a diagonal"):
        linalg.block_diagonal()


@pytest.mark.parametrize("scale", [2e-38, 1.9e-37, 1e-36, 1e-35, 1e-32])
def test_errors_count_what_products_lose_when_elements_are_too_small(scale):
    """XLA rounds products below 1e-38 to zero. Values off by a fifth had errors of 2e-7, and tags were accused."""
    block = np.array([[1, 0.3, 0, 0], [0.3, 1, 0, 0], [0, 0, 2, 0.1], [0, 0, 0.1, 1]])
    matrix = np.float32(scale * block)
    vector = np.arange(1.0, 5.0)
    nodes, vectors = np.linalg.eigh(np.float64(matrix))
    operator = linalg.MatrixOperator(jnp.asarray(matrix), positive_semidefinite=True)
    found = linalg.funm(jnp.sqrt, operator, jnp.asarray(vector, jnp.float32))
    want = vectors * np.sqrt(nodes) @ vectors.T @ vector
    assert found.tags_hold and found.is_finite
    assert np.linalg.norm(np.float64(found.value) - want) <= float(found.error)
    general = linalg.funm(lambda m: m, jnp.asarray(matrix), jnp.asarray(vector, jnp.float32))
    lost = np.linalg.norm(np.float64(general.value) - np.float64(matrix) @ vector)
    assert lost <= float(general.error)
    for result in (linalg.eigsh(operator, 2), linalg.svds(operator, 2)):
        distance = np.abs(np.float64(result.values) - nodes[::-1][:2])
        assert np.all(distance <= np.asarray(result.errors, float) + 1e-6 * scale)
        assert np.all(np.asarray(result.errors, float) < 5 * scale)
    even = linalg.svds(jnp.asarray(np.float32(scale * np.eye(4))), 2)
    distance = np.abs(np.float64(even.values) - np.float64(np.float32(scale)))
    assert np.all(distance <= np.asarray(even.errors, float) + 1e-6 * scale)
    assert not even.tolerance_met or scale > 1e-33
