"""Arithmetic on whole pytrees: `(x**ω + 0.5 * y**ω).ω`.

`jax.tree.map(lambda a, b: a + 0.5 * b, x, y)` is the same with the formula turned inside out.
`x**ω` binds tighter than any other operator, so a formula on trees reads like the formula on
arrays, with the same precedence.
"""

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import jax.numpy as jnp
import jax.tree_util as jtu

from ..show import diff_text, short, type_error, value_error
from ._kinds import is_array_like

_Operation = Callable[[Any, Any], Any]


def _refuse_structure(mine: "ω", other: "ω") -> NoReturn:
    if jtu.tree_structure(mine.ω) == jtu.tree_structure(other.ω):
        got = f"is_leaf={short(mine.is_leaf)} and is_leaf={short(other.is_leaf)}"
    else:
        got = diff_text(mine.ω, other.ω, leaves="ignore", root="tree")
    raise value_error(
        "the trees on both sides of an ω operation have different structures",
        expected="the same nodes and leaves on both sides",
        got=got,
        instead="give both trees the same structure and the same `is_leaf`",
    )


def _refuse_operand(other: Any) -> NoReturn:
    raise type_error(
        "the other operand of ω arithmetic must be an ω, an array or a number",
        expected="another ω, an array or a number",
        got=short(other),
        instead="x**ω + y**ω if it is a pytree: each tree needs its own **ω",
    )


def _pairwise(operation: _Operation, mine: "ω", other: Any) -> "ω":
    """Applies the operation to each leaf of `mine` and the leaf of another ω, or one array or number."""
    if isinstance(other, ω):
        leaves, treedef = jtu.tree_flatten(mine.ω, is_leaf=mine.is_leaf)
        others, other_treedef = jtu.tree_flatten(other.ω, is_leaf=other.is_leaf)
        if treedef != other_treedef:
            _refuse_structure(mine, other)
        return ω(treedef.unflatten(map(operation, leaves, others)), is_leaf=mine.is_leaf)
    if not is_array_like(other):
        _refuse_operand(other)
    return mine.call(lambda leaf: operation(leaf, other))


def _forward(operation: _Operation) -> Callable[["ω", Any], Any]:
    def method(self: "ω", other: Any) -> Any:
        # `x**ω ** ω`: Python tries the left side first, but the metaclass has the better error.
        return NotImplemented if other is ω else _pairwise(operation, self, other)

    return method


def _backward(operation: _Operation) -> Callable[["ω", Any], Any]:
    def method(self: "ω", other: Any) -> Any:
        return _pairwise(lambda leaf, x: operation(x, leaf), self, other)

    return method


def _unary(operation: Callable[[Any], Any]) -> Callable[["ω"], Any]:
    def method(self: "ω") -> Any:
        return self.call(operation)

    return method


class _Omega(type):
    """The metaclass of `ω`, which makes `tree**ω` wrap a tree."""

    # Otherwise NumPy would wrap each element of an array separately.
    __array_ufunc__ = None

    def __rpow__(cls, tree: Any) -> Any:
        return cls(tree)


class ω(metaclass=_Omega):
    """Wraps a pytree so that operators act on its leaves.

    Use it for formulas whose variables are whole pytrees: the steps of an optimiser, the stages of
    a Runge-Kutta method, a moving average. For a single operation `jax.tree.map` is as short.

    `x**ω` wraps the tree `x`, and `.ω` takes the result out. In between, use all operators of arrays,
    `[index]`, `.call(f)`, and `.at[index].set(...)`, `add`, `multiply`, `divide`, `power`, `min` and
    `max`. The other operand is another ω with the same structure, or one array or number for all
    leaves. As always in pytrees, None has no leaves.

    The wrapper is notation, not data: it is not a pytree, so forgetting `.ω` is an error at the next
    JAX function, not a new structure. Comparisons return an ω of bools, which has no truth value of
    its own.

    Args:
        tree: the pytree.
        is_leaf: as in `jax.tree.map`, to treat some nodes as leaves: `ω(tree, is_leaf=f)`.

    Attributes:
        ω: the pytree.
        is_leaf: as given.

    Raises:
        TypeError: if the tree is wrapped already; in an operation with anything but an ω, an array or
            a number.
        ValueError: in an operation on two ω with different structures.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.trees import ω
        >>> x = {"a": jnp.array([1.0, 2.0]), "b": None}
        >>> y = {"a": jnp.array([10.0, 20.0]), "b": None}
        >>> (x**ω + 0.5 * y**ω).ω
        {'a': Array([ 6., 12.], dtype=float32), 'b': None}
        >>> (x**ω).at[0].set(7.0).ω
        {'a': Array([7., 2.], dtype=float32), 'b': None}
        >>> (x**ω).call(jnp.sum).ω
        {'a': Array(3., dtype=float32), 'b': None}
    """

    __slots__ = ("is_leaf", "ω")

    # Makes NumPy arrays on the left side defer to us.
    __array_ufunc__ = None
    # Not hashable, because `==` acts on leaves; not iterable, because Python would go through
    # `[0], [1], ...` for ever: JAX clamps an index that is out of range.
    __hash__ = None  # pyright: ignore[reportAssignmentType] (Python's way to say "unhashable")
    __iter__ = None

    def __init__(self, tree: Any, is_leaf: Callable[[Any], bool] | None = None):
        if isinstance(tree, ω):
            raise type_error(
                "the tree is already wrapped in ω",
                where="tree**ω",
                expected="a pytree",
                got=short(tree),
                instead="wrap each tree once, and take the result out with `.ω`",
            )
        self.ω = tree
        self.is_leaf = is_leaf

    def call(self, fn: Callable[[Any], Any]) -> "ω":
        """Applies a function to each leaf.

        Args:
            fn: takes a leaf and returns the new one.

        Returns:
            The results, wrapped.
        """
        return ω(jtu.tree_map(fn, self.ω, is_leaf=self.is_leaf), is_leaf=self.is_leaf)

    @property
    def at(self) -> "_At":
        """`.at[index].set(values)` and its kin change elements of each leaf, as on `jax.Array`."""
        return _At(self)

    def __getitem__(self, index: Any) -> "ω":
        return self.call(lambda leaf: leaf[index])

    def __bool__(self) -> NoReturn:
        raise type_error(
            "an ω has no truth value",
            expected="one bool",
            got="an ω, which compares leaf by leaf",
            instead="vernal.tree_equal(x, y), or jnp.all on the leaves of (x**ω == y**ω).ω",
        )

    def __repr__(self) -> str:
        return f"ω({self.ω!r})"

    __add__, __radd__ = _forward(operator.add), _backward(operator.add)
    __sub__, __rsub__ = _forward(operator.sub), _backward(operator.sub)
    __mul__, __rmul__ = _forward(operator.mul), _backward(operator.mul)
    __matmul__, __rmatmul__ = _forward(operator.matmul), _backward(operator.matmul)
    __truediv__, __rtruediv__ = _forward(operator.truediv), _backward(operator.truediv)
    __floordiv__, __rfloordiv__ = _forward(operator.floordiv), _backward(operator.floordiv)
    __mod__, __rmod__ = _forward(operator.mod), _backward(operator.mod)
    __pow__, __rpow__ = _forward(operator.pow), _backward(operator.pow)
    __and__, __rand__ = _forward(operator.and_), _backward(operator.and_)
    __or__, __ror__ = _forward(operator.or_), _backward(operator.or_)
    __xor__, __rxor__ = _forward(operator.xor), _backward(operator.xor)
    __lshift__, __rlshift__ = _forward(operator.lshift), _backward(operator.lshift)
    __rshift__, __rrshift__ = _forward(operator.rshift), _backward(operator.rshift)
    __eq__, __ne__ = _forward(operator.eq), _forward(operator.ne)
    __lt__, __le__ = _forward(operator.lt), _forward(operator.le)
    __gt__, __ge__ = _forward(operator.gt), _forward(operator.ge)
    __neg__, __pos__ = _unary(operator.neg), _unary(operator.pos)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)


class _At:
    """`(x**ω).at`, before it has its index."""

    def __init__(self, whole: ω):
        self.whole = whole

    def __getitem__(self, index: Any) -> "_AtIndex":
        return _AtIndex(self.whole, index)


def _update(name: str) -> Callable[["_AtIndex", Any], ω]:
    def method(self: "_AtIndex", values: Any) -> ω:
        def update(leaf: Any, value: Any) -> Any:
            return getattr(jnp.asarray(leaf).at[self.index], name)(value)

        return _pairwise(update, self.whole, values)

    method.__name__ = name
    method.__doc__ = (
        f"`leaf.at[index].{name}(values)` on each leaf; `values` is an ω, an array or a number."
    )
    return method


class _AtIndex:
    """`(x**ω).at[index]`, before it has its operation."""

    def __init__(self, whole: ω, index: Any):
        self.whole = whole
        self.index = index

    set = _update("set")
    add = _update("add")
    multiply = _update("multiply")
    divide = _update("divide")
    power = _update("power")
    min = _update("min")
    max = _update("max")
