"""Derivatives of estimates: both directions, repeated, mapped, complex, and in little memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.estimators._spectra import ANY_OPERATOR
from vernal import estimators, filter_jit, linalg
from vernal.estimators import GradientPairs, Hutchinson, StoredPairs
from vernal.estimators._gradient_pairs import Chosen, attach
from vernal.linalg import FunctionOperator, MatrixOperator

KEY = jax.random.key(0)
N = 24


def matrix(seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    rng = np.random.default_rng(seed)
    made = rng.standard_normal((N, N))
    if np.issubdtype(dtype, np.complexfloating):
        made = made + 1j * rng.standard_normal((N, N))
    return jnp.asarray(made, dtype)


def plain(operator: Any) -> jax.Array:
    return estimators.trace(operator, KEY, matvecs=10, method=Hutchinson()).value


def test_forward_and_reverse_are_the_same_linear_function():
    a, b = matrix(0), matrix(1)
    value, change = jax.jvp(plain, (a,), (b,))
    # Hutchinson's estimate is linear in the matrix.
    np.testing.assert_allclose(change, plain(b), rtol=1e-4)
    np.testing.assert_allclose(jnp.sum(jax.grad(plain)(a) * b), change, rtol=1e-4)
    np.testing.assert_allclose(jnp.sum(jax.grad(plain)(a) * a), value, rtol=1e-4)


def test_the_gradient_is_unbiased():
    keys = jax.random.split(KEY, 400)

    def gradient(key):
        return jax.grad(lambda a: estimators.trace(a, key, matvecs=5, method=Hutchinson()).value)(
            matrix()
        )

    got = np.asarray(jax.jit(lambda keys: jax.lax.map(gradient, keys))(keys))
    off = got[:, ~np.eye(N, dtype=bool)]
    z = off.mean(0) / (off.std(0, ddof=1) / 20)
    # Signs have exact diagonals; the other elements are sums of signs with mean zero.
    np.testing.assert_allclose(got[:, np.eye(N, dtype=bool)], 1, rtol=1e-5)
    assert abs(np.mean(z**2) - 1) < 0.3 and np.abs(z).max() < 5


def test_second_derivatives_of_a_nonlinear_loss_of_the_value_are_right():
    def loss(s):
        return plain(s**3 * matrix()) ** 2

    s = jnp.asarray(1.5)
    want = 30 * plain(matrix()) ** 2 * s**4
    for second in (jax.grad(jax.grad(loss)), jax.jacfwd(jax.grad(loss))):
        np.testing.assert_allclose(second(s), want, rtol=1e-4)


def test_some_arrays_of_an_operator_may_be_differentiated_and_others_not():
    still = matrix()

    def value(s):
        return plain(FunctionOperator(lambda v: s * (still @ v), jnp.zeros(N)))

    s = jnp.asarray(2.0)
    np.testing.assert_allclose(jax.grad(value)(s), plain(still), rtol=1e-4)
    np.testing.assert_allclose(jax.jvp(value, (s,), (s,))[1], value(s), rtol=1e-4)


def test_second_derivatives_are_right_in_every_combination():
    def value(s):
        return plain(FunctionOperator(lambda v: s**3 * (matrix() @ v), jnp.zeros(N)))

    s = jnp.asarray(2.0)
    trace = value(jnp.asarray(1.0))
    np.testing.assert_allclose(jax.grad(value)(s), 12 * trace, rtol=1e-4)
    for twice in (
        jax.grad(jax.grad(value)),
        jax.jacfwd(jax.grad(value)),
        jax.hessian(value),
        jax.jacfwd(jax.jacfwd(value)),
    ):
        np.testing.assert_allclose(twice(s), 12 * trace, rtol=1e-4)


def test_derivatives_can_be_mapped_and_compiled():
    batch = jnp.stack([matrix(0), matrix(1)])
    single = jnp.stack([jax.grad(plain)(a) for a in batch])
    for mapped in (jax.vmap(jax.grad(plain)), jax.jit(jax.vmap(jax.grad(plain)))):
        np.testing.assert_allclose(mapped(batch), single, atol=1e-5)
    np.testing.assert_allclose(jax.jacrev(jax.vmap(plain))(batch)[0, 0], single[0], atol=1e-5)


def test_nothing_leaks():
    with jax.checking_leaks():
        jax.jit(jax.grad(plain))(matrix())


@pytest.mark.parametrize("symmetric", [False, True])
def test_complex_operators_have_derivatives(symmetric):
    a, b = matrix(0, np.complex64), matrix(1, np.complex64)
    if symmetric:
        a, b = a + a.conj().T, b + b.conj().T

    def real(a):
        return plain(MatrixOperator(a, symmetric=symmetric)).real

    _, change = jax.jvp(real, (a,), (b,))
    np.testing.assert_allclose(change, real(b), rtol=1e-4)
    np.testing.assert_allclose(jnp.sum(jax.grad(real)(a) * b).real, change, rtol=1e-4)
    if not symmetric:
        _, change = jax.jvp(lambda a: plain(MatrixOperator(a)), (a,), (b,))
        np.testing.assert_allclose(change, plain(MatrixOperator(b)), rtol=1e-4)


class Mixed(linalg.Operator):
    """With leaves that have no derivative."""

    weights: jax.Array
    shift: jax.Array
    noise: jax.Array
    unused: jax.Array
    symmetric: bool = True
    positive_semidefinite: bool = False

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((N,), jnp.dtype(jnp.float32))

    def mv(self, vector: Any) -> Any:
        return (
            self.weights * vector * self.shift.astype(jnp.float32) * jax.random.uniform(self.noise)
        )


def test_integers_and_keys_among_the_leaves_do_no_harm():
    def value(weights, unused):
        return plain(Mixed(weights, jnp.asarray(3), jax.random.key(7), unused))

    weights = jnp.arange(float(N))
    of_weights, of_unused = jax.grad(value, argnums=(0, 1))(weights, jnp.ones(2))
    factor = 3 * jax.random.uniform(jax.random.key(7))
    np.testing.assert_allclose(of_weights, jnp.full(N, factor), rtol=1e-5)
    np.testing.assert_array_equal(of_unused, np.zeros(2))
    _, change = jax.jvp(lambda u: value(weights, u), (jnp.ones(2),), (jnp.ones(2),))
    assert change == 0


def test_a_derivative_with_respect_to_nothing_of_the_operator_is_zero():
    assert jax.grad(lambda x: x**2 + 0 * plain(matrix()))(jnp.asarray(3.0)) == 6


class Drawn(GradientPairs):
    """As many blocks as one likes."""

    count: int

    def blocks(self) -> int:
        return self.count

    def block(self, operator: Any, index: Any) -> tuple[jax.Array, jax.Array]:
        block = jax.random.normal(jax.random.fold_in(KEY, index), (2000, 8))
        return block, block


@pytest.mark.parametrize("direction", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))[1]])
def test_memory_does_not_grow_with_the_number_of_blocks(direction):
    def temporary(count):
        def value(x):
            operator = FunctionOperator(lambda v: jnp.sin(x) * v, jnp.zeros(2000))
            return attach(jnp.asarray(0.0), operator, Drawn(count))

        compiled = jax.jit(direction(value)).lower(jnp.ones(2000)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(64) <= 1.1 * temporary(2)


def test_several_blocks_add_up():
    x = jnp.arange(1.0, 2001)
    gradient = jax.grad(
        lambda x: attach(jnp.asarray(0.0), FunctionOperator(lambda v: x * v, x), Drawn(3))
    )(x)
    expected = sum(jnp.sum(Drawn(3).block(ANY_OPERATOR, i)[0] ** 2, axis=1) for i in range(3))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_the_pairs_of_a_diagonal_count_element_by_element():
    pairs = StoredPairs(matrix(0), matrix(1))

    def value(a):
        return attach(jnp.zeros(N), MatrixOperator(a), pairs)

    _, change = jax.jvp(value, (matrix(2),), (matrix(3),))
    np.testing.assert_allclose(
        change, jnp.sum(matrix(0) * (matrix(3) @ matrix(1)), axis=1), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_several_can_be_chosen_at_run_time(which):
    choices = (
        StoredPairs(matrix(0)[:, :3], matrix(1)[:, :3]),
        StoredPairs(matrix(2)[:, :5], matrix(3)[:, :5]),
    )

    def gradient(which, gradient_pairs):
        return jax.grad(
            lambda a: attach(jnp.asarray(0.0), MatrixOperator(a), gradient_pairs(which))
        )(matrix())

    got = jax.jit(lambda i: gradient(i, lambda i: Chosen(i, choices)))(which)
    np.testing.assert_allclose(got, gradient(which, lambda i: choices[i]), rtol=1e-4, atol=1e-4)


def test_the_value_costs_nothing_of_the_derivative():
    calls = []

    class Counted(GradientPairs):
        def blocks(self) -> int:
            return 1

        def block(self, operator: Any, index: Any) -> tuple[jax.Array, jax.Array]:
            calls.append(index)
            return jnp.ones((N, 1)), jnp.ones((N, 1))

    filter_jit(lambda a: attach(jnp.asarray(1.0), MatrixOperator(a), Counted()))(matrix())
    assert not calls
