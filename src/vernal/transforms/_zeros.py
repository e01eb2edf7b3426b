"""`ZeroTangent`: a tangent that is known to be zero, so that computing with it can be skipped.

It is not an array. The first operator would turn an object with `__jax_array__` into one, and JAX
refuses such objects during a trace. So this class has the operators whose result is known without
computing, and an error for everything else that says what to do.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..show import type_error
from ..trees import is_array_like

_KNOWN = "`*`, `/`, `@`, `+`, `-`, indexing, reshape, ravel, astype, T, mT, sum and mean"


def _spec(x: Any) -> Any:
    """The shape and dtype of an operand. Its sharding does not matter here."""
    aval = x if isinstance(x, ZeroTangent) else jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _zero_of(operation: Callable[..., Any], *operands: Any) -> Any:
    """A zero of the shape and dtype of an operation's result."""
    if not all(isinstance(x, ZeroTangent) or is_array_like(x) for x in operands):
        return NotImplemented
    spec = jax.eval_shape(operation, *map(_spec, operands))
    return ZeroTangent(spec.shape, spec.dtype, weak_type=spec.weak_type)


def _other(operation: Callable[..., Any], zero: "ZeroTangent", x: Any) -> Any:
    """The result of a sum with a zero: the other operand, in the shape and dtype of the sum."""
    out = _zero_of(operation, zero, x)
    if out is NotImplemented or isinstance(x, ZeroTangent):
        return out
    if not isinstance(x, jax.Array) or x.dtype != out.dtype:
        x = jnp.asarray(x).astype(out.dtype)
    return x if x.shape == out.shape else jnp.broadcast_to(x, out.shape)


def _method(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _zero_of(lambda x: getattr(x, name)(*args, **kwargs), self)

    method.__name__ = name
    method.__doc__ = f"As `{name}` of an array."
    return method


def _cannot(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuses an operation that needs an array."""
    raise type_error(
        "a ZeroTangent is not an array: it stands for zeros that are never computed",
        where=repr(self),
        expected=_KNOWN,
        got="another operation",
        instead="`materialise(z)` for an array of zeros, or `if is_zero(z): ...` to skip the work",
    )


@dataclasses.dataclass(frozen=True, repr=False)
class ZeroTangent:
    """A tangent or cotangent that is known to be zero.

    Rules of `filter_custom_jvp` and `filter_custom_vjp` that set `symbolic_zeros=True` are given it
    in place of arrays of zeros, and may return it. With `z` such a zero and `x` an array or a number,
    `x * z`, `z / x`, `x @ z`, `z @ x`, `-z`, `z[i]`, `z.reshape(...)`, `z.sum()` and the like are
    again a `ZeroTangent`, of the shape and dtype that arrays would have; `x + z` and `x - z` are `x`,
    and `z - x` is `-x`. For everything else convert it to an array: `materialise(z)`.

    It is immutable, compares by value, and is a leaf of pytrees.

    Args:
        shape: the shape.
        dtype: the dtype.
        weak_type: whether the dtype is weak, like that of a Python number.

    Raises:
        TypeError: for an operation that needs an array.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.transforms import ZeroTangent, is_zero
        >>> z = ZeroTangent((3,), jnp.float32)
        >>> jnp.ones((2, 3)) @ z
        ZeroTangent((2,), float32)
        >>> jnp.arange(3.0) + z
        Array([0., 1., 2.], dtype=float32)
    """

    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))

    def __repr__(self) -> str:
        weak = ", weak_type=True" if self.weak_type else ""
        return f"ZeroTangent({self.shape}, {self.dtype}{weak})"

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    # Makes NumPy's arrays and scalars defer to the operators of this class.
    __array_ufunc__ = None
    __array__ = _cannot

    def __mul__(self, other: Any) -> Any:
        return _zero_of(operator.mul, self, other)

    def __rmul__(self, other: Any) -> Any:
        return _zero_of(operator.mul, other, self)

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, ZeroTangent):
            return _cannot(self)
        return _zero_of(operator.truediv, self, other)

    def __matmul__(self, other: Any) -> Any:
        return _zero_of(operator.matmul, self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _zero_of(operator.matmul, other, self)

    def __add__(self, other: Any) -> Any:
        return _other(operator.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return _other(operator.add, self, other)

    def __sub__(self, other: Any) -> Any:
        kept = _other(operator.sub, self, other)
        return kept if kept is NotImplemented else -kept

    def __rsub__(self, other: Any) -> Any:
        return _other(operator.sub, self, other)

    def __neg__(self) -> Any:
        return self

    def __pos__(self) -> Any:
        return self

    def __getitem__(self, index: Any) -> Any:
        return _zero_of(lambda x: x[index], self)

    reshape = _method("reshape")
    ravel = _method("ravel")
    astype = _method("astype")
    sum = _method("sum")
    mean = _method("mean")

    @property
    def T(self) -> Any:
        """The transpose."""
        return _zero_of(lambda x: x.T, self)

    @property
    def mT(self) -> Any:
        """The transpose of the last two axes."""
        return _zero_of(lambda x: x.mT, self)

    __rtruediv__ = __pow__ = __rpow__ = __mod__ = __rmod__ = _cannot
    __floordiv__ = __rfloordiv__ = __abs__ = __round__ = _cannot
    __lt__ = __le__ = __gt__ = __ge__ = _cannot
    __bool__ = __float__ = __int__ = __complex__ = __index__ = _cannot
    __iter__ = __len__ = _cannot

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a ZeroTangent has no `{name}`: it is not an array; write `materialise(z).{name}` for an "
            "array of zeros"
        )


def is_zero(x: Any) -> bool:
    """Whether a tangent or cotangent is known to be zero.

    Args:
        x: any Python object.

    Returns:
        True for a `ZeroTangent`. False for an array, whatever its values.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.transforms import ZeroTangent, is_zero
        >>> is_zero(ZeroTangent((), jnp.float32)), is_zero(jnp.zeros(()))
        (True, False)
    """
    return type(x) is ZeroTangent


def materialise(tree: Any) -> Any:
    """Replaces every `ZeroTangent` by an array of zeros.

    Args:
        tree: a `ZeroTangent`, or any tree with some among its leaves.

    Returns:
        The tree with arrays in their places. Everything else is unchanged.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.transforms import ZeroTangent, materialise
        >>> materialise((ZeroTangent((2,), jnp.float32), "text"))
        (Array([0., 0.], dtype=float32), 'text')
    """
    return jtu.tree_map(lambda x: _zeros(x) if is_zero(x) else x, tree)


def _zeros(zero: ZeroTangent) -> jax.Array:
    if zero.weak_type:
        # From a Python number, so that the array is weakly typed.
        return jax.lax.full(zero.shape, zero.dtype.type(0).item())
    return jnp.zeros(zero.shape, zero.dtype)
