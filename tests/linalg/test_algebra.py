"""Sums, products, multiples, shifts, adjoints, Kronecker products and blocks of operators, and what their tags say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import linalg
from vernal.linalg import FunctionOperator, MatrixOperator


def matrices(dtype, count=2, n=4):
    rng = np.random.default_rng(0)
    made = [rng.standard_normal((n, n)) for _ in range(count)]
    if jnp.issubdtype(dtype, jnp.complexfloating):
        made = [m + 1j * rng.standard_normal((n, n)) for m in made]
    return [jnp.asarray(m, dtype) for m in made]


CASES = {
    "sum": lambda a, b: (a + b, lambda x, y: x + y),
    "difference": lambda a, b: (a - b, lambda x, y: x - y),
    "negative": lambda a, b: (-a, lambda x, y: -x),
    "product": lambda a, b: (a @ b, lambda x, y: x @ y),
    "multiple": lambda a, b: (2.5 * a, lambda x, y: 2.5 * x),
    "multiple from the right": lambda a, b: (a * jnp.float32(-2.0), lambda x, y: -2 * x),
    "shift": lambda a, b: (a.shifted(0.5), lambda x, y: x + 0.5 * jnp.eye(4, dtype=x.dtype)),
    "adjoint": lambda a, b: (a.H, lambda x, y: x.conj().T),
    "adjoint of a product": lambda a, b: ((a @ b).H, lambda x, y: (x @ y).conj().T),
    "adjoint twice": lambda a, b: ((a + b).H.H, lambda x, y: x + y),
    "gram": lambda a, b: (a.H @ a, lambda x, y: x.conj().T @ x),
    "kronecker": lambda a, b: (linalg.kronecker(a, b), jnp.kron),
    "blocks": lambda a, b: (linalg.block_diagonal(a, b), jax.scipy.linalg.block_diag),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(3)
def test_products_and_adjoint_products_are_those_of_the_matrix(name, dtype):
    x, y = matrices(dtype)
    operator, of = CASES[name](MatrixOperator(x), MatrixOperator(y))
    expected = of(x, y)
    eye = jnp.eye(len(expected), dtype=dtype)
    np.testing.assert_allclose(operator.matmul(eye), expected, rtol=1e-5, atol=1e-5)
    adjoint = expected.conj().T
    np.testing.assert_allclose(operator.adjoint_matmul(eye), adjoint, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(operator.H.matmul(eye), adjoint, rtol=1e-5, atol=1e-5)


def test_vectors_are_trees_as_those_of_the_parts():
    example = {"a": jnp.ones(2), "b": jnp.ones((2, 1), jnp.bfloat16)}
    double = FunctionOperator(lambda v: jax.tree.map(lambda x: 2 * x, v), example, symmetric=True)
    product = (double @ double).shifted(1.0).mv(example)
    assert jax.tree.map(lambda x: x.dtype, product) == jax.tree.map(lambda x: x.dtype, example)
    np.testing.assert_array_equal(product["a"], 5 * jnp.ones(2))
    blocks = linalg.block_diagonal(double, jnp.eye(3))
    one, other = blocks.mv((example, jnp.ones(3)))
    np.testing.assert_array_equal(one["b"].astype(jnp.float32), 2 * jnp.ones((2, 1)))
    np.testing.assert_array_equal(other, jnp.ones(3))


def tags(operator):
    return operator.symmetric, operator.positive_semidefinite


def test_tags_follow_from_those_of_the_parts_and_from_nothing_else():
    x, y = matrices(jnp.float32)
    plain = MatrixOperator(x)
    symmetric = MatrixOperator(x + x.T, symmetric=True)
    positive, other = (MatrixOperator(m @ m.T, positive_semidefinite=True) for m in (x, y))
    assert tags(positive + other) == (True, True)
    assert tags(positive - other) == (True, False)
    assert tags(symmetric + positive) == (True, False)
    assert tags(symmetric + plain) == (False, False)
    # A product of two symmetric operators is not symmetric, and of two positive ones not positive.
    assert tags(positive @ other) == (False, False)
    assert tags(symmetric @ symmetric) == (True, True)
    assert tags(plain @ plain) == (False, False)
    assert tags(plain.H @ plain) == tags(plain @ plain.T) == (True, True)
    assert tags(plain.H @ MatrixOperator(x)) == (False, False)
    assert tags(2.0 * positive) == (True, True)
    assert tags(-2.0 * positive) == tags(float("nan") * positive) == (True, False)
    # Nobody knows the sign of an array, which may be traced.
    assert tags(jnp.float32(2.0) * positive) == (True, False)
    assert tags(positive.shifted(0.5)) == (True, True)
    assert tags(positive.shifted(-0.5)) == tags(positive.shifted(jnp.float32(1.0))) == (True, False)
    assert tags(positive.shifted(jnp.float32(1.0), positive_semidefinite=True)) == (True, True)
    assert tags(plain.shifted(1.0)) == (False, False)
    assert tags(linalg.kronecker(positive, other)) == (True, True)
    assert tags(linalg.kronecker(positive, symmetric)) == (True, False)
    assert tags(linalg.block_diagonal(positive, symmetric, other)) == (True, False)
    hermitian = MatrixOperator(jnp.eye(2, dtype=jnp.complex64), symmetric=True)
    assert tags(1j * hermitian) == tags(hermitian.shifted(1j)) == (False, False)


def test_what_no_eigenvalue_is_below_follows_too():
    kernel = MatrixOperator(jnp.eye(3), positive_semidefinite=True)
    assert kernel.shifted(0.5).least_eigenvalue() == 0.5
    assert (2.0 * kernel.shifted(0.5) + kernel).least_eigenvalue() == 1.0
    promised = MatrixOperator(jnp.eye(3), symmetric=True).shifted(0.5, positive_semidefinite=True)
    assert promised.least_eigenvalue() == 0.0


def test_derivatives_go_through_the_algebra():
    x, y = matrices(jnp.float32)

    def of(c, x, y):
        a, b = MatrixOperator(x), MatrixOperator(y)
        return jnp.sum(((c * a + b).H @ a.shifted(c)).mv(jnp.ones(4)) ** 2)

    def dense(c, x, y):
        return jnp.sum(((c * x + y).T @ (x + c * jnp.eye(4)) @ jnp.ones(4)) ** 2)

    given = jnp.float32(0.7), x, y
    for got, expected in zip(
        jax.grad(of, (0, 1, 2))(*given), jax.grad(dense, (0, 1, 2))(*given), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    mapped = jax.vmap(of, (0, None, None))(jnp.array([0.1, 0.7]), x, y)
    np.testing.assert_allclose(mapped[1], dense(*given), rtol=1e-4)


def test_what_has_no_meaning_is_refused():
    one, other = MatrixOperator(jnp.eye(2)), MatrixOperator(jnp.eye(3))
    with pytest.raises(ValueError, match="multiply different vectors"):
        _ = one + other
    with pytest.raises(ValueError, match="multiply different vectors"):
        _ = one @ other
    with pytest.raises(TypeError, match="an operator can only be multiplied by"):
        _ = one * jnp.ones(2)
    with pytest.raises(TypeError, match="an operator can only be multiplied by"):
        _ = one.shifted(1j)
    with pytest.raises(TypeError, match="`T` is ambiguous for a complex operator"):
        _ = MatrixOperator(jnp.eye(2, dtype=jnp.complex64)).T
    with pytest.raises(TypeError, match="either all real or all complex"):
        linalg.kronecker(jnp.eye(2), jnp.eye(2, dtype=jnp.complex64))
    for wrong in (lambda: one + 1.0, lambda: one @ jnp.ones(2), lambda: one * one):
        with pytest.raises(TypeError):
            wrong()


def test_an_array_beside_the_product_sign_is_told_to_use_mv():
    operator = MatrixOperator(jnp.eye(2), positive_semidefinite=True)
    for product in (lambda: operator @ jnp.ones(2), lambda: jnp.ones(2) @ operator):
        with pytest.raises(TypeError, match=r"the product of two operators(.|\n)*operator.mv"):
            product()
    with pytest.raises(TypeError, match="unsupported operand"):
        operator @ "text"


def test_an_infinite_multiple_promises_nothing():
    operator = MatrixOperator(jnp.eye(2), positive_semidefinite=True)
    for number in (jnp.inf, float("inf"), float("nan")):
        assert not (number * operator).positive_semidefinite
        assert not operator.shifted(number).positive_semidefinite


@pytest.mark.parametrize("is_complex", [True, False])
def test_columns_are_real_or_complex_like_the_operator(is_complex):
    """Imaginary parts were dropped: those of the columns, or those of a Kronecker product."""
    c = jnp.array([[1.0, 2j], [-2j, 5.0]]) if is_complex else jnp.array([[1.0, 2.0], [0.0, 5.0]])
    operators = {
        "kronecker": (linalg.kronecker(c, c), jnp.kron(c, c)),
        "scaled": (2 * linalg.kronecker(c, c[:1, :1]), 2 * c * c[0, 0]),
        "blocks": (linalg.block_diagonal(c, c), jax.scipy.linalg.block_diag(c, c)),
        "function": (linalg.FunctionOperator(lambda v: c @ v, c[0]), c),
        "matrix": (linalg.MatrixOperator(c), c),
    }
    for name, (operator, dense) in operators.items():
        other = jnp.eye(len(dense), dtype=jnp.float32 if is_complex else jnp.complex64)
        for multiply, want in (
            (operator.matmul, dense),
            (operator.adjoint_matmul, dense.conj().T),
        ):
            if is_complex:
                np.testing.assert_allclose(multiply(other), want, atol=1e-5, err_msg=name)
            else:
                with pytest.raises(TypeError, match="a vector is not one of those"):
                    multiply(1j * other)
            with pytest.raises(TypeError, match="a vector is not one of those"):
                multiply(jnp.zeros((len(dense) + 1, 1), dense.dtype))


def test_a_mix_of_real_and_complex_operators_is_refused_where_it_was_written():
    mixed = jnp.eye(2), jnp.eye(2, dtype=jnp.complex64)
    for make, name in ((linalg.kronecker, "kronecker"), (linalg.block_diagonal, "block_diagonal")):
        with pytest.raises(TypeError, match=rf"are real and some complex\n  where: {name}\("):
            make(*mixed)
