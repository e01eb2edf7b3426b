"""Linear systems: every solver and every operator of Lineax, with derivatives, transposes and batches."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx

from .registry import problem, problems

MATRIX = jnp.array([[4.0, 1.0, 0.0], [1.0, 3.0, -1.0], [0.0, -1.0, 5.0]])
VECTOR = jnp.array([1.0, -2.0, 0.5])
TALL = jnp.concatenate([MATRIX, jnp.array([[1.0, 2.0, -1.0], [0.5, 0.0, 1.0]])])
SHAPE = jax.ShapeDtypeStruct((3,), VECTOR.dtype)
SPD = lx.positive_semidefinite_tag


def systems():
    """An operator and a solver for each."""
    matrix, tall = lx.MatrixLinearOperator(MATRIX), lx.MatrixLinearOperator(TALL)
    spd = lx.MatrixLinearOperator(MATRIX, SPD)
    tight = {"rtol": 1e-10, "atol": 1e-10}
    auto = lx.AutoLinearSolver(well_posed=True)
    blocks = {
        "a": {"x": MATRIX[:1, :1], "y": MATRIX[:1, 1:]},
        "b": {"x": MATRIX[1:, :1], "y": MATRIX[1:, 1:]},
    }
    return {
        "lu": (matrix, lx.LU()),
        "qr": (matrix, lx.QR()),
        "svd": (matrix, lx.SVD()),
        "cholesky": (spd, lx.Cholesky()),
        "cholesky_negative": (
            lx.MatrixLinearOperator(-MATRIX, lx.negative_semidefinite_tag),
            lx.Cholesky(),
        ),
        "cg": (spd, lx.CG(**tight)),
        "gmres": (matrix, lx.GMRES(**tight)),
        "bicgstab": (matrix, lx.BiCGStab(**tight)),
        "diagonal": (lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 4.0])), lx.Diagonal()),
        "tridiagonal": (
            lx.TridiagonalLinearOperator(
                jnp.diag(MATRIX), jnp.diag(MATRIX, -1), jnp.diag(MATRIX, 1)
            ),
            lx.Tridiagonal(),
        ),
        "triangular": (
            lx.MatrixLinearOperator(jnp.tril(MATRIX), lx.lower_triangular_tag),
            lx.Triangular(),
        ),
        "triangular_unit": (
            lx.MatrixLinearOperator(
                jnp.triu(MATRIX, 1) + jnp.eye(3), (lx.upper_triangular_tag, lx.unit_diagonal_tag)
            ),
            lx.Triangular(),
        ),
        # Least squares.
        "tall_qr": (tall, lx.QR()),
        "tall_svd": (tall, lx.SVD()),
        "tall_auto": (tall, lx.AutoLinearSolver(well_posed=None)),
        "tall_normal_cg": (tall, lx.Normal(lx.CG(**tight))),
        "tall_normal_cholesky": (tall, lx.Normal(lx.Cholesky())),
        "tall_lsmr": (tall, lx.LSMR(**tight)),
        # The shortest solution.
        "wide_qr": (lx.MatrixLinearOperator(TALL.T), lx.QR()),
        # Nothing is ever a matrix.
        "function": (lx.FunctionLinearOperator(lambda x: MATRIX @ x, SHAPE), auto),
        "function_cg": (
            lx.FunctionLinearOperator(lambda x: MATRIX @ x, SHAPE, SPD),
            lx.CG(**tight),
        ),
        "jacobian": (
            lx.JacobianLinearOperator(lambda x, args: MATRIX @ x + 0.01 * x**2, VECTOR),
            auto,
        ),
        "tree": (
            lx.PyTreeLinearOperator(
                blocks, jax.eval_shape(lambda: {"a": VECTOR[:1], "b": VECTOR[1:]})
            ),
            auto,
        ),
        "composed": (
            matrix @ lx.DiagonalLinearOperator(jnp.array([1.0, 2.0, 4.0])) + 2 * matrix,
            auto,
        ),
    }


@problems(**{name: name for name in systems()})
def linear_solve(name):
    operator, solver = systems()[name]
    vector = jax.tree.map(
        lambda x: jnp.linspace(1.0, -2.0, x.size).reshape(x.shape), operator.out_structure()
    )
    dynamic, static = eqx.partition(operator, eqx.is_inexact_array)

    @jax.jit
    def everything(dynamic, vector):
        def solve(dynamic, vector):
            return lx.linear_solve(eqx.combine(dynamic, static), vector, solver).value

        # The derivative with respect to the arrays of the operator too, where it has some of its own.
        tangents = jax.tree.map(jnp.ones_like, (dynamic, vector))
        value, along = jax.jvp(solve, (dynamic, vector), tangents)
        back = jax.vjp(solve, dynamic, vector)[1](value)
        batch = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (dynamic, vector))
        return value, along, back, jax.vmap(solve)(*batch)

    return everything(dynamic, vector)


@problem
def linear_solve_of_the_transpose_reuses_the_factors():
    @jax.jit
    def solved(matrix, vector):
        operator = lx.MatrixLinearOperator(matrix)
        solver = lx.AutoLinearSolver(well_posed=True)
        state = solver.init(operator, {})
        back, options = solver.transpose(state, {})
        first = lx.linear_solve(operator, vector, solver, state=state)
        second = lx.linear_solve(operator.T, first.value, solver, options=options, state=back)
        return first.value, second.value

    return solved(MATRIX + jnp.tri(3), VECTOR)


@problem
def linear_solve_of_the_transpose_of_an_operator_with_a_check():
    def product(vector):
        vector = eqx.error_if(vector, jnp.array(False), "never")
        return MATRIX @ vector

    @eqx.filter_jit
    def solved(vector):
        operator = lx.FunctionLinearOperator(product, SHAPE)
        back = lx.linear_solve(operator.T, vector, lx.GMRES(rtol=1e-10, atol=1e-10)).value
        return operator.T.mv(vector), operator.T.as_matrix(), back

    return solved(VECTOR)


@problem
def linear_solve_of_complex_numbers():
    @jax.jit
    def solved(matrix, vector):
        operator = lx.MatrixLinearOperator(matrix)
        hermitian = lx.MatrixLinearOperator(matrix @ matrix.conj().T, SPD)
        found = [
            lx.linear_solve(operator, vector, lx.LU()).value,
            lx.linear_solve(lx.conj(operator), vector, lx.QR()).value,
            lx.linear_solve(hermitian, vector, lx.CG(rtol=1e-10, atol=1e-10)).value,
        ]
        return [(x.real, x.imag) for x in found]

    return solved(MATRIX + 1j * jnp.tri(3), VECTOR - 0.5j)


@problem
def linear_solve_reports_failure():
    singular = lx.MatrixLinearOperator(jnp.zeros((2, 2)))
    solution = eqx.filter_jit(lx.linear_solve)(singular, jnp.ones(2), lx.LU(), throw=False)
    return solution.result == lx.RESULTS.successful


@problem
def operators():
    """All classes, and all that one can ask of them."""

    @jax.jit
    def asked(matrix, vector):
        dense = lx.MatrixLinearOperator(matrix)
        diagonal = lx.DiagonalLinearOperator(vector)
        tridiagonal = lx.TridiagonalLinearOperator(vector, vector[1:], 2 * vector[1:])
        jacobian = lx.JacobianLinearOperator(lambda x, a: a @ jnp.sin(x), vector, matrix)
        backwards = lx.JacobianLinearOperator(lambda x, a: a @ x**2, vector, matrix, jac="bwd")
        function = lx.FunctionLinearOperator(lambda x: matrix @ x, SHAPE)
        both = functools.partial(eqx.filter_jvp, lambda m: lx.MatrixLinearOperator(m**2))
        tangent = lx.TangentLinearOperator(*both((matrix,), (matrix,)))
        every = [
            dense,
            diagonal,
            tridiagonal,
            lx.IdentityLinearOperator(SHAPE),
            jacobian,
            backwards,
            lx.linearise(jacobian),
            lx.materialise(function),
            lx.TaggedLinearOperator(dense, lx.symmetric_tag),
            tangent,
            -dense,
            dense / 2.0,
            dense * vector[0],
            dense + diagonal,
            dense @ tridiagonal - lx.IdentityLinearOperator(SHAPE),
        ]
        made = [(o.mv(vector), o.as_matrix(), o.T.mv(vector)) for o in every]
        assert lx.is_symmetric(every[8]) and lx.is_diagonal(diagonal)
        assert all(o.in_structure() == SHAPE and o.out_size() == 3 for o in every)
        parts = lx.diagonal(every[-1]), lx.tridiagonal(tridiagonal)
        return made, parts, lx.invert(dense).mv(vector)

    return asked(MATRIX + jnp.tri(3), VECTOR)
