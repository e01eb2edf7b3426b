"""Under `jax.shard_map` with its check of varying axes, each device has an operator of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from vernal import estimators, linalg, loops
from vernal.linalg import FunctionOperator, MatrixOperator

N = 16
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
    "logdet": lambda a: estimators.logdet(positive(a), KEY, matvecs=15).value,
    "exact logdet": lambda a: estimators.logdet(positive(a), KEY, matvecs=N).value,
    "trace_of_function": lambda a: (
        estimators.trace_of_function(
            lambda x: a[0, 0] * jnp.sqrt(x), positive(a), KEY, matvecs=15
        ).value
    ),
    "frobenius_norm": lambda a: estimators.frobenius_norm(a, KEY, matvecs=8).value,
    "schatten_norm": lambda a: estimators.schatten_norm(a, KEY, 3, matvecs=31).value,
    "eigsh": lambda a: linalg.eigsh(positive(a), 2).values,
    "eigsh, vectors": lambda a: jnp.stack([abs(v) for v in linalg.eigsh(positive(a), 2).vectors]),
    "svds": lambda a: linalg.svds(a, 2).values,
    "svds, vectors": lambda a: jnp.stack(
        [abs(v) for v in (*linalg.svds(a, 2).left, *linalg.svds(a, 2).right)]
    ),
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
            matvecs=15,
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
        return estimators.spectral_density(positive(a), KEY, matvecs=15, points=5).density

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


def operator_of(s, a):
    return FunctionOperator(
        lambda v: a @ v * jnp.exp(s) + s * jnp.arange(1.0 * N) * v, jnp.ones(N), symmetric=True
    )


RESULTS = {
    "solve": lambda operator: (
        linalg.solve(
            FunctionOperator(operator.mv, jnp.ones(N), positive_semidefinite=True), jnp.ones(N)
        ).value
    ),
    "eigsh": lambda operator: jnp.abs(linalg.eigsh(operator, 1).vectors[0]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_parameter_that_devices_share_is_made_to_vary(name):
    def total(s, a):
        operator = operator_of(jax.lax.pcast(s, "x", to="varying"), a[0])
        return jax.lax.psum(jnp.sum(jnp.sin(RESULTS[name](operator))), "x")

    def alone(s, a):
        return jnp.sum(jnp.sin(RESULTS[name](operator_of(s, a))))

    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(total, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    s = jnp.asarray(0.3)
    found = jax.jit(jax.value_and_grad(mapped))(s, matrices())
    wanted = jax.vmap(jax.value_and_grad(alone), (None, 0))(s, matrices())
    for x, y in zip(found, wanted, strict=True):
        assert abs(y.sum()) > 0.1
        np.testing.assert_allclose(x, y.sum(), rtol=2e-4)


@pytest.mark.parametrize("of", ["operator", "preconditioner"])
def test_equations_whose_arrays_differ_only_in_part_are_refused(of):
    shared = jnp.full(N, 2.0)

    def fn(a):
        if of == "operator":
            operator = FunctionOperator(
                lambda v: a @ v + shared * v, jnp.ones(N), positive_semidefinite=True
            )
            return linalg.solve(operator, jnp.ones(N)).value
        divide = lambda v: v / shared  # noqa: E731 (what is tested closes over an array)
        return linalg.solve(positive(a), jnp.ones(N), preconditioner=divide).value

    with pytest.raises(NotImplementedError, match="JAX's solvers cannot share an array between"):
        on_devices(fn)(matrices())


def test_a_loop_searches_a_sorted_array_on_each_device():
    # JAX 0.12 has a primitive of another kind for the search.
    grid = jnp.arange(5.0)

    def fn(a):
        def step(total, x):
            return total + jnp.searchsorted(grid, x).astype(jnp.float32), None

        return loops.scan(step, a[0, 0], a[0])[0]

    found = jax.jit(on_devices(fn))(matrices())
    np.testing.assert_allclose(found[:, 0], jax.vmap(fn)(matrices()), rtol=1e-6)


# --- operators of derivatives, whose point the devices share or not

POINT = jnp.asarray([0.3, -0.7, 1.1])
DATA = jnp.asarray(np.random.default_rng(1).standard_normal((8, 2, 3)), jnp.float32)


def outputs(w, x):
    return jnp.tanh(x @ w)


def half_mean(y):
    return jnp.mean(y**2) / 2


def mean_over_devices(y):
    return jax.lax.pmean(half_mean(y), "x")


def like_the_point(w, x):
    return jnp.tanh(w) * jnp.sum(x) + jnp.roll(w, 1) * jnp.mean(x)


def square_product(x, u):
    return jnp.roll(u, 1) * jnp.sum(x) + jnp.outer(x[0], x[1]) @ u


def on_each(fn, data=DATA):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(
        lambda w, x: fn(w, x[0])[None], mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x")
    )
    return jax.jit(mapped)(POINT, data)


def own(w):
    return jax.lax.pcast(w, "x", to="varying")


ALONE = {
    "product of a Jacobian": lambda w, x: linalg.jacobian_operator(like_the_point, w, x).mv(w),
    "adjoint of a Jacobian": lambda w, x: linalg.jacobian_operator(like_the_point, w, x).adjoint_mv(
        w
    ),
    "H of a Jacobian": lambda w, x: linalg.jacobian_operator(like_the_point, w, x).H.mv(w),
    "adjoint of a function": lambda w, x: FunctionOperator(
        lambda u: square_product(x, u), w
    ).adjoint_mv(w),
    "svds of a function": lambda w, x: (
        linalg.svds(lambda u: jnp.concatenate([x @ u, jnp.sum(x) * u]), 3, example=w).values
    ),
    "svds of an operator": lambda w, x: (
        linalg.svds(FunctionOperator(lambda u: square_product(x, u), w), 3).values
    ),
    "XDiag": lambda w, x: (
        estimators.diagonal(
            FunctionOperator(lambda u: square_product(jnp.tile(x, (2, 4)), u), jnp.ones(12)),
            KEY,
            matvecs=15,
            method=estimators.XDiag(),
        ).value
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_transposed_products_are_those_of_each_device_alone(name):
    found = on_each(ALONE[name])
    wanted = jnp.stack([ALONE[name](POINT, x) for x in DATA])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_gauss_newton_operators_are_of_all_devices_or_of_each():
    whole = DATA.reshape(16, 3)
    build = linalg.gauss_newton_operator
    cases = [
        (lambda w, x: build(outputs, w, x), build(outputs, POINT, whole)),
        (
            lambda w, x: build(outputs, w, x, loss=mean_over_devices),
            build(outputs, POINT, whole, loss=half_mean),
        ),
    ]
    for operator, wanted in cases:
        found = on_each(lambda w, x, operator=operator: operator(w, x).mv(jnp.ones(3)))
        np.testing.assert_allclose(found, jnp.tile(wanted.mv(jnp.ones(3)), (8, 1)), rtol=1e-5)
        largest = on_each(lambda w, x, operator=operator: linalg.eigsh(operator(w, x), 1).values)
        np.testing.assert_allclose(largest[0], linalg.eigsh(wanted, 1).values, rtol=1e-5)
    found = on_each(lambda w, x: build(outputs, own(w), x, loss=half_mean).mv(x[0]))
    alone = [build(outputs, POINT, x, loss=half_mean).mv(x[0]) for x in DATA]
    np.testing.assert_allclose(found, jnp.stack(alone), rtol=1e-5)


def test_a_gauss_newton_operator_does_not_sum_losses_over_devices():
    with pytest.raises(ValueError, match="the loss of `half_mean` differs between devices"):
        on_each(lambda w, x: linalg.gauss_newton_operator(outputs, w, x, loss=half_mean).mv(POINT))


@pytest.mark.parametrize(
    "operator",
    [
        lambda w, x: linalg.hessian_operator(lambda w: mean_over_devices(outputs(w, x)), w),
        lambda w, x: linalg.gauss_newton_operator(outputs, w, x, loss=mean_over_devices),
        lambda w, x: linalg.jacobian_operator(
            lambda w: jax.lax.pmean(like_the_point(w, x), "x"), w
        ),
    ],
    ids=["hessian", "gauss_newton", "jacobian"],
)
def test_vectors_of_each_device_are_not_mixed_up(operator):
    for product in ("mv", "adjoint_mv"):
        with pytest.raises(ValueError, match="the vector differs between devices that share"):
            on_each(lambda w, x, product=product: getattr(operator(w, x), product)(x[0]))


def shifted(s, a):
    return MatrixOperator(s * a[0], positive_semidefinite=True)


def of_start(s, a):
    """Of one result that differs between devices and one that does not."""
    found = linalg.lanczos(shifted(1.0, a), s * jnp.arange(1.0, N + 1), 4)
    return found.norm * jnp.sum(found.diagonal) + found.norm**2 + jnp.sum(found.basis[:, 3])


SHARED = {
    "funm, shared vector": lambda s, a: jnp.sum(
        linalg.funm(jnp.sqrt, shifted(s, a), s * jnp.ones(N), steps=N).value ** 2
    ),
    "funm, general": lambda s, a: jnp.sum(
        linalg.funm(expm, MatrixOperator(s * a[0] / N), s * jnp.ones(N), steps=N).value
    ),
    "lanczos": of_start,
    "trace_of_function": lambda s, a: (
        estimators.trace_of_function(lambda x: jnp.exp(-s * x), shifted(s, a), KEY, matvecs=N).value
    ),
    "trace_of_function, estimated": lambda s, a: (
        estimators.trace_of_function(
            lambda x: jnp.exp(-s * x * a[0, 0, 0]), shifted(s, a), KEY, matvecs=15
        ).value
    ),
    "logdet": lambda s, a: estimators.logdet(shifted(s, a), KEY, matvecs=N).value,
}


@pytest.mark.parametrize("name", SHARED)
def test_second_derivatives_by_a_number_that_devices_share(name):
    with jax.enable_x64(True):
        a, s = matrices().astype(float), jnp.asarray(1.1)
        fn = SHARED[name]
        mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

        def mean(s, a):
            return jax.lax.pmean(fn(s, a), "x")

        spread = jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())

        def wanted(s, a):
            return jnp.mean(jnp.stack([fn(s, a[i : i + 1]) for i in range(8)]))

        found = [jax.jit(jax.grad(spread))(s, a)]
        found += [jax.jit(outer(jax.grad(spread)))(s, a) for outer in (jax.grad, jax.jacfwd)]
        first, second = jax.jit(
            lambda s: (jax.grad(wanted)(s, a), jax.grad(jax.grad(wanted))(s, a))
        )(s)
        np.testing.assert_allclose(found, [first, second, second], rtol=1e-8)


def test_derivatives_of_vectors_of_an_operator_that_differs_in_part_are_refused():
    def first(s, a):
        return jnp.sum(linalg.eigsh(positive(s * jnp.eye(N)) + positive(a[0]), 2).vectors ** 3)

    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    mean = jax.shard_map(
        lambda s, a: jax.lax.pmean(first(s, a), "x"),
        mesh=mesh,
        in_specs=(P(), P("x")),
        out_specs=P(),
    )
    with pytest.raises(NotImplementedError, match="a derivative of vectors of `eigsh` or `svds`"):
        jax.grad(mean)(jnp.asarray(1.0), matrices())
