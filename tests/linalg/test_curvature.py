"""Operators of derivatives, compared with the dense matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import vernal
from vernal import estimators, linalg
from vernal.debug import assert_max_traces

X = jnp.linspace(-1.0, 1.0, 5)
INPUTS = jax.random.normal(jax.random.key(1), (7, 3))
TARGETS = jax.random.normal(jax.random.key(2), (7, 2))


def rosenbrock(x, scale):
    return jnp.sum(scale * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


class Model(vernal.Module):
    weight: jax.Array
    bias: jax.Array
    activation: object
    steps: jax.Array

    def __call__(self, inputs):
        return self.activation(inputs @ self.weight + self.bias[None, :]) ** 2


def model():
    return Model(
        jax.random.normal(jax.random.key(0), (3, 2)),
        jnp.array([0.1, -0.2]),
        jnp.tanh,
        jnp.arange(3),
    )


def loss(model, inputs, targets):
    return jnp.mean((model(inputs) - targets) ** 2)


def dense(operator, *, adjoint=False):
    """The matrix of an operator."""
    multiply = vernal.filter_jit(lambda o, b: (o.adjoint_matmul if adjoint else o.matmul)(b))
    return np.asarray(multiply(operator, jnp.eye(operator.size, dtype=operator.dtype)))


def with_flat(fn, tree):
    """A function of the flat floating-point arrays of a tree."""
    arrays, rest = vernal.partition(tree, vernal.is_inexact_array)
    flat, unravel = ravel_pytree(arrays)
    return flat, lambda flat: fn(vernal.combine(unravel(flat), rest))


def test_the_hessian_agrees_with_the_dense_one():
    operator = linalg.hessian_operator(rosenbrock, X, 3.0)
    assert operator.symmetric and not operator.positive_semidefinite
    want = jax.jit(jax.hessian(rosenbrock))(X, 3.0)
    np.testing.assert_allclose(dense(operator), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(dense(operator), dense(operator, adjoint=True))


@pytest.mark.parametrize("batch_size", [None, 3])
def test_the_hessian_of_a_model_is_that_of_its_floating_point_arrays(batch_size):
    operator = linalg.hessian_operator(loss, model(), INPUTS, TARGETS, batch_size=batch_size)
    flat, of_flat = with_flat(lambda m: loss(m, INPUTS, TARGETS), model())
    np.testing.assert_allclose(
        dense(operator), jax.jit(jax.hessian(of_flat))(flat), rtol=1e-4, atol=1e-5
    )
    vector = vernal.filter_jit(vernal.filter_grad(loss))(model(), INPUTS, TARGETS)
    product = vernal.filter_jit(lambda o, v: o.mv(v))(operator, vector)
    assert jax.tree.structure(product) == jax.tree.structure(vector)
    assert product.activation is jnp.tanh and product.steps == vernal.NoGradient()


def test_what_is_frozen_is_no_part_of_the_hessian():
    operator = linalg.hessian_operator(loss, vernal.freeze(model(), "bias"), INPUTS, TARGETS)
    whole = dense(linalg.hessian_operator(loss, model(), INPUTS, TARGETS))
    np.testing.assert_allclose(dense(operator), whole[:6, :6], rtol=1e-4, atol=1e-6)


def test_the_hessian_of_a_convex_function_can_be_declared_positive():
    operator = linalg.hessian_operator(lambda x: x @ x, X, positive_semidefinite=True)
    assert operator.positive_semidefinite


def test_the_jacobian_and_its_adjoint_agree_with_the_dense_one():
    def field(x, rate):
        return {"u": jnp.sin(x["u"]) * x["v"], "v": rate * jnp.cumsum(x["u"]) ** 2}

    x = {"u": X, "v": X + 2}
    operator = linalg.jacobian_operator(field, x, 0.5)
    assert not operator.symmetric
    flat, of_flat = with_flat(lambda x: ravel_pytree(field(x, 0.5))[0], x)
    want = jax.jit(jax.jacobian(of_flat))(flat)
    np.testing.assert_allclose(dense(operator), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dense(operator, adjoint=True), want.T, rtol=1e-5, atol=1e-5)


def test_the_jacobian_of_a_holomorphic_function_is_complex():
    x = jax.lax.complex(X, X[::-1])
    operator = linalg.jacobian_operator(lambda x: jnp.exp(x) * x[::-1], x)
    want = np.asarray(jax.jacfwd(lambda x: jnp.exp(x) * x[::-1], holomorphic=True)(x))
    np.testing.assert_allclose(dense(operator), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dense(operator, adjoint=True), want.conj().T, rtol=1e-5, atol=1e-5)


def test_the_jacobian_of_a_map_from_models_to_models_is_taken_between_their_arrays():
    def step(model):
        return jax.tree.map(lambda x: x**2 if vernal.is_inexact_array(x) else x, model)

    flat, _ = ravel_pytree(vernal.filter(model(), vernal.is_inexact_array))
    operator = linalg.jacobian_operator(step, model())
    np.testing.assert_allclose(dense(operator), np.diag(2 * flat), rtol=1e-5)


def cross_entropy(logits):
    return -jnp.sum(jax.nn.log_softmax(logits)[:, 0])


@pytest.mark.parametrize("of", [None, cross_entropy], ids=["squares", "cross-entropy"])
def test_the_gauss_newton_matrix_agrees_with_the_dense_one(of):
    def predict(model, inputs):
        return model(inputs)

    operator = linalg.gauss_newton_operator(predict, model(), INPUTS, loss=of)
    assert operator.symmetric and operator.positive_semidefinite
    flat, of_flat = with_flat(lambda m: m(INPUTS).ravel(), model())
    jacobian = jax.jit(jax.jacobian(of_flat))(flat)
    inner = jnp.eye(14)
    if of is not None:
        inner = jax.jit(jax.hessian(lambda z: of(z.reshape(7, 2))))(of_flat(flat))
    want = np.asarray(jacobian.T @ inner @ jacobian)
    np.testing.assert_allclose(dense(operator), want, rtol=1e-4, atol=1e-5)
    assert np.linalg.eigvalsh(want).min() > -1e-5


def test_the_gauss_newton_matrix_of_a_linear_function_is_the_hessian():
    matrix = jax.random.normal(jax.random.key(5), (4, 5))

    def fit(x):
        return {"out": matrix @ x}

    def energy(out):
        return jnp.sum(jnp.cosh(out["out"]))

    operator = linalg.gauss_newton_operator(fit, X, loss=energy)
    want = jax.jit(jax.hessian(lambda x: energy(fit(x))))(X)
    np.testing.assert_allclose(dense(operator), want, rtol=1e-4, atol=1e-5)


def test_the_gauss_newton_matrix_of_complex_results_sums_the_squares_of_their_sizes():
    matrix = jax.lax.complex(*jax.random.normal(jax.random.key(5), (2, 4, 5)))

    def fit(x):
        return matrix @ x.astype(jnp.complex64)

    want = np.real(matrix.conj().T @ matrix)
    operator = linalg.gauss_newton_operator(fit, X)
    np.testing.assert_allclose(dense(operator), want, rtol=1e-5, atol=1e-5)

    def energy(out):
        return jnp.sum(jnp.abs(out) ** 2) / 2

    operator = linalg.gauss_newton_operator(fit, X, loss=energy)
    np.testing.assert_allclose(dense(operator), want, rtol=1e-5, atol=1e-5)


def test_a_loss_that_is_not_convex_can_be_said_to_be_so():
    operator = linalg.gauss_newton_operator(
        lambda x: x, X, loss=lambda z: -(z @ z), positive_semidefinite=False
    )
    assert operator.symmetric and not operator.positive_semidefinite


def test_curvature_is_differentiated_with_respect_to_everything_inside():
    vector = jnp.linspace(1.0, 2.0, 5)

    def along(x, scale):
        def energy(y):
            return jnp.sum(scale * y**4)

        return vector @ linalg.hessian_operator(energy, x).mv(vector)

    by_x, by_scale = jax.jit(jax.grad(along, argnums=(0, 1)))(X, jnp.asarray(2.0))
    np.testing.assert_allclose(by_x, 48 * X * vector**2, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(by_scale, jnp.sum(12 * X**2 * vector**2), rtol=1e-5)
    operator = linalg.hessian_operator(lambda x: jnp.sum(x**4), X)
    gradient = vernal.filter_jit(vernal.filter_grad(lambda o: vector @ o.mv(vector)))(operator)
    (leaf,) = jax.tree.leaves(gradient)
    np.testing.assert_allclose(leaf, 24 * X * vector**2, rtol=1e-5, atol=1e-5)


def test_curvature_made_anew_does_not_compile_again():
    run = vernal.filter_jit(assert_max_traces(lambda o, b: o.matmul(b), max_traces=3))
    for i in range(3):
        x = X + i
        block = jnp.ones((5, 2))
        run(linalg.hessian_operator(rosenbrock, x, 2.0), block)
        run(linalg.jacobian_operator(jnp.sin, x), block)
        run(linalg.gauss_newton_operator(jnp.sin, x), block)


def test_the_trace_of_a_hessian_is_estimated_with_an_error_that_fits():
    operator = linalg.hessian_operator(loss, model(), INPUTS, TARGETS)
    exact = np.trace(dense(operator))
    estimate = estimators.trace(
        operator, jax.random.key(0), matvecs=6, method=estimators.Hutchinson()
    )
    assert abs(estimate.value - exact) < 4 * estimate.standard_error


MAKERS = [
    linalg.hessian_operator,
    linalg.jacobian_operator,
    linalg.gauss_newton_operator,
]


@pytest.mark.parametrize("make", MAKERS)
def test_there_must_be_something_to_differentiate(make):
    with pytest.raises(TypeError, match="there is nothing to differentiate"):
        make(lambda x: x, jnp.arange(3))
    with pytest.raises(TypeError, match="there is nothing to differentiate"):
        make(loss, vernal.freeze(model(), ["weight", "bias"]), INPUTS, TARGETS)


@pytest.mark.parametrize("make", [linalg.hessian_operator, linalg.gauss_newton_operator])
def test_second_derivatives_at_complex_arrays_are_refused(make):
    with pytest.raises(TypeError, match="are not linear over the complex numbers"):
        make(lambda x: jnp.sum(jnp.abs(x) ** 2), jnp.ones(2, jnp.complex64))


@pytest.mark.parametrize("fn", [lambda x: x[1:], lambda x: jnp.sum(x), lambda x: (x, x)])
def test_a_jacobian_that_is_not_square_is_refused_when_it_is_made(fn):
    with pytest.raises(TypeError, match=r"the operator is not square(.|\n)*jacobian_operator"):
        linalg.jacobian_operator(fn, X)


def test_functions_that_have_no_such_derivative_are_refused_when_the_operator_is_made():
    with pytest.raises(TypeError, match="scalar"):
        linalg.hessian_operator(jnp.sin, X)
    with pytest.raises(TypeError, match="its result has no floating-point arrays"):
        linalg.gauss_newton_operator(jnp.argmax, X)
    with pytest.raises(TypeError, match="scalar"):
        linalg.gauss_newton_operator(jnp.sin, X, loss=jnp.sin)
