"""Probes: random vectors w with E[w w^*] = I, drawn as columns of a matrix in the operator's dtype.

Drawing costs as much as the products with a small dense matrix, so a sign takes one random bit. Numbers are drawn
column by column (the transpose of a matrix of rows): with JAX's default generator the first columns are then the same
however many are drawn, so a budget that shares a compilation gives the same estimate as alone.

Probes also know how much a quadratic form f = w^* A w varies. It is a polynomial of degree two, so its variance is
known from its slopes, which a product A w shows element by element: n numbers for each probe instead of one. Hence the
variance from k probes has an error of at most sqrt(2 / k), even for small k. The sample variance of k forms has several
times that error, and is too small just where the forms are too small.
"""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..modules import Module
from ..show import type_error

_BITS = 32


class Probes(Module):
    """A distribution of random vectors `w` with `E[w w^*] = I`. To add one, subclass it and define `draw`."""

    @abc.abstractmethod
    def draw(self, key: PRNGKeyArray, size: int, count: int, dtype: Any) -> Array:
        """Draws vectors as the columns of a matrix.

        Args:
            key: a random key.
            size: the number of elements of a vector.
            count: the number of vectors.
            dtype: floating-point, real or complex.

        Returns:
            An array of shape `(size, count)`.
        """

    def slopes(self, probes: Array, products: Array) -> Array | None:
        """Vectors `e` that say how much `w^* A w` varies.

        Args:
            probes: as drawn, of shape `(size, count)`.
            products: `A` times each, of the same shape.

        Returns:
            An array of the same shape: the summed variances of the elements of `e` are the variance of `w^* A w` if `A`
            equals its conjugate transpose, and otherwise not below it. None, the default for your own distribution, if
            nothing is known; the variance is then that of the forms themselves.
        """
        del probes, products
        return None


class Rademacher(Probes):
    """Elements 1 or -1, each with probability 1/2 (Rademacher): the least variance of all real probes.

    For a symmetric `A`, the variance of `w^* A w` is `2 * (norm(A)**2 - norm(diag(A))**2)` in Frobenius norms: exact
    for a diagonal matrix.

    M. F. Hutchinson, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines",
    Communications in Statistics - Simulation and Computation 18 (1989), doi:10.1080/03610918908812806.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.estimators import Rademacher
        >>> probes = Rademacher().draw(jax.random.key(0), 100, 3, jnp.float32)
        >>> probes.shape, bool(jnp.all(jnp.abs(probes) == 1))
        ((100, 3), True)
    """

    def draw(self, key: PRNGKeyArray, size: int, count: int, dtype: Any) -> Array:
        """Draws signs as the columns of a matrix of shape `(size, count)`, with one random bit each."""
        words = jax.random.bits(key, (count, -(-size // _BITS)), jnp.uint32)
        # Otherwise the compiler may draw a word again for each of its bits.
        words = lax.optimization_barrier(words)
        bits = (
            words[:, :, None] >> jnp.arange(_BITS, dtype=jnp.uint32)[None, None, :]
        ) & jnp.uint32(1)
        bits = bits.reshape(count, words.shape[1] * _BITS)[:, :size].T
        return jnp.where(bits == 0, jnp.ones((), dtype), -jnp.ones((), dtype))

    def slopes(self, probes: Array, products: Array) -> Array:
        """`sqrt(2) * w * A w`, element by element."""
        return _root(2, products) * (probes.conj() * products)


class Normal(Probes):
    """Independent elements of the standard normal distribution; complex ones for a complex dtype.

    For a symmetric `A`, the variance of `w^* A w` is `2 * norm(A)**2`, or half of that with complex elements. The
    distribution is invariant under rotations, which helps methods that deflate.

    A. Girard, "A fast Monte-Carlo cross-validation procedure for large least squares problems with noisy data",
    Numerische Mathematik 56 (1989), doi:10.1007/BF01395775.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.estimators import Normal
        >>> Normal().draw(jax.random.key(0), 100, 3, jnp.float32).shape
        (100, 3)
    """

    def draw(self, key: PRNGKeyArray, size: int, count: int, dtype: Any) -> Array:
        """Draws normal vectors as the columns of a matrix of shape `(size, count)`."""
        return jax.random.normal(key, (count, size), _wide(dtype)).T.astype(dtype)

    def slopes(self, probes: Array, products: Array) -> Array:
        """`A w`, times `sqrt(2)` if it is real."""
        del probes
        return _root(_degree(products), products) * products


class Sphere(Probes):
    """Uniform on the sphere of radius `sqrt(size)`, real or complex like the dtype.

    For a symmetric `A`, the variance of `w^* A w` is `2 n / (n + 2) * (norm(A)**2 - trace(A)**2 / n)`: exact for a
    multiple of the identity.

    E. N. Epperly, J. A. Tropp, R. J. Webber, "XTrace: Making the most of every sample in stochastic trace estimation",
    SIAM Journal on Matrix Analysis and Applications 45 (2024), doi:10.1137/23M1548323.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.estimators import Sphere
        >>> probes = Sphere().draw(jax.random.key(0), 100, 3, jnp.float32)
        >>> print(jnp.linalg.norm(probes, axis=0).round(3))
        [10. 10. 10.]
    """

    def draw(self, key: PRNGKeyArray, size: int, count: int, dtype: Any) -> Array:
        """Draws vectors of length `sqrt(size)` as the columns of a matrix of shape `(size, count)`."""
        normal = jax.random.normal(key, (count, size), _wide(dtype))
        norms = jnp.linalg.norm(normal, axis=1, keepdims=True)
        return (
            normal * (jnp.sqrt(jnp.asarray(size, norms.dtype)) / norms).astype(normal.dtype)
        ).T.astype(dtype)

    def slopes(self, probes: Array, products: Array) -> Array:
        """The part of `A w` orthogonal to `w`, times `sqrt(2)` if it is real."""
        along = jnp.sum(probes.conj() * products, axis=0, keepdims=True)
        # Columns of zeros are unused probes.
        lengths = jnp.maximum(jnp.sum(jnp.abs(probes) ** 2, axis=0, keepdims=True), 1e-30)
        return _root(_degree(products), products) * (
            products - probes * (along / lengths.astype(along.dtype))
        )


class Steinhaus(Probes):
    """Complex numbers of modulus 1 with uniform phase (Steinhaus): the least variance of all, for complex operators.

    For a Hermitian `A`, the variance of `w^* A w` is `norm(A)**2 - norm(diag(A))**2`, half of that of real signs.

    E. N. Epperly, J. A. Tropp, R. J. Webber, "XTrace: Making the most of every sample in stochastic trace estimation",
    SIAM Journal on Matrix Analysis and Applications 45 (2024), doi:10.1137/23M1548323.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.estimators import Steinhaus
        >>> probes = Steinhaus().draw(jax.random.key(0), 100, 3, jnp.complex64)
        >>> probes.shape, bool(jnp.allclose(jnp.abs(probes), 1))
        ((100, 3), True)
    """

    def draw(self, key: PRNGKeyArray, size: int, count: int, dtype: Any) -> Array:
        """Draws phases as the columns of a matrix of shape `(size, count)`.

        Raises:
            TypeError: if the dtype is real.
        """
        if not jnp.issubdtype(dtype, jnp.complexfloating):
            raise type_error(
                "Steinhaus probes are complex, but the operator is real",
                where="Steinhaus().draw(key, size, count, dtype)",
                expected="a complex dtype, the dtype of the operator",
                got=jnp.dtype(dtype).name,
                instead="`Rademacher()`",
            )
        real = jnp.finfo(dtype).dtype
        angle = jax.random.uniform(key, (count, size), real, 0, 2 * jnp.pi)
        return lax.complex(jnp.cos(angle), jnp.sin(angle)).astype(dtype).T

    def slopes(self, probes: Array, products: Array) -> Array:
        """`conj(w) * A w`, element by element."""
        return probes.conj() * products


def _wide(dtype: Any) -> Any:
    """The dtype, in at least single precision: random numbers of fewer bits have wrong moments."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def _degree(array: Array) -> int:
    """The factor in the variance of a form: 2 for real probes, 1 for complex ones."""
    return 1 if jnp.iscomplexobj(array) else 2


def _root(number: int, like: Array) -> Array:
    return jnp.sqrt(jnp.asarray(number, jnp.finfo(like.dtype).dtype)).astype(like.dtype)
