"""The spectra of Epperly, Tropp and Webber (2024), on which methods differ most, and methods run over many seeds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import stats

from vernal.estimators import Budget
from vernal.linalg import MatrixOperator, Operator

SPECTRA = {
    "flat": lambda n: np.linspace(3.0, 1.0, n),
    "poly": lambda n: np.arange(1.0, n + 1) ** -2,
    "exp": lambda n: 0.7 ** np.arange(n),
    "step": lambda n: np.where(np.arange(n) < n // 20, 1.0, 1e-3),
}


def distances(x):
    return np.abs(x[:, None] - x[None, :])


KERNELS = {
    "rbf": lambda x: np.exp(-(distances(x) ** 2) / 2),
    "matern 1/2": lambda x: np.exp(-distances(x)),
    "matern 3/2": lambda x: (1 + 3**0.5 * distances(x)) * np.exp(-(3**0.5) * distances(x)),
    "matern 5/2": lambda x: (
        (1 + 5**0.5 * distances(x) + 5 / 3 * distances(x) ** 2) * np.exp(-(5**0.5) * distances(x))
    ),
    "periodic": lambda x: np.exp(-2 * np.sin(distances(x)) ** 2),
    "linear": lambda x: np.outer(x, x),
    "clustered": lambda x: np.exp(-(distances(np.round(x, 0) + 0.05 * np.sin(97 * x)) ** 2) / 2),
}


def rotation(rng, n):
    """A random orthogonal matrix."""
    q, r = np.linalg.qr(rng.standard_normal((n, n)))
    return q * np.sign(np.diagonal(r))


def symmetric(eigenvalues, seed=0):
    """A symmetric matrix with these eigenvalues, and eigenvectors in random directions."""
    basis = rotation(np.random.default_rng(seed), len(eigenvalues))
    matrix = (basis * eigenvalues) @ basis.T
    return (matrix + matrix.T) / 2


class Rotated(Operator):
    """A symmetric matrix of which the eigenvectors are a Kronecker product: random directions, but fast products."""

    eigenvalues: jax.Array
    left: jax.Array
    right: jax.Array
    symmetric: bool = True
    positive_semidefinite: bool = True

    def in_structure(self):
        return jax.ShapeDtypeStruct(self.eigenvalues.shape, self.eigenvalues.dtype)

    def mv(self, vector):
        return self.matmul(vector[:, None])[:, 0]

    def matmul(self, block):
        shape = len(self.left), len(self.right), block.shape[1]
        inside = jnp.einsum(
            "ia,jb,ijk->abk", self.left, self.right, block.reshape(shape), optimize=True
        )
        inside = self.eigenvalues[:, None] * inside.reshape(block.shape)
        outside = jnp.einsum(
            "ia,jb,abk->ijk", self.left, self.right, inside.reshape(shape), optimize=True
        )
        return outside.reshape(block.shape)


def rotated(name, n, dtype, seed=0):
    """The operator with one of the spectra; a product costs 1/16 of one with a matrix for n = 1000."""
    rng = np.random.default_rng(seed)
    few = max(k for k in range(1, int(n**0.5) + 1) if n % k == 0)
    parts = SPECTRA[name](n)[rng.permutation(n)], rotation(rng, few), rotation(rng, n // few)
    return Rotated(*(jnp.asarray(part, dtype) for part in parts))


class Errors(NamedTuple):
    """Of a method over many seeds.

    Attributes:
        median: of the absolute error over the trace.
        ratio: of the reported to the true error, each in the root mean square.
        inside: the share of 95% intervals that hold the truth.
        bias: the mean error in units of its own standard error.
    """

    median: float
    ratio: float
    inside: float
    bias: float


def errors_of(method, operators, matvecs, seeds, most=None):
    """Runs a method with each operator (of the same shapes and tags), for so many seeds, one after the other.

    Args:
        method: what to run.
        operators: a dictionary of pairs, an operator and its trace.
        matvecs: the budget.
        seeds: how many.
        most: if given, the budget shares a compilation with others up to it.

    Returns:
        A dictionary of `Errors`.
    """
    keys = jax.random.split(jax.random.key(0), seeds)

    @jax.jit
    def run(operator, used):
        budget = Budget(matvecs, matvecs) if most is None else Budget(most, used)

        def one(key):
            outcome = method.estimate(operator, key, budget)
            return outcome.value, outcome.variance, outcome.degrees_of_freedom

        return lax.map(one, keys)

    found = {}
    for name, (operator, truth) in operators.items():
        value, variance, freedom = map(np.asarray, run(operator, jnp.asarray(matvecs, jnp.int32)))
        error = value - truth
        inside = np.abs(error) <= stats.t.ppf(0.975, freedom) * np.sqrt(variance)
        found[name] = Errors(
            median=float(np.median(np.abs(error)) / abs(truth)),
            ratio=float(np.sqrt(variance.mean() / np.mean(np.abs(error) ** 2))),
            inside=float(inside.mean()),
            bias=float(error.mean() / (error.std(ddof=1) / seeds**0.5)),
        )
    return found


# For pairs of vectors that do not depend on the operator.
ANY_OPERATOR = MatrixOperator(jnp.eye(1))
