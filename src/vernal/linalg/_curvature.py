"""Operators of derivatives: Hessians, Jacobians and Gauss-Newton matrices, known by their products.

All of them multiply trees like the floating-point arrays of `x`, as `filter_grad` returns them. Only `x` and the other
arguments are stored: each product differentiates again, and XLA computes the common part of several products once.
Linearising beforehand was measured, and is not faster.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import callable_name
from ..modules import Module, params, trainable
from ..show import listed, short, type_error, value_error
from ..transforms import (
    check_callable,
    closure_to_pytree,
    filter_eval_shape,
    filter_grad,
    placed_like,
    refuse_sum_over_devices,
    varying_axes,
)
from ..trees import NoGradient, combine, filter, is_inexact_array, partition
from ._operators import FunctionOperator
from ._per_device import varying_like_result
from ._vectors import check_product, structure_of


def hessian_operator(
    f: Callable[..., Any],
    x: Any,
    *args: Any,
    positive_semidefinite: bool = False,
    batch_size: int | None = None,
) -> FunctionOperator:
    """The Hessian of a scalar function.

    A product is a derivative of the gradient along a direction (forward over reverse), and costs a few gradients.

    Args:
        f: `f(x, *args)` returns a real scalar. Arrays that it closes over are differentiated with the operator.
        x: the point, any tree. Its real floating-point arrays are differentiated, unless they are frozen (see
            `vernal.freeze`); everything else, such as the functions in a model, is passed on.
        *args: other arguments: any Python objects.
        positive_semidefinite: whether the Hessian has no negative eigenvalues, like that of a convex function.
        batch_size: the number of products that are made at once, as in `FunctionOperator`.

    Returns:
        A symmetric operator on trees like `filter_grad(f)(x, *args)`.

    Raises:
        TypeError: if `f` is not a function or does not return a real scalar, or `x` has nothing to differentiate or
            complex arrays.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import linalg
        >>> hessian = linalg.hessian_operator(lambda x: jnp.sum(x**3), jnp.array([1.0, 2.0]))
        >>> print(hessian.mv(jnp.ones(2)))
        [ 6. 12.]
    """
    where = "hessian_operator(f, x)"
    product = _HessianProduct(*_differentiated(f, x, args, where, complex_too=False))
    # Traced before any product, because f may not return a scalar.
    structure = jax.eval_shape(product.gradient, product.moving)
    return FunctionOperator(
        product,
        structure,
        symmetric=True,
        positive_semidefinite=positive_semidefinite,
        batch_size=batch_size,
    )


def jacobian_operator(
    f: Callable[..., Any], x: Any, *args: Any, batch_size: int | None = None
) -> FunctionOperator:
    """The Jacobian of a function whose result has the structure and shapes of its argument.

    Its trace is the divergence of `f`. A product is a forward-mode derivative along a direction; a product with the
    adjoint is a reverse-mode derivative.

    Args:
        f: `f(x, *args)` returns a tree whose floating-point arrays are like those of `x`. Where they are complex it
            must be holomorphic. Arrays that it closes over are differentiated with the operator.
        x: the point, any tree, as in `hessian_operator`.
        *args: other arguments: any Python objects.
        batch_size: the number of products that are made at once, as in `FunctionOperator`.

    Returns:
        An operator without tags, on trees like the floating-point arrays of `x`.

    Raises:
        TypeError: if `f` is not a function, its result is not like `x`, or `x` has nothing to differentiate.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import linalg
        >>> field = lambda x: jnp.array([x[0] * x[1], x[1] ** 2])
        >>> jacobian = linalg.jacobian_operator(field, jnp.array([2.0, 3.0]))
        >>> print(jacobian.mv(jnp.ones(2)), jacobian.adjoint_mv(jnp.ones(2)))
        [5. 6.] [3. 8.]
    """
    where = "jacobian_operator(f, x)"
    product = _JacobianProduct(*_differentiated(f, x, args, where, complex_too=True))
    structure = structure_of(product.moving, where)
    check_product(structure, jax.eval_shape(product.value, product.moving), where)
    # In `shard_map` the adjoint of a function that differs between devices is that of each device alone.
    moving = varying_like_result(product.value, product.moving)
    product = _JacobianProduct(product.fn, moving, product.rest, product.args)
    return FunctionOperator(product, structure, batch_size=batch_size)


def gauss_newton_operator(
    f: Callable[..., Any],
    x: Any,
    *args: Any,
    loss: Callable[[Any], Any] | None = None,
    positive_semidefinite: bool = True,
    batch_size: int | None = None,
) -> FunctionOperator:
    r"""The (generalised) Gauss-Newton matrix `J^T H J`, of the Jacobian of `f` and the Hessian of `loss`.

    It is the Hessian of `loss(f(x))` without the second derivatives of `f`, and the Fisher information matrix if `loss`
    is a negative log-likelihood of an exponential family in its natural parameters, such as cross-entropy of logits.

    N. N. Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent", Neural Computation
    14 (2002), doi:10.1162/08997660260028683.

    Args:
        f: `f(x, *args)` returns the argument of `loss`, such as the logits of a batch: a tree of floating-point arrays.
            Arrays that it closes over are differentiated with the operator.
        x: the point, any tree, as in `hessian_operator`.
        *args: other arguments of `f`: any Python objects.
        loss: returns a real scalar. None takes half of the sum of squares (in `jax.shard_map`, of all devices that
            share `x`), and the matrix is `J^T J`.
        positive_semidefinite: whether the matrix has no negative eigenvalues, which holds if `loss` is convex. Set it
            to False for any other loss.
        batch_size: the number of products that are made at once, as in `FunctionOperator`.

    Returns:
        A symmetric operator on trees like the floating-point arrays of `x`.

    Raises:
        TypeError: if `f` is not a function, its result has no floating-point arrays, `loss` does not return a real
            scalar, or `x` has nothing to differentiate or complex arrays.
        ValueError: in `jax.shard_map`, if `loss` returns another number on each device, and the devices share `x`.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import linalg
        >>> fit = lambda x: jnp.array([x[0] * x[1], x[1], 1.0])
        >>> matrix = linalg.gauss_newton_operator(fit, jnp.array([2.0, 3.0]))
        >>> print(matrix.mv(jnp.array([1.0, 0.0])), matrix.positive_semidefinite)
        [9. 6.] True
    """
    where = "gauss_newton_operator(f, x)"
    parts = _differentiated(f, x, args, where, complex_too=False)
    product = _GaussNewtonProduct(*parts, loss=closure_to_pytree(loss))
    outputs = jax.eval_shape(product.value, product.moving)
    if not jtu.tree_leaves(outputs):
        raise type_error(
            "the function has no derivative: its result has no floating-point arrays",
            where=where,
            expected="a tree of floating-point arrays",
            got=short(filter_eval_shape(f, x, *args)),
        )
    if loss is not None:
        # Traced now, because it may not return a scalar.
        filter_eval_shape(filter_grad(loss), outputs)
        if jax.sharding.get_abstract_mesh().manual_axes:
            lost = jax.make_jaxpr(lambda moving: loss(product.value(moving)))(product.moving)
            shared = jtu.tree_leaves(product.moving)
            refuse_sum_over_devices(loss, lost.out_avals, shared, "gauss_newton_operator")
    return FunctionOperator(
        product,
        structure_of(product.moving, where),
        symmetric=True,
        positive_semidefinite=positive_semidefinite,
        batch_size=batch_size,
    )


class _Function(Module):
    """A function of only the differentiated arrays."""

    fn: Any
    moving: Any
    rest: Any
    args: tuple[Any, ...]

    def value(self, moving: Any) -> Any:
        """The floating-point arrays of its result."""
        out = self.fn(combine(moving, self.rest), *self.args)
        return filter(out, is_inexact_array, replace=NoGradient())

    def tangent(self, vector: Any) -> Any:
        """A vector; on a mesh, it is placed like the arrays that it is a tangent of."""
        own = varying_axes(*jtu.tree_leaves(vector)) - varying_axes(*jtu.tree_leaves(self.moving))
        if own:
            raise value_error(
                f"the vector differs between devices that share the argument of `{callable_name(self.fn)}`",
                where="a product of a Hessian, Jacobian or Gauss-Newton operator in `shard_map`",
                expected="one vector for all devices, or a point that differs between them, too",
                got=f"a vector that varies over {listed(sorted(map(repr, own)))}; JAX may mix the vectors up",
                instead="`jax.lax.pcast(x, axes, to='varying')` as the point, for an operator on each device alone",
            )
        return jtu.tree_map(lambda a, b: placed_like(a, jax.typeof(b)), vector, self.moving)


class _HessianProduct(_Function):
    def gradient(self, moving: Any) -> Any:
        """The gradient, where the function returns a scalar."""
        return filter_grad(self.fn)(combine(moving, self.rest), *self.args)

    def __call__(self, vector: Any) -> Any:
        return jax.jvp(self.gradient, (self.moving,), (self.tangent(vector),))[1]


class _JacobianProduct(_Function):
    def __call__(self, vector: Any) -> Any:
        return jax.jvp(self.value, (self.moving,), (self.tangent(vector),))[1]


class _GaussNewtonProduct(_Function):
    loss: Any

    def __call__(self, vector: Any) -> Any:
        out, push = jax.linearize(self.value, self.moving)
        vector = self.tangent(vector)
        change = push(vector)
        if self.loss is None:
            # JAX transposes without conjugation.
            pulled = jtu.tree_map(jnp.conj, change)
        else:
            pulled = jax.jvp(filter_grad(self.loss), (out,), (change,))[1]
        return jax.linear_transpose(push, vector)(pulled)[0]


def _differentiated(
    f: Any, x: Any, args: tuple[Any, ...], where: str, *, complex_too: bool
) -> tuple[Any, Any, Any, Any]:
    """A function, the differentiated part of `x`, the rest of it, and the other arguments: all as pytrees.

    Raises:
        TypeError: if `f` cannot be called, or `x` has nothing to differentiate, or complex arrays unless
            `complex_too`.
    """
    check_callable(f, where.partition("(")[0])
    moving, rest = params(x), partition(x, trainable(x))[1]
    leaves = jtu.tree_leaves(moving)
    if not leaves:
        raise type_error(
            "there is nothing to differentiate",
            where=where,
            expected="floating-point arrays in `x`, not all of them frozen",
            got=short(x),
            instead="`x.astype(float)` for an array of integers",
        )
    if not complex_too and any(map(jnp.iscomplexobj, leaves)):
        raise type_error(
            f"the second derivatives of `{callable_name(f)}` are not linear over the complex numbers",
            where=where,
            expected="real floating-point arrays in `x`",
            got=short(moving),
            instead="a function of the real and imaginary parts, as two real arrays",
        )
    return closure_to_pytree(f), moving, closure_to_pytree(rest), closure_to_pytree(args)
