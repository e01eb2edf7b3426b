"""Lanczos' recurrence and its derivatives: against dense algebra, finite differences, and each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.linalg import FunctionOperator, MatrixOperator, lanczos

SIZE, STEPS = 12, 5


def hermitian(rng, dtype):
    x = rng.normal(size=(SIZE, SIZE))
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.normal(size=(SIZE, SIZE))
    return jnp.asarray((x + x.conj().T).astype(dtype))


def vector(rng, dtype, shape=(SIZE,)):
    x = rng.normal(size=shape)
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * rng.normal(size=shape)
    return jnp.asarray(x.astype(dtype))


@functools.partial(jax.jit, static_argnums=2)
def arrays(matrix, start, steps=STEPS):
    found = lanczos(MatrixOperator(matrix, symmetric=True), start, steps)
    return found.basis, found.diagonal, found.offdiagonal, found.norm


def paired(cotangents, tangents):
    """JAX's pairing: the real part of the sum of products."""
    leaves = zip(jax.tree.leaves(cotangents), jax.tree.leaves(tangents), strict=True)
    return sum(float(np.real(np.sum(np.asarray(a) * np.asarray(b)))) for a, b in leaves)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_the_basis_is_orthonormal_and_makes_the_operator_tridiagonal(dtype):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        matrix, start = hermitian(rng, dtype), vector(rng, dtype)
        found = lanczos(MatrixOperator(matrix, symmetric=True), start, STEPS)
        basis = np.asarray(found.basis)
        np.testing.assert_allclose(basis.conj().T @ basis, np.eye(STEPS), atol=1e-14)
        small = basis.conj().T @ np.asarray(matrix) @ basis
        np.testing.assert_allclose(small, found.matrix(), atol=1e-13)
        np.testing.assert_allclose(basis[:, 0] * float(found.norm), start, rtol=1e-14)
        assert found.rank == STEPS and found.asymmetry < 1e-13
        everything = lanczos(MatrixOperator(matrix, symmetric=True), start, SIZE)
        np.testing.assert_allclose(
            np.linalg.eigvalsh(everything.matrix()), np.linalg.eigvalsh(matrix), atol=1e-12
        )


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_derivatives_are_those_of_finite_differences_and_adjoint_to_each_other(dtype):
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        matrix, start = hermitian(rng, dtype), vector(rng, dtype)
        dots = hermitian(rng, dtype), vector(rng, dtype)
        out, out_dots = jax.jit(lambda x, t: jax.jvp(arrays, x, t))((matrix, start), dots)
        step = jnp.asarray(1e-6, dtype)
        ahead = arrays(matrix + step * dots[0], start + step * dots[1])
        behind = arrays(matrix - step * dots[0], start - step * dots[1])
        for dot, a, b in zip(out_dots, ahead, behind, strict=True):
            np.testing.assert_allclose(dot, (np.asarray(a) - np.asarray(b)) / 2e-6, atol=1e-7)
        cotangents = tuple(vector(rng, x.dtype, x.shape) for x in out)
        pulled = jax.jit(lambda x, ct: jax.vjp(arrays, *x)[1](ct))((matrix, start), cotangents)
        np.testing.assert_allclose(paired(cotangents, out_dots), paired(pulled, dots), rtol=1e-12)


def test_second_derivatives_agree_with_finite_differences():
    with jax.enable_x64(True):
        rng = np.random.default_rng(2)
        matrix, start = hermitian(rng, "float64"), vector(rng, "float64")
        way = hermitian(rng, "float64")

        def loss(t):
            basis, diagonal, off, _ = arrays(matrix + t * way, start, 4)
            return jnp.sum(diagonal**2) + jnp.sum(off**3) + jnp.sum(basis**4)

        at, h = jnp.asarray(0.0), 1e-5
        slope = jax.grad(loss)
        second = jax.jit(
            lambda t: (slope(t), jax.grad(slope)(t), jax.jvp(slope, (t,), (t + 1,))[1])
        )
        want = (second(at + h)[0] - second(at - h)[0]) / (2 * h)
        np.testing.assert_allclose(second(at)[1:], (want, want), rtol=1e-6)


def test_an_early_breakdown_leaves_zeros_and_no_nan():
    @jax.jit
    def both(matrix, start):
        ones = jax.tree.map(jnp.ones_like, (matrix, start))
        out, dots = jax.jvp(arrays, (matrix, start), ones)
        pull = jax.vjp(arrays, matrix, start)[1]
        rank = lanczos(MatrixOperator(matrix, symmetric=True), start, STEPS).rank
        return out, dots, pull(jax.tree.map(jnp.ones_like, out)), rank

    many = jnp.diag(jnp.linspace(1.0, 2.0, SIZE))
    cases = [
        (3 * jnp.eye(SIZE), jnp.ones(SIZE), 1),
        (many, jnp.zeros(SIZE).at[3].set(2.0), 1),
        (0 * many, jnp.ones(SIZE), 1),
        (many, jnp.zeros(SIZE), 0),
    ]
    for matrix, start, rank in cases:
        (basis, diagonal, off, _), dots, slopes, found = both(matrix, start)
        assert found == rank
        np.testing.assert_array_equal(off, np.zeros(STEPS - 1))
        np.testing.assert_array_equal(basis[:, rank:], np.zeros((SIZE, STEPS - rank)))
        np.testing.assert_array_equal(diagonal[1:], np.zeros(STEPS - 1))
        assert all(np.isfinite(x).all() for x in (*slopes, *dots))


def test_an_invariant_space_is_found_and_spans_all_later_vectors():
    with jax.enable_x64(True):
        matrix = jnp.diag(jnp.asarray([1.0, 2.0, 3.0] * 4))
        found = lanczos(MatrixOperator(matrix, symmetric=True), jnp.arange(1.0, 13.0), 8)
        assert found.rank == 3
        np.testing.assert_allclose(
            np.linalg.eigvalsh(found.matrix()[:3, :3]), [1.0, 2.0, 3.0], rtol=1e-12
        )


def test_the_operator_may_be_large_or_small():
    rng = np.random.default_rng(3)
    matrix, start = hermitian(rng, "float32"), vector(rng, "float32")
    basis, diagonal, *_ = arrays(matrix, start)
    for exponent in (-100, -27, 27, 100):
        scaled_basis, scaled_diagonal, *_ = arrays(matrix * 2.0**exponent, start)
        np.testing.assert_allclose(basis, scaled_basis, atol=1e-5)
        np.testing.assert_allclose(diagonal, scaled_diagonal / 2.0**exponent, atol=1e-5)


def test_trees_are_vectors_and_other_leaves_of_the_operator_stand_still():
    weights = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.asarray(5.0)}
    example = jax.tree.map(jnp.zeros_like, weights)
    count = jnp.asarray(2)

    def loss(weights):
        def fn(v):
            return jax.tree.map(lambda w, x: count.astype(x.dtype) * w * x, weights, v)

        operator = FunctionOperator(fn, example, symmetric=True)
        found = lanczos(operator, jax.tree.map(jnp.ones_like, example), 3)
        return jnp.sum(found.diagonal)

    # After all steps the diagonal's sum is the trace.
    value, slope = jax.value_and_grad(loss)(weights)
    np.testing.assert_allclose(value, 16, rtol=1e-5)
    jax.tree.map(lambda s: np.testing.assert_allclose(s, 2 * np.ones_like(s), rtol=1e-3), slope)


def test_the_adjoint_keeps_no_more_than_the_basis():
    size, steps, width = 64, 8, 4096

    def loss(theta):
        def fn(v):
            # What a product keeps is much larger than its result.
            wide = jnp.tanh(theta * jnp.ones((size, width)))
            return jnp.mean(wide, axis=1) * v

        operator = FunctionOperator(fn, jnp.zeros(size), symmetric=True)
        return jnp.sum(lanczos(operator, jnp.arange(1.0, size + 1), steps).diagonal)

    used = jax.jit(jax.grad(loss)).lower(jnp.float32(0.3)).compile().memory_analysis()
    once = size * width * 4
    assert used.temp_size_in_bytes < 4 * once


def test_a_false_tag_is_seen():
    rng = np.random.default_rng(4)
    matrix = jnp.asarray(rng.normal(size=(SIZE, SIZE)), jnp.float32)
    found = lanczos(MatrixOperator(matrix, symmetric=True), jnp.ones(SIZE), STEPS)
    assert found.asymmetry > 0.1 and np.isfinite(found.diagonal).all()


def test_it_says_what_it_cannot_do():
    operator = MatrixOperator(jnp.eye(3), symmetric=True)
    with pytest.raises(ValueError, match="not declared symmetric"):
        lanczos(jnp.eye(3), jnp.ones(3), 2)
    with pytest.raises(ValueError, match="more steps were asked for"):
        lanczos(operator, jnp.ones(3), 4)
    with pytest.raises(ValueError, match="`steps` is too small"):
        lanczos(operator, jnp.ones(3), 0)
