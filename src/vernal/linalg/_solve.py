"""`solve`: linear equations with an operator, by JAX's conjugate gradients or GMRES, with the residual."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.sparse.linalg import cg, gmres

from ..modules import Module
from ..show import listed, message, short, type_error
from ..transforms import (
    closure_to_pytree,
    filter_custom_jvp,
    filter_jit,
    is_zero,
    materialise,
    varying_axes,
)
from ._arguments import positive_int, tolerance
from ._lanczos_adjoint import moving, norms
from ._operator import Operator
from ._operators import as_operator, refuse_empty
from ._per_device import refuse_shared, varying_like, varying_like_result
from ._vectors import flat_vector, power_of_two, to_flat, to_tree

# Basis vectors of GMRES between two restarts.
_RESTART = 20
# An absolute tolerance means at most this, relative to the length of b: it says nothing of the size of derivatives.
_LOOSEST = 1e-2


class Solution(Module):
    """The result of `solve`.

    Args:
        value: x, a tree like a vector of the operator.
        error: the length of the residual `b - A x`, measured by one more product.
        tolerance_met: whether the error meets the tolerance.
        is_finite: whether `value` and `error` are free of NaN and infinity.
    """

    value: Any
    error: Array
    tolerance_met: Array
    is_finite: Array


def solve(
    operator: Any,
    right: Any,
    *,
    rtol: Any = 1e-5,
    atol: Any = 0.0,
    max_steps: int | None = None,
    preconditioner: Callable[[Any], Any] | None = None,
) -> Solution:
    """Solves `A x = b`: by conjugate gradients if A is declared positive semidefinite, otherwise by restarted GMRES.

    Both are those of `jax.scipy.sparse.linalg`, which does not report whether it converged: here the residual is
    measured and compared with the tolerance (`tolerance_met`; a residual that exceeds it by no more than rounding, 16
    units in the last place of the length of b, meets it). The residual is that of the value returned: vectors in half
    precision round it, and need a tolerance to match.

    Derivatives, of all orders, are those of the solution, not of the steps: they are solved for in the same way, to the
    same tolerance relative to their own right-hand sides (`atol` counts relative to b, and as 1e-2 at most). Where a
    residual is larger than that, and than the square root of the machine epsilon of products (3e-4 in single
    precision), the derivative is NaN. So are derivatives by the operator if the solution itself has such a residual.

    Args:
        operator: A.
        right: b, a tree like a vector of the operator.
        rtol: the tolerance of the residual's length, relative to that of b.
        atol: the absolute tolerance of the residual's length.
        max_steps: the largest number of steps of conjugate gradients, or of restarts of GMRES with 20 steps each.
            None takes 10 times the size.
        preconditioner: a linear function of such trees that approximates the inverse of A, such as
            `Preconditioner.solve`. For conjugate gradients it must be symmetric and positive definite.

    Returns:
        A `Solution`.

    Raises:
        TypeError: if `operator` is not an operator, `b` does not fit it, or `preconditioner` is not a function.
        ValueError: if the operator is empty, a tolerance is negative, or `max_steps` less than 1.
        NotImplementedError: if equations differ between the devices of `jax.shard_map`, and the operator is general, or
            the devices share one of its arrays.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import linalg
        >>> operator = linalg.MatrixOperator(jnp.diag(jnp.array([1.0, 2.0])), positive_semidefinite=True)
        >>> found = linalg.solve(operator, jnp.ones(2))
        >>> print(found.value, found.tolerance_met)
        [1.  0.5] True
    """
    operator = as_operator(operator, "solve(operator, right)")
    refuse_empty(operator, "solve(operator, right)")
    structure, real = operator.in_structure(), jnp.finfo(operator.dtype).dtype
    flat = flat_vector(structure, right, "solve(right)")
    if preconditioner is not None and not callable(preconditioner):
        raise type_error(
            "the preconditioner cannot be called",
            where="solve(preconditioner)",
            expected="a function of a vector, such as the method `solve` of a `Preconditioner`",
            got=short(preconditioner),
        )
    steps = 10 * operator.size if max_steps is None else max_steps
    return _solved(
        operator,
        flat,
        tolerance(rtol, "rtol", "solve(rtol)", real),
        tolerance(atol, "atol", "solve(atol)", real),
        positive_int(steps, "max_steps", "solve(max_steps)"),
        closure_to_pytree(preconditioner),
    )


def _refuse_what_jax_cannot(operator: Operator, preconditioner: Any, axes: frozenset[Any]) -> None:
    """Refuses equations that vary over axes of `shard_map` where JAX's solvers would fail."""
    names = listed(sorted(map(repr, axes)))
    if axes and not operator.positive_semidefinite:
        raise NotImplementedError(
            message(
                "JAX's GMRES cannot solve equations that differ between the devices of `shard_map`",
                where="solve(operator, right)",
                expected="an operator that is declared positive semidefinite, for conjugate gradients",
                got=f"{type(operator).__name__}, and equations that vary over {names}",
                instead="`jax.shard_map(..., check_vma=False)`, if nothing is differentiated",
            )
        )
    refuse_shared((operator, preconditioner), axes, "solve(operator, right)")


def _restarted(
    multiply: Any, target: Array, start: Any, *, tol: Array, maxiter: int, M: Any
) -> tuple[Array, None]:
    """GMRES with restarts, called like those of JAX."""
    # Without `incremental`, JAX solves normal equations, which are singular in rounding long before A is. It then ends
    # its cycles early, and with a step that is not the best one, unless its own tolerance is zero.
    cycle: Any = partial(gmres, tol=0.0, maxiter=1, M=M, solve_method="incremental")

    def length(x: Array) -> Array:
        return norms(x[None])[0]

    def unfinished(state: Any) -> Array:
        _, left, steps, moved = state
        return moved & (steps < maxiter) & (left > goal)

    def again(state: Any) -> Any:
        found, _, steps, _ = state
        new, _ = cycle(multiply, target, found, restart=min(_RESTART, target.size))
        left = length(target - multiply(new))
        # More accuracy than there is must not spoil what was found.
        new = jnp.where(jnp.isfinite(left) | (steps == 0), new, found)
        return new, left, steps + 1, jnp.any(new != found)

    found = jnp.zeros_like(target) if start is None else start
    left = length(target)
    goal = tol * left
    state = found, left, jnp.zeros((), jnp.int32), jnp.asarray(True)
    return lax.while_loop(unfinished, again, state)[0], None


class _Equations(Module):
    """`A x = b`, and how to solve it.

    Args:
        operator: A.
        preconditioner: the user's function of trees, or None.
        rtol: the tolerance, relative to the length of b.
        steps: the largest number of steps or restarts.
    """

    operator: Operator
    preconditioner: Any
    rtol: Array
    steps: int

    def improve(self, x: Array) -> Array:
        """The preconditioner, for flat vectors."""
        tree = to_tree(self.operator.in_structure(), x)
        return to_flat(
            self.operator.in_structure(), self.preconditioner(tree), "solve(preconditioner)"
        )

    def solved(self, multiply: Callable[[Array], Array], target: Array) -> tuple[Array, Array]:
        """The solution for A or its transpose, and whether it is good enough for derivatives."""
        # Squares must be representable: those of the target, which may be a cotangent, and of products.
        unit = power_of_two(target)
        scaled = target / unit.astype(target.dtype)
        size = power_of_two(multiply(scaled)).astype(target.dtype)

        def in_units(x: Array) -> Array:
            return multiply(x) / size

        def inverse(x: Array) -> Array:
            return self.improve(x) * size

        method: Any = cg if self.operator.positive_semidefinite else _restarted
        improve = None if self.preconditioner is None else inverse
        start = varying_like(jnp.zeros_like(scaled), scaled) if varying_axes(scaled) else None
        # JAX declares floats as tolerances, but accepts arrays too.
        found, _ = method(in_units, scaled, start, tol=self.rtol, maxiter=self.steps, M=improve)
        error, length = norms(jnp.stack([scaled - in_units(found), scaled]))
        # Rounding allows less than the default tolerance for many operators, above all for functions in half precision.
        allowed = jnp.maximum(self.rtol, self.operator.eps**0.5) * length
        return found / size * unit.astype(found.dtype), error <= allowed

    def solved_or_nan(self, multiply: Callable[[Array], Array], target: Array) -> Array:
        """The solution for A or its transpose; NaN where it is not good enough for derivatives."""
        found, is_good = self.solved(multiply, target)
        return jnp.where(is_good, found, jnp.nan)


def _product(operator: Operator, x: Array) -> Array:
    """A x, for x of shape `(n,)`."""
    return operator.matmul(x[:, None])[:, 0]


# Not `lax.custom_linear_solve` with `has_aux` around the value too: JAX 0.10 cannot map its second derivatives.
@filter_custom_jvp
def _solution(equations: _Equations, target: Array) -> tuple[Array, Array]:
    return equations.solved(partial(_product, equations.operator), target)


@_solution.def_jvp(symbolic_zeros=True)
def _solution_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    equations, target = primals
    found, is_good = _solution(*primals)
    right = None if is_zero(tangents[1]) else materialise(tangents[1])
    parts, dots = moving(equations.operator, tangents[0].operator)
    if jax.tree.leaves(dots):
        known = jnp.where(is_good, found, jnp.nan)

        _, changed = jax.jvp(
            lambda arrays: _product(parts.whole(arrays), known), (parts.arrays,), (dots,)
        )
        right = -changed if right is None else right - changed
    if right is None:
        return (found, is_good), (jnp.zeros_like(found), None)
    # The transpose of a Hermitian operator is its conjugate.
    symmetric = equations.operator.positive_semidefinite and not jnp.iscomplexobj(target)
    multiply, solve = partial(_product, equations.operator), equations.solved_or_nan
    dot = lax.custom_linear_solve(multiply, right, solve, solve, symmetric=symmetric)
    return (found, is_good), (dot, None)


@filter_jit
def _solved(
    operator: Operator, flat: Array, rtol: Array, atol: Array, steps: int, preconditioner: Any
) -> Solution:
    structure, multiply = operator.in_structure(), partial(_product, operator)
    flat = varying_like_result(multiply, flat)
    _refuse_what_jax_cannot(operator, preconditioner, varying_axes(flat))
    rtol, atol = (varying_like(lax.stop_gradient(x), flat) for x in (rtol, atol))
    target = lax.stop_gradient(flat)
    size = norms(target[None])[0]
    relative = jnp.minimum(atol / jnp.where(size > 0, size, 1), _LOOSEST)
    equations = _Equations(operator, preconditioner, jnp.maximum(rtol, relative), steps)
    found, _ = _solution(equations, flat)
    value = to_tree(structure, found)
    # Of the value that is returned, which half precision has rounded.
    known = lax.stop_gradient(to_flat(structure, value, "solve"))
    error = norms((target - lax.stop_gradient(multiply(known)))[None])[0]
    # The residual of the recurrence and the measured one differ by rounding.
    rounding = 16 * jnp.finfo(error.dtype).eps * size
    # After a NaN the method stops with the finite value that it has.
    finite = jnp.all(jnp.isfinite(known)) & jnp.isfinite(error)
    return Solution(
        value=value,
        error=error,
        tolerance_met=finite & (error <= jnp.maximum(rtol * size, atol) + rounding),
        is_finite=finite,
    )
