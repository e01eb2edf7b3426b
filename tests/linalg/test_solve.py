"""`solve` and `svds`: against dense answers, with derivatives, and with honest words about what was found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import linalg
from vernal.linalg import MatrixOperator, solve, svds


def general(n=8, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((n, n)) + 4 * np.eye(n)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        # With less on its diagonal, rounding alone leaves dense solutions of `A A^*` a residual of 2e-6 of b.
        matrix = matrix + 1j * rng.standard_normal((n, n)) + 4 * np.eye(n)
    return jnp.asarray(matrix, dtype)


def solution(matrix, right, positive=False):
    matrix = matrix @ matrix.conj().T if positive else matrix
    operator = MatrixOperator(matrix, positive_semidefinite=positive)
    return solve(operator, right, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
@pytest.mark.parametrize("positive", [True, False])
def test_solutions_are_those_of_dense_equations(positive, dtype):
    matrix, right = general(dtype=dtype), jnp.arange(8).astype(dtype)
    found = solution(matrix, right, positive)
    full = matrix @ matrix.conj().T if positive else matrix
    np.testing.assert_allclose(found.value, jnp.linalg.solve(full, right), rtol=1e-3, atol=1e-4)
    assert found.tolerance_met and found.is_finite
    np.testing.assert_allclose(found.error, jnp.linalg.norm(right - full @ found.value), atol=1e-4)


@pytest.mark.parametrize("positive", [True, False])
def test_derivatives_are_those_of_the_solution(positive):
    matrix, right = general(), jnp.arange(8.0)

    def ours(matrix, right):
        return jnp.sum(solution(matrix, right, positive).value ** 2)

    def dense(matrix, right):
        full = matrix @ matrix.T if positive else matrix
        return jnp.sum(jnp.linalg.solve(full, right) ** 2)

    got, expected = (jax.grad(f, (0, 1))(matrix, right) for f in (ours, dense))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3)

    def looped(of):
        def total(matrix):
            def step(carry, c):
                return carry + of(c * matrix, right), None

            return jax.lax.scan(step, jnp.float32(0), jnp.array([1.0, 2.0]))[0]

        return jax.jvp(jax.grad(total), (matrix,), (jnp.ones_like(matrix),))[1]

    np.testing.assert_allclose(looped(ours), looped(dense), rtol=1e-2, atol=1e-2)
    mapped = jax.vmap(ours, (None, 0))(matrix, jnp.stack([right, 2 * right]))
    np.testing.assert_allclose(mapped[1], 4 * dense(matrix, right), rtol=1e-3)


def test_what_is_not_solved_says_so():
    singular = MatrixOperator(jnp.diag(jnp.array([1.0, 0.0])), positive_semidefinite=True)
    assert not solve(singular, jnp.ones(2)).tolerance_met
    spoilt = MatrixOperator(jnp.full((2, 2), jnp.nan), positive_semidefinite=True)
    found = solve(spoilt, jnp.ones(2))
    assert not found.tolerance_met and not found.is_finite
    assert not solve(MatrixOperator(jnp.full((2, 2), jnp.nan)), jnp.ones(2)).tolerance_met
    stiff = MatrixOperator(jnp.diag(jnp.geomspace(1, 1e-4, 50)), positive_semidefinite=True)
    assert not solve(stiff, jnp.ones(50), max_steps=3).tolerance_met
    assert solve(stiff, jnp.zeros(50)).tolerance_met
    assert solve(MatrixOperator(jnp.eye(1)), jnp.ones(1)).tolerance_met
    with pytest.raises(TypeError, match="the preconditioner cannot be called"):
        getattr(solve, "__wrapped__", solve)(stiff, jnp.ones(50), preconditioner=3)


@pytest.mark.parametrize("rtol", [1e-5, 1e-10, 0.0])
def test_general_equations_that_are_hard_have_the_best_solution_found(rtol):
    """All of them were NaN: JAX solved normal equations, which square the condition."""
    with jax.enable_x64(True):
        scaled = jnp.diag(jnp.logspace(-6, 6, 20))
        found = solve(MatrixOperator(scaled), jnp.ones(20), rtol=rtol)
        assert found.tolerance_met
        assert float(found.error) <= max(1.01 * rtol, 1e-14) * 20**0.5
        q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(20, 20)))
        near = jnp.asarray(q @ np.diag([*np.linspace(1, 2, 19), 1e-10]) @ q.T)
        assert float(solve(MatrixOperator(near), jnp.ones(20), rtol=rtol).error) < 1e-5


def test_more_accuracy_than_there_is_spoils_nothing():
    """Consistent equations of rank n - 1, or almost: once solved, only rounding is left. These were NaN."""
    with jax.enable_x64(True):
        for seed in range(12):
            rng = np.random.default_rng(seed)
            size = 6 if seed % 2 else 15
            matrix = rng.normal(size=(size, size - 1)) @ rng.normal(size=(size - 1, size))
            right = jnp.asarray(matrix @ rng.normal(size=size))
            operator = MatrixOperator(jnp.asarray(matrix + 1e-9 * rng.normal(size=(size, size))))
            first, last = (solve(operator, right, rtol=rtol, max_steps=30) for rtol in (1e-4, 0.0))
            assert first.tolerance_met and last.is_finite
            assert last.error <= 2 * first.error + 1e-14 * jnp.linalg.norm(right)
    # Nothing solves these, and the second cycle breaks down: what the first one found remains.
    operator = MatrixOperator(jnp.diag(jnp.array([0.0, 2.0, 3.0])))
    found = solve(operator, jnp.ones(3), rtol=0.0)
    assert found.is_finite and not found.tolerance_met and found.error < 1.1
    # A breakdown at the start leaves no solution, and says so.
    found = solve(MatrixOperator(jnp.zeros((3, 3))), jnp.ones(3))
    assert not found.is_finite and not found.tolerance_met


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("size", [8, 50])
def test_general_equations_need_no_scaling(scale, size):
    """JAX's incremental GMRES takes steps of the length of the tolerance, whatever the operator makes of them."""
    matrix = scale * (general(size) + 2 * size**0.5 * jnp.eye(size))
    made = jnp.linalg.inv(matrix + 0.1 * scale * general(size))
    for preconditioner in (None, made.__matmul__):
        found = solve(MatrixOperator(matrix), jnp.ones(size), preconditioner=preconditioner)
        assert found.tolerance_met
        found = solve(
            MatrixOperator(matrix), jnp.ones(size), preconditioner=preconditioner, max_steps=4
        )
        assert found.tolerance_met


def test_derivatives_whose_equations_are_not_solved_are_nan():
    """They were finite and wrong, by up to their own size, next to a solution that met its tolerance."""
    size = 60
    shift = jnp.roll(jnp.eye(size), 1, 0)

    def turned(t):
        return MatrixOperator(shift + t * jnp.diag(jnp.arange(size * 1.0) % 3))

    def first(t, right):
        return solve(turned(t), right).value[0]

    assert solve(turned(0.0), jnp.ones(size)).tolerance_met
    by_parameter, by_right = jax.grad(first, (0, 1))(0.0, jnp.ones(size))
    assert jnp.isnan(by_parameter) and jnp.all(jnp.isnan(by_right))

    stiff = MatrixOperator(jnp.diag(jnp.logspace(0, 8, 50)), positive_semidefinite=True)

    def total(right):
        return jnp.sum(solve(stiff, right).value)

    unit = jnp.eye(50)[0]
    assert solve(stiff, unit).tolerance_met
    assert jnp.all(jnp.isnan(jax.grad(total)(unit)))
    assert jnp.isnan(jax.jvp(total, (unit,), (jnp.ones(50),))[1])

    # Where the solution itself is wrong, and says so, it has derivatives by the right-hand side alone.
    def hard(t):
        matrix = jnp.array([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0]])
        return MatrixOperator((1 + t) * matrix, positive_semidefinite=True)

    def first(t, right):
        found = solve(hard(t), right, max_steps=1)
        return found.value[0], found

    (by_parameter, by_right), found = jax.grad(first, (0, 1), has_aux=True)(0.0, jnp.ones(3))
    assert not found.tolerance_met and found.is_finite
    assert jnp.isnan(by_parameter)
    np.testing.assert_allclose(by_right, [1, 0, 0], atol=1e-6)


@pytest.mark.parametrize("positive", [True, False])
def test_second_derivatives_by_operator_and_right_side_in_all_modes(positive):
    matrix = jnp.array([[3.0, 1.0, 0.0], [1.0, 4.0, 1.0], [0.0, 1.0, 5.0]])

    def of(solution_of):
        def total(t, right):
            return jnp.sum(jnp.sin(solution_of(matrix + t * jnp.eye(3), right)))

        return total

    ours = of(lambda a, b: solve(MatrixOperator(a, positive_semidefinite=positive), b).value)
    dense, at = of(jnp.linalg.solve), (0.1, jnp.arange(1.0, 4.0))
    want = jax.hessian(dense, (0, 1))(*at)
    for outer in (jax.jacfwd, jax.jacrev):
        for inner in (jax.jacfwd, jax.jacrev):
            got = jax.jit(outer(inner(ours, (0, 1)), (0, 1)))(*at)
            for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("of_function", [True, False])
def test_derivatives_in_half_precision(dtype, positive, of_function):
    """The residual of a function in half precision never meets the default tolerance."""
    root = jax.random.normal(jax.random.key(0), (30, 30))
    matrix, right = (root @ root.T / 30 + jnp.eye(30)).astype(dtype), jnp.ones(30, dtype)
    operator = MatrixOperator(matrix, positive_semidefinite=positive)
    if of_function:
        operator = linalg.FunctionOperator(
            lambda v: matrix @ v, right, positive_semidefinite=positive
        )
    by_right = jax.grad(lambda b: solve(operator, b).value[0].astype(jnp.float32))(right)
    want = np.linalg.inv(np.float64(matrix))[0]
    off = np.linalg.norm(np.float64(by_right) - want) / np.linalg.norm(want)
    assert off < 4 * float(jnp.finfo(dtype).eps)


@pytest.mark.parametrize("positive", [True, False])
def test_an_absolute_tolerance_says_nothing_of_the_size_of_cotangents(positive):
    matrix = jnp.diag(jnp.array([1.0, 2.0, 4.0]))
    operator = MatrixOperator(matrix, positive_semidefinite=positive)

    @jax.grad
    def small(right):
        return 1e-6 * jnp.sum(solve(operator, right, rtol=0.0, atol=1e-3).value)

    for scale in (1.0, 1e-2, 1e-3):
        np.testing.assert_allclose(
            small(scale * jnp.ones(3)), 1e-6 / jnp.diagonal(matrix), rtol=0.05
        )
    np.testing.assert_allclose(small(jnp.zeros(3)), 1e-6 / jnp.diagonal(matrix), rtol=0.05)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("positive", [True, False])
def test_operators_of_any_size(positive, scale):
    left = np.linalg.qr(general())[0]
    right = left if positive else np.linalg.qr(general().T)[0]
    matrix = scale * jnp.asarray(left @ np.diag(np.linspace(1, 2, 8)) @ right.T, jnp.float32)
    operator = MatrixOperator(matrix, positive_semidefinite=positive)
    found = solve(operator, jnp.ones(8), preconditioner=lambda x: x / scale)
    assert found.tolerance_met and solve(operator, jnp.ones(8)).tolerance_met
    by_right = jax.grad(lambda b: scale * solve(operator, b).value[0])(jnp.ones(8))
    np.testing.assert_allclose(
        by_right, np.linalg.inv(np.float64(matrix / scale))[0], rtol=1e-3, atol=1e-4
    )


def test_a_preconditioner_saves_steps():
    points = jnp.linspace(0, 1, 100)
    kernel = linalg.kernel_operator(lambda a, b: jnp.exp(-((a - b) ** 2)), points, noise=0.05)
    made = linalg.pivoted_cholesky(kernel, 8)
    right = jnp.sin(5 * points)
    assert not solve(kernel, right, rtol=1e-3, max_steps=4).tolerance_met
    assert solve(kernel, right, rtol=1e-3, max_steps=4, preconditioner=made.solve).tolerance_met


@pytest.mark.parametrize("shape", [(9, 6), (6, 9), (6, 6)])
@pytest.mark.sample(3)
def test_singular_values_are_those_of_the_matrix(shape):
    matrix = jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.float32)
    found = svds(matrix, 3)
    u, s, vt = np.linalg.svd(matrix)
    np.testing.assert_allclose(found.values, s[:3], rtol=1e-5)
    np.testing.assert_allclose(np.abs(np.sum(found.left * u.T[:3], 1)), 1, atol=1e-4)
    np.testing.assert_allclose(np.abs(np.sum(found.right * vt[:3], 1)), 1, atol=1e-4)
    assert np.all(np.abs(found.values - s[:3]) <= found.errors + 1e-6 * s[0])
    assert found.tolerance_met and found.is_finite
    gradient = jax.grad(lambda m: svds(m, 1).values[0])(matrix)
    np.testing.assert_allclose(gradient, np.outer(u[:, 0], vt[0]), atol=1e-4)


def test_singular_values_of_functions_and_operators_and_of_zero():
    found = svds(lambda v: {"twice": 2 * v["x"]}, 2, example={"x": jnp.zeros(3)})
    np.testing.assert_allclose(found.values, [2, 2], rtol=1e-5)
    assert found.left["twice"].shape == (2, 3)
    np.testing.assert_allclose(
        svds(MatrixOperator(general()), 1).values[0], np.linalg.norm(general(), 2), rtol=1e-5
    )
    zero = svds(jnp.zeros((4, 3)), 2)
    np.testing.assert_array_equal(zero.values, [0, 0])
    np.testing.assert_array_equal(zero.left, jnp.zeros((2, 4)))
    tiny = svds(jnp.diag(jnp.array([1.0, 1e-6])), 2)
    assert abs(tiny.values[1] - 1e-6) <= tiny.errors[1]
    assert not svds(jnp.full((3, 2), jnp.nan), 1).is_finite
    for linear, example in [(lambda v: v, None), (jnp.eye(2), jnp.zeros(2)), (jnp.zeros(2), None)]:
        with pytest.raises(ValueError, match="svds needs an operator, a matrix, or a function"):
            svds(linear, 1, example=example)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("positive", [True, False])
def test_the_error_is_that_of_the_value_in_half_precision(dtype, positive):
    root = jax.random.normal(jax.random.key(0), (60, 60))
    matrix = (root @ root.T / 60 + jnp.eye(60)).astype(dtype)
    right = jax.random.normal(jax.random.key(1), (60,)).astype(dtype)
    operator = MatrixOperator(matrix, positive_semidefinite=positive)
    found = solve(operator, right)
    exact = [np.asarray(x, np.float64) for x in (matrix, found.value, right)]
    residual = np.linalg.norm(exact[2] - exact[0] @ exact[1])
    assert found.value.dtype == dtype and float(found.error) == pytest.approx(residual, rel=0.01)
    assert not found.tolerance_met
    assert solve(operator, right, rtol=float(2 * residual)).tolerance_met


def test_a_right_side_of_integers():
    operator = MatrixOperator(2 * jnp.eye(3), positive_semidefinite=True)
    found = solve(operator, np.array([2, 4, 6]))
    assert found.tolerance_met and jnp.allclose(found.value, jnp.array([1.0, 2.0, 3.0]))


def test_singular_values_of_integers_are_refused():
    with pytest.raises(TypeError, match=r"trees of floating-point arrays(.|\n)*astype"):
        svds(np.ones((3, 2), int), 1)
