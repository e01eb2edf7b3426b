"""`spectral_density`: against the eigenvalues themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.estimators import LanczosQuadrature, spectral_density
from vernal.linalg import MatrixOperator

SIZE = 80
KEY = jax.random.key(0)


def hermitian(eigenvalues, rng):
    x = rng.normal(size=(2, SIZE, SIZE))
    q = np.linalg.qr(x[0] + 1j * x[1])[0]
    matrix = (q * eigenvalues) @ q.conj().T
    return jnp.asarray((matrix + matrix.conj().T) / 2, jnp.complex64)


def test_it_is_the_smoothed_density_of_the_eigenvalues():
    eigenvalues = np.concatenate([np.linspace(-1.0, 0.0, 60), np.full(20, 2.0)])
    operator = MatrixOperator(hermitian(eigenvalues, np.random.default_rng(0)), symmetric=True)
    points = np.linspace(-2.0, 3.0, 101)
    found = spectral_density(
        operator, KEY, matvecs=900, points=points, width=0.2, method=LanczosQuadrature(steps=30)
    )
    bumps = np.exp(-(((points[:, None] - eigenvalues) / 0.2) ** 2) / 2) / (0.2 * np.sqrt(2 * np.pi))
    off = np.asarray(found.density) - bumps.mean(axis=1)
    assert found.tags_hold and found.matvecs == 900 and found.width == np.float32(0.2)
    assert np.all(np.abs(off) < 5 * np.asarray(found.standard_error) + 1e-3)
    # The errors are of the right size, not only large enough.
    assert 0.3 < np.sqrt(np.mean(off**2) / np.mean(np.asarray(found.standard_error) ** 2)) < 3


@pytest.mark.parametrize("kind", ["flat", "identity", "zero"])
@pytest.mark.sample(3)
def test_the_default_points_hold_the_whole_density(kind):
    eigenvalues = {
        "flat": np.linspace(1.0, 4.0, SIZE),
        "identity": np.full(SIZE, 3.0),
        "zero": np.zeros(SIZE),
    }[kind]
    operator = MatrixOperator(jnp.diag(jnp.asarray(eigenvalues, jnp.float32)), symmetric=True)
    found = jax.jit(lambda key: spectral_density(operator, key, matvecs=60, points=300))(KEY)
    assert found.points.shape == found.density.shape == (300,)
    np.testing.assert_allclose(jnp.trapezoid(found.density, found.points), 1.0, atol=2e-3)
    assert found.points[0] < eigenvalues.min() and found.points[-1] > eigenvalues.max()


def test_it_says_what_it_cannot_do():
    operator = MatrixOperator(jnp.eye(9), symmetric=True)
    with pytest.raises(ValueError, match="must be a one-dimensional array"):
        spectral_density(operator, KEY, matvecs=15, points=jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="`points` is too small"):
        spectral_density(operator, KEY, matvecs=15, points=1)
    with pytest.raises(ValueError, match="`width` must be positive"):
        spectral_density(operator, KEY, matvecs=15, width=0.0)
    with pytest.raises(ValueError, match="not declared symmetric"):
        spectral_density(jnp.eye(9), KEY, matvecs=15)

    def value(scale):
        scaled = MatrixOperator(scale * jnp.eye(9), symmetric=True)
        return spectral_density(scaled, KEY, matvecs=15, points=5).density.sum()

    with pytest.raises(RuntimeError, match="spectral density cannot be differentiated"):
        jax.grad(value)(1.0)
