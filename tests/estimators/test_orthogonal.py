"""Orthonormal bases: as good as Householder's, whatever the block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.estimators._orthogonal import orthonormal, power_of_two

N, K = 60, 12
DTYPES = [np.float32, np.float64, np.complex64]
compiled = jax.jit(orthonormal)


def block(smallest, seed=0):
    """A block with singular values from 1 down to `smallest`."""
    rng = np.random.default_rng(seed)
    u, v = (np.linalg.qr(rng.normal(size=(m, K)) + 1j * rng.normal(size=(m, K)))[0] for m in (N, K))
    return (u * np.geomspace(1, smallest, K)) @ v


def blocks():
    good = block(1.0)
    deficient = good.copy()
    deficient[:, 5:] = good[:, :1] @ np.arange(1, 8)[None, :]
    hole = good.copy()
    hole[:, 3] = 0
    double = good.copy()
    double[:, 7] = good[:, 2]
    uneven = good * np.geomspace(1, 1e-12, K)
    cases = {
        "orthonormal": good,
        "condition 1e3": block(1e-3),
        "condition 1e6": block(1e-6),
        "condition 1e9": block(1e-9),
        "condition 1e16": block(1e-16),
        "rank one": deficient,
        "a zero column": hole,
        "equal columns": double,
        "columns of very different size": uneven,
        "zero": np.zeros_like(good),
    }
    scales = {"tiny": good * 1e-30, "huge": block(1e-6) * 1e30}
    return cases | scales


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_basis_is_orthonormal_and_the_factor_is_right_for_every_block(dtype):
    with jax.enable_x64(True):
        eps = np.finfo(dtype).eps
        for name, case in blocks().items():
            y = (case if np.issubdtype(dtype, np.complexfloating) else case.real).astype(dtype)
            q, r = (np.asarray(x) for x in compiled(jnp.asarray(y)))
            wide = np.complex128
            q, r, y = q.astype(wide), r.astype(wide), y.astype(wide)
            assert np.linalg.norm(q.conj().T @ q - np.eye(K)) < 30 * eps, name
            assert np.linalg.norm(q @ r - y) <= 30 * eps * np.linalg.norm(y), name
            assert np.all(np.tril(r, -1) == 0), name


@pytest.mark.parametrize("size", [200, 2000])
def test_columns_have_length_one_where_one_element_is_much_larger_than_the_others(size):
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (size, K))
    signs[0] *= 1001
    q, r = compiled(signs.astype(np.float32))
    wide, signs = np.asarray(q, np.float64), signs.astype(np.float32)
    lengths = np.sum(wide**2, axis=0)
    np.testing.assert_allclose(lengths, 1, atol=1e-6 * (size / 200) ** 0.5)
    np.testing.assert_allclose(q @ r, signs, atol=1e-6 * 1001)


def test_columns_that_are_not_used_do_not_change_the_others():
    y = jnp.asarray(block(1e-3).real, jnp.float32)
    mask = jnp.arange(K) < 7
    q, r = compiled(jnp.where(mask[None, :], y, 0), mask)
    alone_q, alone_r = compiled(y[:, :7])
    np.testing.assert_allclose(q[:, :7], alone_q, atol=1e-4)
    np.testing.assert_allclose(r[:7, :7], alone_r, atol=1e-5)
    assert not q[:, 7:].any()
    np.testing.assert_array_equal(r[7:], np.eye(K)[7:])
    np.testing.assert_array_equal(r[:, 7:], np.eye(K)[:, 7:])


def test_unused_columns_are_zero_where_used_ones_are_dependent():
    y = np.zeros((N, K), np.float32)
    y[:, 0] = 1
    y[:, 2] = 2
    q, r = compiled(jnp.asarray(y), jnp.arange(K) < 4)
    np.testing.assert_allclose(q[:, :4].T @ q[:, :4], np.eye(4), atol=1e-5)
    np.testing.assert_allclose(q[:, :4] @ r[:4, :4], y[:, :4], atol=1e-5)
    assert not q[:, 4:].any()


def test_a_batch_of_blocks_of_different_condition_is_right():
    y = jnp.stack([jnp.asarray(block(s).real, jnp.float32) for s in (1.0, 1e-6, 1e-12)])
    q, r = jax.jit(jax.vmap(orthonormal))(y)
    np.testing.assert_allclose(q.mT @ q, np.broadcast_to(np.eye(K), (3, K, K)), atol=1e-5)
    np.testing.assert_allclose(q @ r, y, atol=1e-6)


def test_the_power_of_two_is_of_the_size_of_the_largest_element():
    assert power_of_two(jnp.asarray([[0.3, -5.0]], jnp.float32)) == 4
    assert power_of_two(jnp.asarray([[1e-30 + 0j]], jnp.complex64)) == np.float32(2.0**-100)
    assert power_of_two(jnp.zeros((2, 3), jnp.float32)) == 1
    assert power_of_two(jnp.zeros((2, 0), jnp.float32)) == 1
    assert jnp.isfinite(power_of_two(jnp.asarray([jnp.nan, jnp.inf], jnp.float32)))
