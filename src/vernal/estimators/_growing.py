"""Sketches that grow, and that a deflating method looks at now and then.

The difficulty: `XTrace` needs products with a basis of the products AW of the probes W. Another look, at more probes,
has another basis, and the products with the old one would be lost; so would they for the exact answer.

The plan: keep an orthonormal basis Z of everything that was multiplied, and its images AZ. A probe makes one product,
with itself; a look makes one for each probe since the last one, with the part of AW that is orthogonal to all of Z.
Then both W and AW lie in the span of Z, and with C = Z^* W and M = Z^* A Z they are Z C and Z M C. `XTrace` of A is
therefore that of the small matrix M, with C for its probes, and costs no further product. No product is ever made
within the span of others, so that `size` of them, of whatever kind, are the exact answer.

`XNysTrace` needs nothing but the probes and their products, which are kept as they are.

Invariants: columns from `columns` on are zero. Probes are column by column the same for every method and every size of
the steps in which they are drawn.

Glossary: look: an evaluation of the deflating method. Free: looks cost no product. Chunk: so many columns are drawn,
and multiplied, at a time.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import PRNGKeyArray

from ..linalg import Operator
from ..modules import Module, field
from ._choose import Deflation
from ._leave_out import LeftOut, prepared
from ._method import Outcome
from ._orthogonal import orthonormal, product
from ._probes import Probes
from ._sensitivity import Sensitivity
from ._xnystrace import XNysTrace
from ._xtrace import XTrace

# Columns that are added at a time. An error is estimated from so many at least, if the budget has them.
CHUNK = 16


class Kept(NamedTuple):
    """What a sketch keeps.

    Attributes:
        vectors: that were multiplied, of shape `(n, most)`.
        images: the products.
        columns: how many there are.
        coordinates: of the probes with respect to `vectors`, of shape `(most, k)`, where these are not the probes.
        sound: False if a probe was seen to depend on what was multiplied before.
    """

    vectors: Array
    images: Array
    columns: Array
    coordinates: Array
    sound: Array


class Growing(Module):
    """How a sketch grows.

    Args:
        operator: without derivatives.
        limit: how many products there may be.
        widest: how many probes a look may have.
    """

    operator: Operator
    limit: int
    widest: int

    def start(self) -> Kept:
        """Nothing yet."""
        columns, dtype = self.limit + CHUNK, self.operator.dtype
        none = jnp.zeros((self.operator.size, columns), dtype)
        coordinates = jnp.zeros(self.coordinates(columns), dtype)
        return Kept(none, none, jnp.zeros((), int), coordinates, jnp.asarray(True))

    @abc.abstractmethod
    def coordinates(self, columns: int) -> tuple[int, int]:
        """The shape of the coordinates."""

    @abc.abstractmethod
    def added(self, kept: Kept, probes: Array, products: Array, used: Array, count: Array) -> Kept:
        """With `count` more probes after `used` others; the other columns of the chunk are zero."""

    @abc.abstractmethod
    def ready(self, kept: Kept, used: Array) -> Kept:
        """With whatever products a look at `used` probes needs; no probe was added without a look at those before."""

    @abc.abstractmethod
    def look(self, kept: Kept, used: Array, width: int) -> Outcome:
        """What the method makes of `used` probes, at most `width`."""

    @abc.abstractmethod
    def probes(self, kept: Kept, used: Array) -> tuple[Array, Array]:
        """The first `used` probes and their products, at most `widest`; zeros in the other columns."""

    def sensitivity(self, method: Deflation, kept: Kept, used: Array) -> Sensitivity:
        """Of a look at `used` probes."""
        sketch = prepared(self.operator, *self.probes(kept, used), used)
        return LeftOut(sketch.probes, sketch.shifted(), used, method.resphered)


class Free(Growing):
    """The probes and their products: looks cost nothing more."""

    method: XNysTrace

    def coordinates(self, columns: int) -> tuple[int, int]:
        return 0, 0

    def added(self, kept: Kept, probes: Array, products: Array, used: Array, count: Array) -> Kept:
        del used
        return _appended(kept, probes, products, count)

    def ready(self, kept: Kept, used: Array) -> Kept:
        del used
        return kept

    def look(self, kept: Kept, used: Array, width: int) -> Outcome:
        sketch = kept.vectors[:, :width], kept.images[:, :width]
        return self.method.from_sketch(self.operator, *sketch, used)

    def probes(self, kept: Kept, used: Array) -> tuple[Array, Array]:
        mask = (jnp.arange(self.widest) < used)[None, :]
        vectors, images = kept.vectors[:, : self.widest], kept.images[:, : self.widest]
        return jnp.where(mask, vectors, 0), jnp.where(mask, images, 0)


class Nested(Growing):
    """An orthonormal basis of all that was multiplied, and its images."""

    method: XTrace

    def coordinates(self, columns: int) -> tuple[int, int]:
        return columns, self.widest + CHUNK

    def added(self, kept: Kept, probes: Array, products: Array, used: Array, count: Array) -> Kept:
        chunk = min(CHUNK, self.limit)
        probes, products = probes[:, :chunk], products[:, :chunk]
        mask = jnp.arange(chunk) < count
        rest, along = _beside(kept.vectors, probes)
        rest, more = _beside(kept.vectors, rest)
        along = along + more
        basis, r = orthonormal(rest, mask)
        images = (products - product(kept.images, along)).T
        images = solve_triangular(r, images, trans="T").T
        rows = lax.dynamic_update_slice_in_dim(along, r, kept.columns, axis=0)
        coordinates = lax.dynamic_update_slice_in_dim(
            kept.coordinates, jnp.where(mask[None, :], rows, 0), used, axis=1
        )
        length = jnp.min(jnp.where(mask, jnp.abs(jnp.diagonal(r)), jnp.inf))
        eps = float(jnp.finfo(r.dtype).eps)
        new = _appended(kept, basis, jnp.where(mask[None, :], images, 0), count)
        return new._replace(
            coordinates=coordinates,
            sound=kept.sound & (length > (eps * self.operator.size) ** 0.5),
        )

    def ready(self, kept: Kept, used: Array) -> Kept:
        chunk = min(CHUNK, self.limit)

        def add(kept: Kept) -> Kept:
            # As many as there were probes; all of the basis is of these, or of probes.
            done = kept.columns - used
            count = jnp.minimum(chunk, used - done)
            mask = jnp.arange(chunk) < count
            wanted = lax.dynamic_slice_in_dim(kept.coordinates, done, chunk, axis=1)
            block = product(kept.images, jnp.where(mask[None, :], wanted, 0))

            def beside(_: int | Array, block: Array) -> Array:
                return orthonormal(_beside(kept.vectors, block)[0], mask)[0]

            # Where nothing is left but rounding, any other directions do as well. The second pass cleans these.
            block = lax.fori_loop(0, 2, beside, block)
            return _appended(kept, block, self.operator.matmul(block), count)

        return lax.while_loop(lambda kept: kept.columns < 2 * used, add, kept)

    def look(self, kept: Kept, used: Array, width: int) -> Outcome:
        vectors, images = kept.vectors[:, : 2 * width], kept.images[:, : 2 * width]
        matrix = product(vectors.conj().T, images)
        probes = kept.coordinates[: 2 * width, :width]
        return self.method.from_sketch(self.operator, probes, product(matrix, probes), used, matrix)

    def probes(self, kept: Kept, used: Array) -> tuple[Array, Array]:
        mask = (jnp.arange(self.widest) < used)[None, :]
        coordinates = jnp.where(mask, kept.coordinates[:, : self.widest], 0)
        return product(kept.vectors, coordinates), product(kept.images, coordinates)


def _appended(kept: Kept, vectors: Array, images: Array, count: Array) -> Kept:
    return kept._replace(
        vectors=lax.dynamic_update_slice_in_dim(kept.vectors, vectors, kept.columns, axis=1),
        images=lax.dynamic_update_slice_in_dim(kept.images, images, kept.columns, axis=1),
        columns=kept.columns + count,
    )


def _beside(basis: Array, block: Array) -> tuple[Array, Array]:
    """The part of a block that is orthogonal to a basis, and coordinates of the other part."""
    along = product(basis.conj().T, block)
    return block - product(basis, along), along


class Stream(Module):
    """Probes in a fixed order, of which any may be drawn again.

    Args:
        key: a random key.
        probes: the distribution.
        size: of a probe.
        dtype: of a probe.
    """

    key: PRNGKeyArray
    probes: Probes
    size: int
    dtype: Any = field(static=True)

    def chunk(self, index: int | Array) -> Array:
        """`CHUNK` probes, of shape `(size, CHUNK)`."""
        return self.probes.draw(jax.random.fold_in(self.key, index), self.size, CHUNK, self.dtype)

    def after(self, used: Array, most: Array) -> tuple[Array, Array]:
        """The probes after the first `used`, up to the end of their chunk, and how many: at most `most`."""
        start = used % CHUNK
        count = jnp.minimum(CHUNK - start, most)
        drawn = jnp.roll(self.chunk(used // CHUNK), -start, axis=1)
        return jnp.where((jnp.arange(CHUNK) < count)[None, :], drawn, 0), count


class Drawn(Sensitivity):
    """The derivative of the mean of quadratic forms, with probes that are drawn again chunk by chunk."""

    stream: Stream
    used: Array

    def blocks(self) -> Array:
        return -(-self.used // CHUNK)

    def block(self, index: int | Array) -> tuple[Array, Array]:
        drawn = self.stream.chunk(index)
        here = index * CHUNK + jnp.arange(CHUNK) < self.used
        drawn = jnp.where(here[None, :], drawn, 0)
        return drawn / self.used.astype(drawn.dtype), drawn
