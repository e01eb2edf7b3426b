"""Guards: identities that refuse a transformation.

An algorithm may be right only if some value is not differentiated, or is the same for every element
of a batch. A guard around that value states this, and fails rather than letting a wrong number
through. Guards cost nothing: the compiled program does not contain them.

Each is a primitive on one array. All its rules are the identity, except the one that refuses.
"""

from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp

from .._ground import (
    Primitive,
    Zero,
    fancy_primitive_batchers,
    primitive_jvps,
    primitive_transposes,
    register_lowering,
)
from ..show import message
from ..transforms import fail_if
from ._finalise import register_impl_finalisation

T = TypeVar("T")


def _identity(name: str) -> Any:
    """A primitive that returns its argument, under every transformation."""
    primitive = Primitive(name)

    def jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        (t,) = tangents
        out = primitive.bind(*primals, **params)
        return out, t if isinstance(t, Zero) else primitive.bind(t, **params)

    def batch(axis: Any, args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
        del axis
        return primitive.bind(*args, **params), dims[0]

    primitive.def_impl(lambda x, **params: x)
    primitive.def_abstract_eval(lambda x, **params: x)
    register_lowering(primitive, lambda ctx, x, **params: [x])
    primitive_jvps[primitive] = jvp
    primitive_transposes[primitive] = lambda ct, x, **params: [ct]
    fancy_primitive_batchers[primitive] = batch
    register_impl_finalisation(primitive)
    return primitive


def _guard(primitive: Any, tree: T, **params: Any) -> T:
    """Binds every JAX array of a tree. Only these can be tracers."""
    return jax.tree.map(
        lambda x: primitive.bind(x, **params) if isinstance(x, jax.Array) else x, tree
    )


def _text(what: str, name: str | None, msg: str | None, instead: str) -> str:
    """The message of a guard: the user's, or ours about the value that the user named."""
    if msg is not None:
        return message(msg, where=name)
    return message(what.format(name or "this operation"), instead=instead)


# --- vmap


def _constant(x: Any, axis: int) -> tuple[Any, Any]:
    """An array without one of its axes, and whether it is constant along that axis.

    It uses only reductions, because these leave an axis that is sharded over devices in place.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data, constant = _constant(jax.random.key_data(x), axis)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x)), constant
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        (re, re_constant), (im, im_constant) = (_constant(part, axis) for part in (x.real, x.imag))
        return jax.lax.complex(re, im), re_constant & im_constant
    largest = jnp.max(x, axis)
    # NaN is not equal to itself, but it is the same for every element.
    constant = (largest == jnp.min(x, axis)) | jnp.all(x != x, axis)
    return largest, jnp.all(constant)


def _batched(name: str | None, msg: str | None) -> str:
    instead = "in_axes=None for it, so that it is the same for the whole batch"
    return _text("Unexpected batch tracer. {} cannot be vmap'd.", name, msg, instead)


def _nonconstant(name: str | None, msg: str | None) -> str:
    what = "Nonconstant batch. {} must be the same for every element of the batch."
    return _text(what, name, msg, "a value that is the same for every element of the batch")


def _nonbatchable_batch(
    axis: Any, args: Any, dims: Any, *, name: str | None, msg: str | None, constant: bool
) -> tuple[Any, Any]:
    del axis
    (x,), (dim,) = args, dims
    if dim is not None:
        if not constant:
            raise ValueError(_batched(name, msg))
        x, holds = _constant(x, dim)
        (x,) = fail_if([x], ~holds, explain=_nonconstant(name, msg))
    return nonbatchable_p.bind(x, name=name, msg=msg, constant=constant), None


nonbatchable_p = _identity("nonbatchable")
fancy_primitive_batchers[nonbatchable_p] = _nonbatchable_batch
# A derivative may be batched: `jax.jacfwd` has a batch of tangents for one value.
primitive_jvps[nonbatchable_p] = lambda primals, tangents, **params: (
    nonbatchable_p.bind(*primals, **params),
    tangents[0],
)


def nonbatchable(
    x: T,
    *,
    name: str | None = None,
    msg: str | None = None,
    allow_constant_across_batch: bool = False,
) -> T:
    """Returns its argument, and refuses a `vmap` over it.

    Args:
        x: any tree. Leaves that are not arrays pass through.
        name: a description of the value, for the message.
        msg: replaces the default message.
        allow_constant_across_batch: whether `x` may be mapped over if it is the same for every
            element of the batch. This is checked while the program runs, as by
            `vernal.runtime.error_if`; the result is then not mapped over.

    Returns:
        `x`, with its derivative.

    Raises:
        ValueError: while tracing, if an array of `x` is mapped over.
        RuntimeCheckError: while running, with `allow_constant_across_batch`, if it is not the same
            for every element.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import nonbatchable
        >>> f = lambda n, x: nonbatchable(n, name="the number of steps") * x
        >>> jax.vmap(f, in_axes=(None, 0))(jnp.array(2), jnp.array([1, 2]))
        Array([2, 4], dtype=int32)
        >>> try:
        ...     jax.vmap(f)(jnp.array([1, 2]), jnp.array([1, 2]))
        ... except ValueError as error:
        ...     print(str(error).splitlines()[0])
        Unexpected batch tracer. the number of steps cannot be vmap'd.
    """
    return _guard(nonbatchable_p, x, name=name, msg=msg, constant=allow_constant_across_batch)


# --- derivatives


def _perturbed(name: str | None, msg: str | None) -> str:
    instead = "jax.lax.stop_gradient(x), if its derivative is not needed"
    return _text("Unexpected tangent. {} cannot be differentiated.", name, msg, instead)


def _nondifferentiable_jvp(
    primals: Any, tangents: Any, *, name: str | None, msg: str | None
) -> tuple[Any, Any]:
    if not _is_zero(tangents[0]):
        raise RuntimeError(_perturbed(name, msg))
    return nondifferentiable_p.bind(*primals, name=name, msg=msg), tangents[0]


def _nondifferentiable_transpose(ct: Any, x: Any, *, name: str | None, msg: str | None) -> NoReturn:
    del ct, x
    raise RuntimeError(_perturbed(name, msg))


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, Zero) or tangent.dtype == jax.dtypes.float0


nondifferentiable_p = _identity("nondifferentiable")
primitive_jvps[nondifferentiable_p] = _nondifferentiable_jvp
primitive_transposes[nondifferentiable_p] = _nondifferentiable_transpose


def nondifferentiable(x: T, *, name: str | None = None, msg: str | None = None) -> T:
    """Returns its argument, and refuses differentiation of it, in forward and in reverse mode.

    Args:
        x: any tree. Leaves that are not arrays pass through.
        name: a description of the value, for the message.
        msg: replaces the default message.

    Returns:
        `x`.

    Raises:
        RuntimeError: while tracing, if an array of `x` has a tangent that is not known to be zero.

    Example:
        >>> import jax
        >>> from vernal.primitives import nondifferentiable
        >>> f = lambda x, n: x * nondifferentiable(n, name="the exponent")
        >>> jax.grad(f)(3.0, 2.0)
        Array(2., dtype=float32, weak_type=True)
        >>> try:
        ...     jax.grad(f, argnums=1)(3.0, 2.0)
        ... except RuntimeError as error:
        ...     print(str(error).splitlines()[0])
        Unexpected tangent. the exponent cannot be differentiated.
    """
    return _guard(nondifferentiable_p, x, name=name, msg=msg)


def _pulled_back(name: str | None, msg: str | None) -> str:
    what = "Unexpected cotangent. {} cannot be differentiated in reverse mode."
    return _text(what, name, msg, "forward mode, `jax.jvp` or `jax.jacfwd`")


def _backward_transpose(
    ct: Any, x: Any, *, name: str | None, msg: str | None, symbolic: bool
) -> list[Any]:
    del x
    if isinstance(ct, Zero):
        return [ct]
    if symbolic:
        raise RuntimeError(_pulled_back(name, msg))
    return fail_if([ct], jnp.any(ct != 0), explain=_pulled_back(name, msg))


nondifferentiable_backward_p = _identity("nondifferentiable_backward")
primitive_transposes[nondifferentiable_backward_p] = _backward_transpose


def nondifferentiable_backward(
    x: T, name: str | None = None, msg: str | None = None, symbolic: bool = True
) -> T:
    """Returns its argument, and refuses differentiation of it in reverse mode (`jax.grad`).

    Forward mode (`jax.jvp`) is allowed.

    Args:
        x: any tree. Leaves that are not arrays pass through.
        name: a description of the value, for the message.
        msg: replaces the default message.
        symbolic: whether a cotangent is refused while tracing, unless it is then known to be zero.
            Otherwise a cotangent that is not zero is refused while the program runs, as by
            `vernal.runtime.error_if`.

    Returns:
        `x`, with its derivative.

    Raises:
        RuntimeError: while tracing the backward pass (`symbolic=True`), if an array of `x` has a
            cotangent that is not known to be zero.
        RuntimeCheckError: while running the backward pass (`symbolic=False`), if a cotangent is not
            zero.

    Example:
        >>> import jax
        >>> from vernal.primitives import nondifferentiable_backward
        >>> f = lambda x: nondifferentiable_backward(x, name="the state") ** 2
        >>> jax.jvp(f, (3.0,), (1.0,))[1]
        Array(6., dtype=float32, weak_type=True)
        >>> try:
        ...     jax.grad(f)(3.0)
        ... except RuntimeError as error:
        ...     print(str(error).splitlines()[0])
        Unexpected cotangent. the state cannot be differentiated in reverse mode.
    """
    return _guard(nondifferentiable_backward_p, x, name=name, msg=msg, symbolic=symbolic)


# --- everything


def _traced(name: str, transformation: str) -> NoReturn:
    raise RuntimeError(
        message(
            f"Detected {transformation} of {name}",
            expected="a value that is not differentiated, transposed or mapped",
            instead="jax.lax.stop_gradient(x) if its derivative is not needed; in_axes=None where it is mapped",
        )
    )


def _nontraceable_jvp(primals: Any, tangents: Any, *, name: str) -> tuple[Any, Any]:
    if not _is_zero(tangents[0]):
        _traced(name, "differentiation")
    return nontraceable_p.bind(*primals, name=name), tangents[0]


def _nontraceable_batch(axis: Any, args: Any, dims: Any, *, name: str) -> tuple[Any, Any]:
    del axis
    if dims[0] is not None:
        _traced(name, "batching")
    return nontraceable_p.bind(*args, name=name), None


nontraceable_p = _identity("nontraceable")
primitive_jvps[nontraceable_p] = _nontraceable_jvp
primitive_transposes[nontraceable_p] = lambda ct, x, *, name: _traced(name, "transposition")
fancy_primitive_batchers[nontraceable_p] = _nontraceable_batch


def nontraceable(x: T, *, name: str = "nontraceable") -> T:
    """Returns its argument, and refuses every transformation of it except compilation.

    Use it at the end of the implementation of an operation, where no tracer may remain: it finds one
    that was captured by a closure.

    Args:
        x: any tree. Leaves that are not arrays pass through.
        name: a description of the value, for the message.

    Returns:
        `x`.

    Raises:
        RuntimeError: while tracing, under `grad`, `jvp`, `vmap` or transposition of an array of `x`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import nontraceable
        >>> jax.jit(nontraceable)(jnp.array(1.0))
        Array(1., dtype=float32, weak_type=True)
        >>> try:
        ...     jax.vmap(lambda x: nontraceable(x, name="the solver"))(jnp.arange(2))
        ... except RuntimeError as error:
        ...     print(str(error).splitlines()[0])
        Detected batching of the solver
    """
    return _guard(nontraceable_p, x, name=name)
