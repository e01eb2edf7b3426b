"""Traces of functions of symmetric operators, and the norms that are made of them."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from .._ground import callable_name
from ..linalg import (
    Elementwise,
    Operator,
    carried_dense,
    derivative,
    divided_differences,
    positive_int,
    symmetric_operator,
)
from ..modules import Module
from ..show import spec_text, type_error
from ..transforms import closure_to_pytree, filter_jit
from ._estimate import Estimate
from ._orthogonal import power_below
from ._quadrature import (
    Kept,
    LanczosQuadrature,
    MadeAgain,
    Starts,
    consistent,
    is_above,
    limited,
    rounding_of,
    sums,
)
from ._sensitivity import attach
from ._tally import Tally


def trace_of_function(
    f: Callable[[Array], Array],
    operator: Any,
    key: PRNGKeyArray,
    *,
    matvecs: int,
    method: LanczosQuadrature | None = None,
) -> Estimate:
    """Estimates the trace of `f(A)`, the sum of `f` over the eigenvalues of a symmetric operator.

    By stochastic Lanczos quadrature; see `LanczosQuadrature` for the paper and for what the products are used for.
    With as many products as the operator has rows, or more, the answer is exact, and made with that many products.

    Derivatives with respect to the operator and to arrays that `f` closes over are those of the trace: estimates of
    `tr(f'(A) dA)` and of the trace of the derivative of `f`, without bias but for the error of the quadrature. They
    make no further products but those with `dA`, in blocks; but if all Lanczos vectors together would take more than
    128 MiB, they make all products again, block by block. Second derivatives are right in the same sense; those of
    third order go through the eigenvalues of small matrices, and are `nan` where these coincide.

    Args:
        f: acts on an array of real numbers element by element, such as `jnp.exp`; may close over arrays. It must be
            differentiable as often as derivatives are asked for, plus once for each of these.
        operator: symmetric (Hermitian, if it is complex), and declared so.
        key: a key of `jax.random`.
        matvecs: how many products to make at most, a Python int.
        method: how to use them.

    Returns:
        An `Estimate`, real. `standard_error` covers the error of the probes and of the quadrature. `tags_hold` is
        False if the operator is visibly not what it is declared to be (asymmetric; clearly negative on some vector,
        if it is declared positive semidefinite). The eigenvalues of an operator that is declared positive semidefinite
        are never taken to be negative.

    Raises:
        TypeError: if `operator` is none, `matvecs` is traced or no int, or `f` does not map real arrays to real
            arrays of the same shape.
        ValueError: if the operator is not declared symmetric, or `matvecs` is too small.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> matrix = jnp.diag(jnp.linspace(0.0, 1.0, 200)) + 0.001
        >>> operator = linalg.MatrixOperator(matrix, symmetric=True)
        >>> estimate = estimators.trace_of_function(jnp.exp, operator, jax.random.key(0), matvecs=100)
        >>> exact = jnp.exp(jnp.linalg.eigvalsh(matrix)).sum()
        >>> bool(abs(estimate.value - exact) < 4 * estimate.standard_error)
        True
    """
    where = "trace_of_function(operator)"
    operator = symmetric_operator(operator, where)
    floor = 0.0 if operator.positive_semidefinite else None
    return quadrature_estimate(
        f, operator, key, matvecs, method, floor, "trace_of_function(matvecs)"
    )


def quadrature_estimate(
    f: Elementwise,
    operator: Operator,
    key: PRNGKeyArray,
    matvecs: Any,
    method: LanczosQuadrature | None,
    floor: float | None,
    where: str,
    least: Any = None,
) -> Estimate:
    """The trace of `f` at the eigenvalues, those below `floor` times the largest replaced by that; None for none.
    `least`: of a logarithm, what no eigenvalue is below."""
    matvecs = positive_int(matvecs, "matvecs", where)
    method = LanczosQuadrature() if method is None else method
    f = closure_to_pytree(f)
    if matvecs >= operator.size:
        return _exact(f, operator, floor, least)
    count, steps = method.split(matvecs)
    return _estimated(f, operator, key, method, count, steps, floor, least)


@filter_jit
def _estimated(
    f: Elementwise,
    operator: Operator,
    key: PRNGKeyArray,
    method: LanczosQuadrature,
    count: int,
    steps: int,
    floor: float | None,
    least: Any,
) -> Estimate:
    starts, f = Starts.of(operator, key, method.probes, count, steps), Checked(f)
    between = least is not None

    def of_block(index: int | Array) -> tuple[Tally, Array]:
        found = sums(operator, starts.block(index), steps, f, floor, least)
        return Tally.of(operator, starts, found, index, between), found.products

    tally, products = of_block(0)
    if starts.blocks == 1:
        left = products.T / jnp.asarray(count, products.dtype)
        pairs = Kept.of(operator, left, starts.block(0).T)
    else:
        pairs = MadeAgain(operator, starts, steps, f, floor)
        tally = lax.fori_loop(
            1, starts.blocks, lambda i, known: known.joined(of_block(i)[0]), tally
        )
    value = tally.samples.mean
    return Estimate.of(
        attach(value, operator, pairs),
        tally.error(steps, between),
        matvecs=jnp.asarray(count * steps, jnp.int32),
        degrees_of_freedom=jnp.asarray(count - 1, value.dtype),
        tags_hold=tally.consistent,
    )


@filter_jit
def _exact(f: Elementwise, operator: Operator, floor: float | None, least: Any) -> Estimate:
    """By the eigenvalues of the matrix, which is made with unit vectors."""
    f, g = Checked(f), derivative(Checked(f))
    size, dtype = operator.size, operator.dtype
    eye = jnp.eye(size, dtype=dtype)
    given = operator.matmul(eye)
    matrix = (given + given.conj().T) / 2
    largest = jnp.max(jnp.abs(lax.stop_gradient(matrix)), initial=0)
    unit = power_below(largest)
    raw, vectors = jnp.linalg.eigh(matrix / unit.astype(dtype), symmetrize_input=False)
    raw = raw * unit
    nodes = limited(raw[None], floor)[0]
    still, basis = lax.stop_gradient(nodes), lax.stop_gradient(vectors)
    values = f(still)
    weighted = basis * g(still).astype(dtype)[None, :]
    product = jnp.matmul(weighted, basis.conj().T, precision=lax.Precision.HIGHEST)
    differences = divided_differences(g, nodes[None])[0]
    product = carried_dense(product, matrix, vectors, differences)
    asymmetry = jnp.max(jnp.abs(given - given.conj().T), initial=0)
    agrees = consistent(asymmetry, raw, size, floor)
    value, error = jnp.sum(values), jnp.zeros_like(unit)
    if least is not None:
        agrees &= is_above(least, raw, size)
        # The errors of the eigenvalues are independent.
        error = jnp.linalg.norm(rounding_of(g, still))
    return Estimate.of(
        attach(value, operator, Kept.of(operator, product, eye)),
        error,
        matvecs=jnp.asarray(size, jnp.int32),
        degrees_of_freedom=jnp.asarray(jnp.inf, value.dtype),
        tags_hold=agrees,
    )


class Checked(Module):
    """A function that must map real arrays to real arrays of the same shape, and returns the dtype that it is given."""

    f: Elementwise

    def __call__(self, x: Array) -> Array:
        """Its values; `TypeError` if it is no such function."""
        out = self.f(x)
        if jnp.shape(out) != x.shape or not jnp.issubdtype(jnp.result_type(out), jnp.floating):
            raise type_error(
                "the function does not act on real numbers element by element",
                where=f"`{callable_name(self.f)}`",
                expected=spec_text(x),
                got=spec_text(out),
                instead="a function such as `jnp.exp` or `lambda x: jnp.log1p(scale * x)`",
            )
        return out.astype(x.dtype)
