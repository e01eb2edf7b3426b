"""Operators: matrices, functions, and the operators of others."""

import functools
import inspect

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest

import vernal
from vernal import estimators
from vernal.debug import assert_max_traces
from vernal.linalg import FunctionOperator, MatrixOperator
from vernal.linalg._blocks import block_size
from vernal.linalg._operators import as_operator

N = 6
RNG = np.random.default_rng(0)
REAL = RNG.normal(size=(N, N)).astype(np.float32)
COMPLEX = (REAL + 1j * RNG.normal(size=(N, N))).astype(np.complex64)
POSITIVE = REAL @ REAL.T
EXAMPLE = {"a": jnp.zeros((2, 2)), "b": (jnp.zeros(()), jnp.zeros(1))}


def random_block(dtype, k=5):
    block = RNG.normal(size=(N, k)) + 1j * RNG.normal(size=(N, k))
    return (block if np.issubdtype(dtype, np.complexfloating) else block.real).astype(dtype)


@vernal.filter_jit
def four_products(operator, block, vector):
    operator = as_operator(operator, "here")
    one = operator.mv(vector), operator.adjoint_mv(vector)
    return operator.matmul(block), operator.adjoint_matmul(block), *one


def check_products(operator, matrix, rtol=1e-5):
    """Compares all four kinds of products with those of a matrix on flat vectors."""
    ours = as_operator(operator, "here")
    assert ours.size == len(matrix) and ours.dtype == matrix.dtype
    block = random_block(matrix.dtype)
    leaves, treedef = jax.tree.flatten(ours.in_structure())
    ends = np.cumsum([0, *(leaf.size for leaf in leaves)])
    parts = zip(ends[:-1], ends[1:], leaves, strict=True)
    vector = treedef.unflatten([block[a:b, 0].reshape(leaf.shape) for a, b, leaf in parts])
    products = four_products(operator, jnp.asarray(block), jax.tree.map(jnp.asarray, vector))
    wants = matrix @ block, matrix.conj().T @ block
    close = {"rtol": rtol, "atol": rtol * 10}
    for product, want in zip(products[:2], wants, strict=True):
        np.testing.assert_allclose(product, want, **close)
    for product, want in zip(products[2:], wants, strict=True):
        assert jax.tree.structure(product) == treedef
        flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(product)])
        np.testing.assert_allclose(flat, want[:, 0], **close)


def on_trees(matrix):
    """A function of trees like EXAMPLE that multiplies by a matrix."""

    def fn(vector):
        flat = jnp.concatenate([vector["a"].ravel(), vector["b"][0][None], vector["b"][1]])
        out = jnp.matmul(matrix, flat)
        return {"a": out[:4].reshape(2, 2), "b": (out[4], out[5:])}

    return fn


@pytest.mark.parametrize("matrix", [REAL, COMPLEX], ids=["real", "complex"])
@pytest.mark.parametrize("kind", ["matrix", "function", "function, one by one", "compiled"])
def test_products_agree_with_the_matrix(matrix, kind):
    if kind == "matrix":
        operator = MatrixOperator(matrix)
    else:
        fn = on_trees(jnp.asarray(matrix))
        example = jax.tree.map(lambda x: x.astype(matrix.dtype), EXAMPLE)
        operator = FunctionOperator(
            jax.jit(fn) if kind == "compiled" else fn,
            example,
            batch_size=1 if "one by one" in kind else None,
        )
    assert not operator.symmetric and not operator.positive_semidefinite
    check_products(operator, matrix)


@pytest.mark.parametrize("batch_size", [1, 2, 9])
def test_products_do_not_depend_on_the_batch_size(batch_size):
    operator = FunctionOperator(on_trees(jnp.asarray(REAL)), EXAMPLE, batch_size=batch_size)
    assert operator.products_at_once(5) == min(batch_size, 5)
    check_products(operator, REAL)


def test_a_symmetric_operator_is_its_own_adjoint_and_positive_implies_symmetric():
    hermitian = COMPLEX + COMPLEX.conj().T
    check_products(MatrixOperator(hermitian, symmetric=True), hermitian)
    positive = MatrixOperator(POSITIVE, positive_semidefinite=True)
    assert positive.symmetric
    check_products(positive, POSITIVE)
    # Nothing is transposed: this loop could not be.
    loop = FunctionOperator(
        lambda v: jax.lax.while_loop(lambda x: x[0] < 3.0, lambda x: x + 1.0, v) * 0 + 2 * v,
        jnp.zeros(2),
        positive_semidefinite=True,
    )
    np.testing.assert_allclose(loop.adjoint_mv(jnp.ones(2)), [2.0, 2.0])


def test_trees_of_mixed_precision_are_multiplied():
    example = {"half": jnp.zeros(2, jnp.bfloat16), "single": jnp.zeros(1)}
    operator = FunctionOperator(
        lambda v: {"half": 2 * v["half"] + v["single"].astype(jnp.bfloat16), "single": v["single"]},
        example,
    )
    want = np.array([[2, 0, 1], [0, 2, 1], [0, 0, 1]], np.float32)
    np.testing.assert_array_equal(operator.matmul(jnp.eye(3)), want)
    np.testing.assert_array_equal(operator.adjoint_matmul(jnp.eye(3)), want.T)


def test_half_precision_matrices_are_summed_in_single_precision():
    matrix = jnp.ones((300, 300), jnp.bfloat16)
    product = MatrixOperator(matrix).matmul(jnp.ones((300, 1)))
    assert product.dtype == jnp.float32
    np.testing.assert_array_equal(product, np.full((300, 1), 300.0))
    assert MatrixOperator(matrix).mv(jnp.ones(300, jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_function_of_a_module_is_an_operator():
    model = vernal.nn.Linear(2, 3, key=jax.random.key(0))
    operator = FunctionOperator(lambda v: jax.tree.map(lambda x: 3 * x, v), model)
    np.testing.assert_allclose(operator.matmul(jnp.eye(9)), 3 * np.eye(9))


class Plain:
    """An operator of somebody else, which is not a pytree."""

    def __init__(self, matrix):
        self.matrix = matrix

    def in_structure(self):
        return jax.ShapeDtypeStruct((N,), self.matrix.dtype)

    def mv(self, vector):
        return self.matrix @ vector


def test_any_object_with_products_is_an_operator_and_its_arrays_are_leaves():
    plain = Plain(jnp.asarray(COMPLEX))
    operator = as_operator(plain, "here")
    assert not operator.symmetric
    assert [leaf.shape for leaf in jax.tree.leaves(operator)] == [(N, N)]
    check_products(operator, COMPLEX)
    # It may also go through a transformation before.
    check_products(plain, COMPLEX)


def lineax_operators():
    dense = lx.MatrixLinearOperator(jnp.asarray(REAL))
    weights = jnp.asarray(REAL)
    x = jnp.linspace(0.1, 1.0, N)
    diagonal = jnp.arange(1.0, N + 1)
    structure = jax.eval_shape(lambda: EXAMPLE)
    jacobian = np.cos(REAL @ np.asarray(x))[:, None] * REAL
    return {
        "matrix": (dense, REAL),
        "complex": (lx.MatrixLinearOperator(jnp.asarray(COMPLEX)), COMPLEX),
        "transposed": (dense.T, REAL.T),
        "sum": (dense + lx.IdentityLinearOperator(dense.in_structure()), REAL + np.eye(N)),
        "function": (
            lx.FunctionLinearOperator(on_trees(weights), structure),
            REAL,
        ),
        "jacobian": (
            lx.JacobianLinearOperator(lambda x, args: jnp.sin(args @ x), x, weights),
            jacobian,
        ),
        "identity": (lx.IdentityLinearOperator(structure), np.eye(N)),
        "diagonal": (lx.DiagonalLinearOperator(diagonal), np.diag(np.arange(1.0, N + 1))),
    }


@pytest.mark.parametrize("name", list(lineax_operators()))
def test_operators_of_lineax_are_operators(name):
    theirs, matrix = lineax_operators()[name]
    check_products(theirs, matrix.astype(np.complex64 if name == "complex" else np.float32))
    assert as_operator(theirs, "here").symmetric == (name in ("identity", "diagonal"))


@pytest.mark.parametrize(
    ("tags", "dtype", "want"),
    [
        ((), jnp.float32, (False, False)),
        (lx.symmetric_tag, jnp.float32, (True, False)),
        (lx.positive_semidefinite_tag, jnp.float32, (True, True)),
        (lx.negative_semidefinite_tag, jnp.float32, (True, False)),
        # Equal to its transpose, without conjugation: not symmetric in our sense.
        (lx.symmetric_tag, jnp.complex64, (False, False)),
        (lx.positive_semidefinite_tag, jnp.complex64, (True, True)),
    ],
)
def test_tags_of_lineax_are_read(tags, dtype, want):
    operator = as_operator(lx.MatrixLinearOperator(jnp.eye(2, dtype=dtype), tags), "here")
    assert (operator.symmetric, operator.positive_semidefinite) == want


def test_an_operator_of_lineax_that_is_not_square_is_refused():
    operator = as_operator(lx.MatrixLinearOperator(jnp.ones((2, 3))), "here")
    with pytest.raises(
        TypeError, match="the operator is not square: its product does not have the form"
    ):
        operator.matmul(jnp.ones((3, 1)))


def test_what_is_no_operator_is_refused():
    with pytest.raises(TypeError, match="a function needs an example of the vectors"):
        as_operator(jnp.sin, "here")
    keys = jax.random.split(jax.random.key(0), 2)
    for thing in ([[1.0]], 3.0, None, "text", jax.random.key(0), keys, keys[:, None]):
        with pytest.raises(TypeError, match=r"not an operator(.|\n)*where: here"):
            as_operator(thing, "here")


@pytest.mark.parametrize("shape", [(2, 3), (4,), (), (2, 2, 2)])
def test_a_matrix_that_is_not_square_is_refused(shape):
    with pytest.raises(ValueError, match=r"the operator is not square(.|\n)*shape \(n, n\)"):
        MatrixOperator(jnp.ones(shape))


def test_a_matrix_of_integers_is_refused():
    with pytest.raises(TypeError, match=r"trees of floating-point arrays(.|\n)*astype"):
        as_operator(np.eye(3, dtype=int), "here")


def test_bad_arguments_of_a_function_operator_are_refused():
    with pytest.raises(TypeError, match="FunctionOperator needs a function that computes `A @ v`"):
        inspect.unwrap(FunctionOperator.__init__)(object(), jnp.eye(2), jnp.ones(2))
    with pytest.raises(ValueError, match="`batch_size` is too small"):
        FunctionOperator(lambda v: v, jnp.ones(2), batch_size=0)


def test_arrays_that_a_function_closes_over_are_differentiated():
    vector = jnp.linspace(0.5, 1.5, N)

    def energy(diagonal, at_once):
        operator = FunctionOperator(lambda v: diagonal * v, vector, batch_size=at_once)
        block = jnp.stack([vector, 2 * vector, vector], axis=1)
        return jnp.sum(block * operator.matmul(block))

    for at_once in (None, 1, 2):
        gradient = jax.jit(jax.grad(energy), static_argnums=1)(jnp.ones(N), at_once)
        np.testing.assert_allclose(gradient, 6 * vector**2, rtol=1e-6)

    def of_operator(operator):
        return vector @ operator.mv(vector)

    diagonal = jnp.arange(1.0, N + 1)
    gradient = vernal.filter_grad(of_operator)(FunctionOperator(lambda v: diagonal * v, vector))
    (leaf,) = jax.tree.leaves(gradient)
    np.testing.assert_allclose(leaf, vector**2, rtol=1e-6)


def test_keys_and_integers_may_be_closed_over():
    key, index, scale = jax.random.key(3), jnp.arange(N)[::-1], jnp.float32(2)

    def fn(v):
        return scale * jnp.sign(jax.random.normal(key, (N,))) * v[index]

    operator = FunctionOperator(fn, jnp.zeros(N))
    assert len(jax.tree.leaves(operator)) == 3
    want = jax.vmap(fn, 1, 1)(jnp.eye(N))
    got = vernal.filter_jit(lambda o, b: o.matmul(b))(operator, jnp.eye(N))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(operator.adjoint_matmul(jnp.eye(N)), want.T)
    method = estimators.Hutchinson()

    def estimate(operator):
        return estimators.trace(operator, jax.random.key(0), matvecs=5, method=method).value

    value, gradient = vernal.filter_jit(vernal.filter_value_and_grad(estimate))(operator)
    (leaf,) = jax.tree.leaves(gradient)
    np.testing.assert_allclose(leaf, value / scale, rtol=1e-5)


def test_an_operator_made_anew_does_not_compile_again():
    run = vernal.filter_jit(assert_max_traces(lambda o, b: o.matmul(b), max_traces=1))
    for scale in (1.0, 2.0, 3.0):
        diagonal = jnp.full(N, scale)
        multiply = functools.partial(jnp.multiply, diagonal)
        operator = FunctionOperator(multiply, jnp.zeros(N), symmetric=True)
        np.testing.assert_array_equal(run(operator, jnp.eye(N)), scale * np.eye(N))


def test_matrices_are_mapped():
    matrices = jnp.stack([jnp.asarray(REAL), 2 * jnp.asarray(REAL)])
    out = jax.vmap(lambda m: MatrixOperator(m).matmul(jnp.eye(N)))(matrices)
    np.testing.assert_allclose(out, matrices, rtol=1e-6)
    operators = jax.vmap(MatrixOperator)(matrices)
    assert operators.matrix.shape == (2, N, N)


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def test_cheap_functions_and_matrices_are_multiplied_all_at_once():
    large = jnp.ones(10**6)
    assert block_size(lambda v: large * v, shape(10**6), 60) == 60
    matrix = jnp.ones((1000, 1000))
    assert block_size(lambda v: matrix @ v, shape(1000), 200) == 200
    assert block_size(jax.jit(lambda v: matrix @ v), shape(1000), 200) == 200
    assert block_size(lambda v: v, shape(3), 1) == 1


def test_what_computes_much_on_the_way_is_multiplied_one_by_one_or_in_equal_blocks():
    data = jnp.ones((256, 1000))

    def squares(rows):
        def mv(v):
            # Four results of (rows, 1000) on the way.
            return jnp.sum(jnp.exp(jnp.sin(data[:rows] * v[None])), axis=0)

        return mv

    assert block_size(squares(256), shape(1000), 60) == 1
    few = block_size(squares(16), shape(1000), 60)
    assert 1 < few < 60 and 60 % few == 0
    assert block_size(squares(16), shape(1000), 2) == 2

    def loop(v):
        return jax.lax.fori_loop(0, 50, lambda _, x: squares(256)(x), v)

    assert block_size(loop, shape(1000), 60) == 1


def test_the_memory_of_products_in_reverse_mode_is_that_of_one_block():
    width, columns = 400, 64

    def energy(weight, block):
        def mv(v):
            hidden = weight[:, None] * v[None, :]
            return jnp.sum(jnp.sin(weight)[:, None] * hidden, axis=0)

        return jnp.sum(FunctionOperator(mv, block[:, 0]).matmul(block) ** 2)

    args = jax.random.normal(jax.random.key(0), (width,)), jnp.ones((width, columns))
    memory = jax.jit(jax.grad(energy)).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < columns * width**2 * 4 / 4
