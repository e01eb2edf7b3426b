"""Under `jax.shard_map` with its check of varying axes, each device has an operator of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vernal import estimators, linalg, loops
from vernal.linalg import FunctionOperator, MatrixOperator

N = 12
KEY = jax.random.key(0)


def positive(matrix):
    return MatrixOperator(matrix, positive_semidefinite=True)


def function(matrix):
    return FunctionOperator(lambda x: matrix @ x, jnp.ones(N), positive_semidefinite=True)


def expm(matrix):
    return jax.scipy.linalg.expm(matrix)


CASES = {
    "trace": lambda a: estimators.trace(positive(a), KEY, matvecs=8).value,
    "trace of a function": lambda a: estimators.trace(function(a), KEY, matvecs=8).value,
    "exact diagonal": lambda a: estimators.diagonal(function(a), KEY, matvecs=N).value,
    "logdet": lambda a: estimators.logdet(positive(a), KEY, matvecs=10).value,
    "exact logdet": lambda a: estimators.logdet(positive(a), KEY, matvecs=N).value,
    "trace_of_function": lambda a: (
        estimators.trace_of_function(
            lambda x: a[0, 0] * jnp.sqrt(x), positive(a), KEY, matvecs=10
        ).value
    ),
    "frobenius_norm": lambda a: estimators.frobenius_norm(a, KEY, matvecs=8).value,
    "schatten_norm": lambda a: estimators.schatten_norm(a, KEY, 3, matvecs=21).value,
    "eigsh": lambda a: linalg.eigsh(positive(a), 2).values,
    "svds": lambda a: linalg.svds(a, 2).values,
    "funm, symmetric": lambda a: linalg.funm(jnp.exp, positive(a), jnp.ones(N)).value,
    "funm, general": lambda a: linalg.funm(expm, MatrixOperator(a), jnp.ones(N)).value,
    "lanczos": lambda a: linalg.lanczos(positive(a), jnp.ones(N), 4).diagonal,
    "solve": lambda a: linalg.solve(positive(a), jnp.ones(N)).value,
    "pivoted_cholesky": lambda a: linalg.pivoted_cholesky(positive(a), 3, noise=0.1).solve(
        jnp.ones(N)
    ),
    "kernel_operator": lambda a: (
        estimators.logdet(
            linalg.kernel_operator(lambda x, y: jnp.exp(-((x - y) ** 2)), a[:, 0], noise=0.1),
            KEY,
            matvecs=10,
        ).value
    ),
}


def matrices():
    made = np.random.default_rng(0).standard_normal((8, N, N))
    return jnp.asarray(made @ made.transpose(0, 2, 1) / N + np.eye(N), jnp.float32)


def on_devices(fn):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        lambda a: jnp.ravel(fn(a[0]))[None], mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(2)
def test_values_and_gradients_are_those_of_each_device_alone(name):
    fn, given = CASES[name], matrices()
    alone = jax.vmap(lambda a: jnp.ravel(fn(a)))
    with jax.numpy_dtype_promotion("standard"):
        found, wanted = (
            jax.jit(jax.value_and_grad(lambda a, each=each: jnp.sum(jnp.tanh(each(a) / 9))))(given)
            for each in (on_devices(fn), alone)
        )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-4)
    size = np.abs(wanted[1]).max()
    assert size > 0
    np.testing.assert_allclose(found[1], wanted[1], atol=2e-4 * size)


def test_densities_are_those_of_each_device_alone():
    def fn(a):
        return estimators.spectral_density(positive(a), KEY, matvecs=10, points=5).density

    found = jax.jit(on_devices(fn))(matrices())
    np.testing.assert_allclose(found, jax.vmap(fn)(matrices()), rtol=1e-4, atol=1e-6)


def test_attempts_are_not_made_where_their_intervals_cannot_be_computed():
    def fn(a):
        operator = MatrixOperator(jnp.tile(a, (6, 6)))
        return estimators.trace(operator, KEY, rtol=1e-3, max_matvecs=100).value

    with pytest.raises(NotImplementedError, match="JAX's `betainc` cannot compute intervals"):
        on_devices(fn)(matrices())


def test_general_equations_are_refused():
    with pytest.raises(NotImplementedError, match="JAX's GMRES cannot solve equations that differ"):
        on_devices(lambda a: linalg.solve(MatrixOperator(a), jnp.ones(N)).value)(matrices())


def test_a_loop_searches_a_sorted_array_on_each_device():
    # JAX 0.12 has a primitive of another kind for the search.
    grid = jnp.arange(5.0)

    def fn(a):
        def step(total, x):
            return total + jnp.searchsorted(grid, x).astype(jnp.float32), None

        return loops.scan(step, a[0, 0], a[0])[0]

    found = jax.jit(on_devices(fn))(matrices())
    np.testing.assert_allclose(found[:, 0], jax.vmap(fn)(matrices()), rtol=1e-6)
