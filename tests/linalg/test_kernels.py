"""The matrix of a kernel, compared with the one that is stored."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import linalg
from vernal.debug import assert_max_traces

POINTS = jax.random.normal(jax.random.key(0), (23, 2))
BLOCK = jax.random.normal(jax.random.key(1), (23, 4))


class Gaussian(vernal.Module):
    log_scale: jax.Array

    def __call__(self, a, b):
        return jnp.exp(-jnp.sum((a - b) ** 2) * jnp.exp(-2 * self.log_scale))


def gaussian():
    return Gaussian(jnp.asarray(0.3))


def stored(kernel, points, noise):
    matrix = jax.vmap(lambda a: jax.vmap(lambda b: kernel(a, b))(points))(points)
    return matrix + noise * jnp.eye(len(matrix), dtype=matrix.dtype)


@pytest.mark.parametrize("batch_size", [None, 1, 5, 100])
def test_products_agree_with_the_stored_matrix(batch_size):
    operator = linalg.kernel_operator(gaussian(), POINTS, noise=0.1, batch_size=batch_size)
    assert operator.symmetric and operator.positive_semidefinite and operator.size == 23
    want = stored(gaussian(), POINTS, 0.1)
    run = vernal.filter_jit(
        lambda o: (
            o.matmul(BLOCK),
            o.adjoint_matmul(BLOCK),
            o.mv(BLOCK[:, 0]),
            o.adjoint_mv(BLOCK[:, 0]),
        )
    )
    for product in run(operator):
        block = BLOCK if product.ndim == 2 else BLOCK[:, 0]
        np.testing.assert_allclose(product, want @ block, rtol=1e-5, atol=1e-5)
    assert operator.products_at_once(4) == 4


def test_points_may_be_trees_and_numpy_arrays():
    points = {"place": np.asarray(POINTS), "kind": np.arange(23) % 3}

    def kernel(a, b):
        same = (a["kind"] == b["kind"]).astype(jnp.float32)
        return same * gaussian()(a["place"], b["place"])

    operator = linalg.kernel_operator(kernel, points)
    want = stored(kernel, jax.tree.map(jnp.asarray, points), 0.0) @ BLOCK
    np.testing.assert_allclose(operator.matmul(BLOCK), want, rtol=1e-5, atol=1e-5)


def test_every_point_may_have_its_own_noise():
    noise = jnp.arange(23.0)
    operator = linalg.kernel_operator(lambda a, b: jnp.zeros(()), POINTS, noise=noise)
    np.testing.assert_allclose(operator.matmul(BLOCK), noise[:, None] * BLOCK)


def test_a_complex_kernel_makes_a_hermitian_operator():
    def kernel(a, b):
        turn = jnp.sum(a - b)
        return jax.lax.complex(jnp.cos(turn), jnp.sin(turn))

    operator = linalg.kernel_operator(kernel, POINTS, noise=1.0, batch_size=4)
    block = jax.lax.complex(BLOCK, BLOCK[::-1])
    want = stored(kernel, POINTS, 1.0)
    np.testing.assert_allclose(want, want.conj().T, atol=1e-6)
    assert operator.dtype == jnp.complex64
    np.testing.assert_allclose(operator.matmul(block), want @ block, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(operator.adjoint_matmul(block), want @ block, rtol=1e-4, atol=1e-4)


def test_double_precision_is_kept():
    with jax.enable_x64(True):
        points = jnp.linspace(0.0, 1.0, 5, dtype=jnp.float64)
        operator = linalg.kernel_operator(lambda a, b: jnp.exp(-abs(a - b)), points, noise=1e-9)
        want = np.exp(-abs(np.subtract.outer(points, points))) + 1e-9 * np.eye(5)
        np.testing.assert_allclose(operator.matmul(jnp.eye(5)), want, rtol=1e-14)


def test_derivatives_by_parameters_points_and_noise_are_those_of_the_stored_matrix():
    def blocked(kernel, points, noise):
        operator = linalg.kernel_operator(kernel, points, noise=noise, batch_size=5)
        return jnp.sum(BLOCK * operator.matmul(BLOCK) ** 2)

    def whole(kernel, points, noise):
        return jnp.sum(BLOCK * (stored(kernel, points, noise) @ BLOCK) ** 2)

    args = gaussian(), POINTS, jnp.asarray(0.2)
    got = jax.jit(jax.grad(blocked, argnums=(0, 1, 2)))(*args)
    want = jax.jit(jax.grad(whole, argnums=(0, 1, 2)))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)

    def closed(log_scale):
        return blocked(lambda a, b: Gaussian(log_scale)(a, b), POINTS, jnp.asarray(0.2))

    np.testing.assert_allclose(
        jax.jit(jax.grad(closed))(args[0].log_scale), want[0].log_scale, rtol=1e-3
    )


@pytest.mark.parametrize("derivative", [False, True], ids=["products", "gradient"])
def test_the_matrix_is_never_stored(derivative):
    size = 4000

    def energy(kernel, points):
        operator = linalg.kernel_operator(kernel, points, batch_size=8)
        return jnp.sum(operator.matmul(jnp.ones((size, 2))) ** 2)

    run = jax.jit(jax.grad(energy) if derivative else energy)
    points = jax.ShapeDtypeStruct((size, 2), jnp.float32)
    memory = run.lower(gaussian(), points).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * size**2 / 20


def test_an_operator_made_anew_does_not_compile_again():
    run = vernal.filter_jit(assert_max_traces(lambda o, b: o.matmul(b), max_traces=1))
    for scale in (0.1, 0.2):
        run(linalg.kernel_operator(Gaussian(jnp.asarray(scale)), POINTS, noise=scale), BLOCK)


@pytest.mark.parametrize(
    "points",
    [
        jnp.ones(()),
        {},
        (jnp.ones((3, 2)), jnp.ones((4, 2))),
        jnp.ones((0, 2)),
        [1.0, 2.0],
    ],
    ids=["scalar", "nothing", "two lengths", "no points", "list of numbers"],
)
def test_points_of_no_single_length_are_refused(points):
    with pytest.raises(ValueError, match="the points must be arrays of the same length"):
        linalg.kernel_operator(lambda a, b: jnp.zeros(()), points)


@pytest.mark.parametrize(
    "kernel",
    [lambda a, b: a - b, lambda a, b: jnp.zeros((), int), lambda a, b: (a[0], b[0])],
    ids=["vector", "integer", "pair"],
)
def test_a_kernel_that_returns_no_number_is_refused(kernel):
    with pytest.raises(TypeError, match="must return one floating-point number for two points"):
        linalg.kernel_operator(kernel, POINTS)


def test_other_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="the noise does not fit the points"):
        linalg.kernel_operator(gaussian(), POINTS, noise=jnp.ones(22))
    with pytest.raises(ValueError, match="`batch_size` is too small"):
        linalg.kernel_operator(gaussian(), POINTS, batch_size=0)
    with pytest.raises(TypeError, match="kernel_operator needs a function"):
        inspect.unwrap(linalg.kernel_operator)(jnp.eye(2), POINTS)
