"""`eigsh`: against SciPy's ARPACK and dense eigenvalues; its errors, its derivatives, and what is not fine."""

import inspect

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg as sla
from jax.flatten_util import ravel_pytree

from vernal import linalg, nn
from vernal.linalg import FunctionOperator, MatrixOperator, eigsh


def rotated(eigenvalues, seed=0):
    q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(eigenvalues),) * 2))
    matrix = (q * eigenvalues) @ q.T
    return jnp.asarray((matrix + matrix.T) / 2, jnp.float32)


def matrix_of(matrix, **tags):
    return MatrixOperator(jnp.asarray(matrix, jnp.float32), **(tags or {"symmetric": True}))


def arpack(multiply, size, k, which):
    """Eigenvalues and how many products they took, to the same tolerance as ours."""
    products = [0]

    def counted(vector):
        products[0] += 1
        return multiply(vector)

    operator = sla.LinearOperator((size, size), matvec=counted, dtype=np.float32)
    start = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    values = sla.eigsh(operator, k, which=which, tol=1e-5, v0=start, return_eigenvectors=False)
    return np.sort(values), products[0]


def sparse(size):
    rng = np.random.default_rng(2)
    half = scipy.sparse.random(size, size, 5 / size, random_state=rng, dtype=np.float32)
    return (half + half.T + scipy.sparse.diags(np.linspace(0, 5, size, dtype=np.float32))).tocsr()


def network_hessian():
    model = nn.MLP(8, 3, 16, 2, key=jax.random.key(0))
    xs, ys = jax.random.normal(jax.random.key(1), (64, 8)), jnp.arange(64) % 3

    def loss(model):
        return -jnp.mean(jax.nn.log_softmax(jax.vmap(model)(xs))[jnp.arange(64), ys])

    return linalg.hessian_operator(loss, model)


def problems(name):
    """An operator, its product in NumPy, and its matrix."""
    if name == "dense":
        matrix = np.asarray(rotated(np.linspace(-1, 3, 300)))
        return matrix_of(matrix), matrix.__matmul__, matrix
    if name == "sparse":
        matrix = sparse(600)
        columns = jax.experimental.sparse.BCOO.from_scipy_sparse(matrix)
        operator = FunctionOperator(lambda v: columns @ v, jnp.zeros(600), symmetric=True)
        return operator, matrix.__matmul__, matrix.toarray()
    operator = network_hessian()
    matrix = np.asarray(operator.matmul(jnp.eye(operator.size)))
    return operator, matrix.__matmul__, matrix


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("which", "theirs"), [("largest", "LA"), ("both", "BE"), ("magnitude", "LM")]
)
@pytest.mark.parametrize("name", ["dense", "sparse", "network"])
def test_values_are_those_of_arpack_in_hardly_more_products(name, which, theirs):
    operator, multiply, matrix = problems(name)
    found = eigsh(operator, 5, which=which)
    expected, products = arpack(multiply, operator.size, 5, theirs)
    np.testing.assert_allclose(
        np.sort(found.values), expected, rtol=1e-5, atol=1e-5 * abs(matrix).max()
    )
    exact = np.linalg.eigvalsh(matrix.astype(np.float64))
    for value, error in zip(found.values, found.errors, strict=True):
        assert np.min(np.abs(exact - value)) <= error + 1e-5 * np.abs(exact).max()
    assert found.tolerance_met and found.tags_hold and found.is_finite
    # What was missed is looked for once, and the errors are measured: one basis of 20 vectors.
    assert int(found.matvecs) <= max(1.5 * products, products + 20)


def residual(matrix, found):
    vectors, values = np.asarray(found.vectors), np.asarray(found.values)
    return np.linalg.norm(matrix @ vectors.T - vectors.T * values, axis=0)


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "eigenvalues",
    [
        [3.0, 3.0, 3.0, 2.0, *np.linspace(-1, 1, 56)],
        [1.0] * 60,
        [0.0] * 60,
        [-2.0, -2.0, 5.0, 5.0, *[1.0] * 56],
        [5.0, 4.0, 4.0, *np.geomspace(1, 1e-3, 57)],
        [1e-20, 5e-21, *np.linspace(0, 1e-21, 58)],
        [7.0],
        [2.0, 2.0],
    ],
    ids=["repeated", "identity", "zero", "two ends", "inner", "tiny", "one", "two"],
)
@pytest.mark.parametrize("which", ["largest", "smallest", "both", "magnitude"])
def test_repeated_eigenvalues_are_found_as_often_as_they_are_there(eigenvalues, which):
    size, scale = len(eigenvalues), np.max(np.abs(eigenvalues)) or 1.0
    k = min(4, size)
    matrix = rotated(np.array(eigenvalues) / scale) * np.float32(scale)
    found = eigsh(matrix_of(matrix), k, which=which)
    ascending = np.sort(eigenvalues)
    expected = {
        "largest": ascending[::-1][:k],
        "smallest": ascending[:k],
        "both": np.r_[ascending[: k // 2], ascending[size - (k - k // 2) :]],
        "magnitude": sorted(eigenvalues, key=abs, reverse=True)[:k],
    }[which]
    got = np.abs(found.values) if which == "magnitude" else found.values
    expected = np.abs(expected) if which == "magnitude" else expected
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * scale)
    gram = found.vectors @ found.vectors.T
    np.testing.assert_allclose(gram, np.eye(k), atol=2e-5)
    np.testing.assert_allclose(np.diagonal(gram), 1.0, atol=1e-6)
    assert found.tolerance_met and found.tags_hold
    np.testing.assert_allclose(residual(matrix, found), 0, atol=3e-5 * scale)


def test_all_pairs_of_a_small_operator():
    matrix = rotated(np.linspace(-3, 2, 25))
    found = eigsh(matrix_of(matrix), 25)
    np.testing.assert_allclose(found.values, np.linspace(2, -3, 25), atol=1e-5)
    assert found.tolerance_met


def test_complex_operators_and_trees():
    rng = np.random.default_rng(3)
    half = rng.standard_normal((40, 40)) + 1j * rng.standard_normal((40, 40))
    matrix = jnp.asarray(half + half.conj().T, jnp.complex64)
    found = eigsh(MatrixOperator(matrix, symmetric=True), 3, which="both")
    exact = np.linalg.eigvalsh(matrix)
    np.testing.assert_allclose(found.values, [exact[0], *exact[-2:]], rtol=1e-5)
    example = {"a": jnp.zeros(2), "b": jnp.zeros((3, 1))}
    operator = FunctionOperator(lambda v: {"a": 3 * v["a"], "b": -v["b"]}, example, symmetric=True)
    found = eigsh(operator, 4)
    np.testing.assert_allclose(found.values, [3, 3, -1, -1], atol=1e-5)
    assert found.vectors["b"].shape == (4, 3, 1)


def test_half_precision_says_how_good_it_is():
    matrix = rotated(np.linspace(0, 1, 50)).astype(jnp.bfloat16)
    found = eigsh(MatrixOperator(matrix, symmetric=True), 2)
    exact = np.linalg.eigvalsh(np.asarray(matrix.astype(jnp.float32)))
    assert found.values.dtype == jnp.float32
    assert np.max(np.abs(found.values - exact[::-1][:2])) <= np.max(found.errors) + 1e-2
    assert np.max(found.errors) < 0.1


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("size", [3, 20, 60])
def test_errors_are_those_of_the_vectors_in_half_precision(dtype, size):
    matrix = rotated(np.linspace(0, 1, size)).astype(dtype)
    operator = MatrixOperator((matrix + matrix.T) / 2, symmetric=True)
    found = eigsh(operator, 3)
    exact = [np.asarray(x, np.float64) for x in (operator.matrix, found.vectors, found.values)]
    lengths = np.linalg.norm(exact[1] @ exact[0] - exact[2][:, None] * exact[1], axis=1)
    assert found.vectors.dtype == dtype
    np.testing.assert_allclose(found.errors, lengths, rtol=0.02, atol=2e-6)
    assert not found.tolerance_met and found.is_finite
    rtol = float(np.max(2 * lengths / exact[2])) if exact[2][-1] > 0.1 else 10.0
    assert eigsh(operator, 3, rtol=rtol).tolerance_met


def test_nothing_is_fine_that_is_not():
    matrix = rotated(np.linspace(0, 1, 50))
    for spoilt in (jnp.nan, jnp.inf):
        found = eigsh(matrix_of(matrix.at[3, 3].set(spoilt)), 2)
        assert not found.is_finite and not found.tolerance_met
    early = eigsh(matrix_of(rotated(np.linspace(0, 1, 400))), 5, max_matvecs=30)
    assert not early.tolerance_met and int(early.matvecs) <= 30
    exact = np.linspace(0, 1, 400)
    for value, error in zip(early.values, early.errors, strict=True):
        assert np.min(np.abs(exact - value)) <= error + 1e-5
    skew = eigsh(matrix_of(matrix + jnp.triu(jnp.ones((50, 50)), 1)), 2)
    assert not skew.tags_hold
    negative = eigsh(matrix_of(-matrix, positive_semidefinite=True), 2, which="smallest")
    assert not negative.tags_hold


def of_pairs(pairs):
    """A function of eigenvalues and vectors that does not depend on their signs."""
    values, vectors = pairs
    return jnp.sum(values**2) + jnp.sum(vectors[0] ** 4) + jnp.sum((vectors[1] ** 2) ** 3)


def ours(which="largest", k=2):
    def of(matrix):
        operator = MatrixOperator((matrix + matrix.T) / 2, symmetric=True)
        found = eigsh(operator, k, which=which, rtol=1e-7)
        return of_pairs((found.values, found.vectors))

    return of


def dense(which="largest", k=2):
    def of(matrix):
        values, vectors = jnp.linalg.eigh((matrix + matrix.T) / 2)
        place = np.array({"largest": [-1, -2], "smallest": [0, 1], "both": [0, -1]}[which])
        return of_pairs((values[place], vectors.T[place]))

    return of


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("which", ["largest", "smallest", "both"])
def test_derivatives_are_those_of_a_dense_decomposition(which):
    matrix = rotated([4.0, 3.0, -1.0, -2.5, *np.linspace(0, 1, 26)])
    direction = jax.random.normal(jax.random.key(0), matrix.shape)
    got, expected = jax.grad(ours(which))(matrix), jax.grad(dense(which))(matrix)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    pushed = jax.jvp(ours(which), (matrix,), (direction,))[1]
    np.testing.assert_allclose(pushed, jnp.sum(expected * direction), rtol=1e-3)

    def second(of):
        return jax.jvp(jax.grad(of), (matrix,), (direction,))[1]

    np.testing.assert_allclose(second(ours(which)), second(dense(which)), atol=2e-3)


@pytest.mark.slow
def test_second_derivatives_are_right_inside_of_a_scan_and_a_map():
    matrix = rotated([4.0, 3.0, *np.linspace(0, 1, 10)])
    direction = jax.random.normal(jax.random.key(1), matrix.shape)

    def looped(of):
        def total(matrix):
            def step(carry, c):
                return carry + of(c * matrix), None

            return jax.lax.scan(step, jnp.float32(0), jnp.array([1.0, 0.5]))[0]

        return jax.jvp(jax.grad(total), (matrix,), (direction,))[1]

    np.testing.assert_allclose(looped(ours()), looped(dense()), atol=3e-3)
    mapped = jax.vmap(jax.grad(ours()))(jnp.stack([matrix, 2 * matrix]))
    for got, scale in zip(mapped, (1, 2), strict=True):
        np.testing.assert_allclose(got, jax.grad(dense())(scale * matrix), atol=2e-4)


def test_repeated_eigenvalues_have_a_derivative_of_their_sum_and_their_vectors_none():
    matrix = rotated([3.0, 3.0, *np.linspace(-1, 1, 18)])

    def total(matrix):
        operator = MatrixOperator((matrix + matrix.T) / 2, symmetric=True)
        return jnp.sum(eigsh(operator, 2).values)

    exact = jnp.linalg.eigh(matrix)[1][:, -2:]
    np.testing.assert_allclose(jax.grad(total)(matrix), exact @ exact.T, atol=1e-4)
    assert jnp.all(jnp.isnan(jax.grad(ours())(matrix)))
    # One of two equal ones: the equations outside of it are singular.
    cut = jax.jit(jax.grad(lambda m: jnp.sum(eigsh(matrix_of_(m), 1).vectors[0] ** 4)))(matrix)
    assert jnp.all(jnp.isnan(cut))


def squares(base, direction, weights):
    """The square of an element of the second vector, as a function of a step; ours, and with a dense matrix."""

    def pairs(t):
        return eigsh(MatrixOperator(base + t * direction, symmetric=True), 3, rtol=1e-10).vectors

    def exact(t):
        return jnp.linalg.eigh(base + t * direction)[1].T[::-1]

    return [lambda t, of=of: (of(t)[1] @ weights) ** 2 for of in (pairs, exact)]


TWICE = {
    "grad of grad": lambda of: jax.grad(jax.grad(of)),
    "jacrev of jacrev": lambda of: jax.jacrev(jax.jacrev(of)),
    "grad of jvp": lambda of: jax.grad(lambda t: jax.jvp(of, (t,), (1.0,))[1]),
}


@pytest.mark.parametrize("twice", TWICE.values(), ids=TWICE)
def test_second_derivatives_in_reverse_are_right_for_any_matrix(twice):
    """One in ten was NaN: a short cotangent next to a long one was solved for to the accuracy of the long one."""
    with jax.enable_x64(True):
        got, expected = [], []
        second = [
            jax.jit(lambda *given, i=i: twice(squares(*given)[i])(jnp.asarray(0.0))) for i in (0, 1)
        ]
        for seed in range(20):
            rng = np.random.default_rng(seed)
            base, direction = (x + x.T for x in rng.normal(size=(2, 12, 12)) / 2)
            given = base, direction, rng.normal(size=12)
            got.append(second[0](*given))
            expected.append(second[1](*given))
        np.testing.assert_allclose(got, expected, rtol=1e-7, atol=1e-9)


def test_derivatives_with_tiny_cotangents_are_not_nan():
    """Whose squares are zero in single precision."""
    matrix = rotated([4.0, 3.0, *np.linspace(0, 1, 10)])
    got = jax.grad(lambda m: 1e-28 * ours()(m))(matrix)
    np.testing.assert_allclose(1e28 * got, jax.grad(dense())(matrix), atol=1e-4)


def matrix_of_(matrix):
    return MatrixOperator((matrix + matrix.T) / 2, symmetric=True)


def test_derivatives_reach_the_arrays_of_a_function():
    points = jnp.linspace(0, 1, 12)

    def largest(width):
        kernel = linalg.kernel_operator(lambda a, b: jnp.exp(-(((a - b) / width) ** 2)), points)
        return eigsh(kernel, 1).values[0]

    step = 1e-2
    numeric = (largest(0.4 + step) - largest(0.4 - step)) / (2 * step)
    np.testing.assert_allclose(jax.grad(largest)(jnp.float32(0.4)), numeric, rtol=1e-2)


def test_eigenvectors_of_a_network_have_its_paths():
    operator = network_hessian()
    found = eigsh(operator, 1)
    flat, _ = ravel_pytree(found.vectors)
    np.testing.assert_allclose(jnp.linalg.norm(flat), 1, rtol=1e-5)
    assert jax.tree.structure(found.vectors) == jax.tree.structure(operator.in_structure())


def test_what_cannot_be_asked_for_is_refused():
    operator = matrix_of(jnp.eye(3))
    with pytest.raises(ValueError, match="more eigenvalues were asked for than there are"):
        eigsh(operator, 4)
    with pytest.raises(ValueError, match="must be an end of the spectrum"):
        inspect.unwrap(eigsh)(operator, 1, which="middle")
    with pytest.raises(ValueError, match="not declared symmetric"):
        eigsh(MatrixOperator(jnp.eye(3)), 1)
    with pytest.raises(ValueError, match="`rows` is too small"):
        eigsh(operator, 2, rows=2)
    with pytest.raises(ValueError, match="`max_matvecs` is too small"):
        eigsh(operator, 2, max_matvecs=3)
