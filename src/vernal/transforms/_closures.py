"""`filter_closure_convert` and `closure_to_pytree`: functions whose captured arrays JAX can see.

JAX caches what it has traced by the function it is given, so functions are hashed and compared;
and what a Python function closes over is invisible: a tracer inside is not passed on, and reaches
JAX where it does not belong. Both functions of this file return modules: the captured arrays are
children, everything else is structure. Their `==` and `hash` look at structure and at the identity
of the arrays, never at a value. Shapes are kept as structure too, so that no transformation
replaces them.
"""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import eval_jaxpr

from .._ground import callable_name
from ..modules import Module, field
from ..show import diff_text, message
from ..trees import is_array, node_parts, replace_parts
from ._boundary import Rest, split
from ._captured import Recipe, captured
from ._shapes import filter_eval_shape
from ._transformed import call_inside, check_callable


class _ByIdentity(Module):
    """A function as a module, compared by structure and by the identity of its arrays."""

    # What it wraps is taken apart here, or known to hide nothing.
    _vernal_may_hide_arrays = True

    def __hash__(self) -> int:
        return super().__hash__()

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return False
        leaves, treedef = jtu.tree_flatten(self)
        other_leaves, other_treedef = jtu.tree_flatten(other)
        # Equal structures have equally many leaves.
        return treedef == other_treedef and all(map(_is, leaves, other_leaves))


def _is(a: Any, b: Any) -> bool:
    return a is b


class _Struct:
    """A tree of arbitrary objects with shapes in place of its arrays, as one comparable value."""

    __slots__ = ("rest", "shapes")

    def __init__(self, rest: Rest, shapes: tuple[jax.ShapeDtypeStruct, ...]):
        self.rest = rest
        self.shapes = shapes

    def tree(self) -> Any:
        return self.rest.fill(self.shapes)

    def __eq__(self, other: Any) -> bool:
        return type(other) is _Struct and self.shapes == other.shapes and self.rest == other.rest

    def __hash__(self) -> int:
        return hash((self.rest, self.shapes))


def _has_shape(x: Any) -> bool:
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    aval: Any = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _struct(tree: Any) -> tuple[list[Any], _Struct]:
    """The arrays (or shapes) of a tree, and the tree without their values."""
    arrays, rest = split(tree, _has_shape)
    return arrays, _Struct(rest, tuple(map(_shape, arrays)))


def _check(name: str, expected: _Struct, got: _Struct) -> None:
    """Refuses a call with other things than the function was converted for."""
    if got == expected:
        return
    differences = [
        diff_text(a, b, weak_type=False, root=root)
        for root, a, b in zip(("args", "kwargs"), expected.tree(), got.tree(), strict=True)
        if _struct(a)[1] != _struct(b)[1]
    ]
    raise ValueError(
        message(
            f"`{name}` was converted for other arguments",
            where=f"the call of filter_closure_convert({name}, ...)",
            expected="arguments of the same structure, with equal shapes, dtypes and non-array "
            "parts",
            got="\n".join(differences),
            instead="convert the function again for these arguments",
        )
    )


class _Converted(_ByIdentity):
    """A function that was traced: what it closed over are children, its program is structure."""

    consts: tuple[Any, ...]
    jaxpr: Any = field(static=True)
    name: str = field(static=True)
    _in: _Struct = field(static=True)
    _out: _Struct = field(static=True)

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (of an instance)
        return self.name

    @property
    def in_struct(self) -> Any:
        """`(args, kwargs)` with a `jax.ShapeDtypeStruct` in place of every array."""
        return self._in.tree()

    @property
    def out_struct(self) -> Any:
        """The result, likewise."""
        return self._out.tree()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        arrays, struct = _struct((args, kwargs))
        _check(self.name, self._in, struct)
        out = eval_jaxpr(self.jaxpr, (), *self.consts, *map(jnp.asarray, arrays))
        return self._out.rest.fill(out)


class _PassedThrough(_ByIdentity):
    """A function that hides no array: it is called as it is."""

    fn: Callable[..., Any]
    _in: _Struct = field(static=True)

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (of an instance)
        return callable_name(self.fn)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    @property
    def in_struct(self) -> Any:
        """`(args, kwargs)` with a `jax.ShapeDtypeStruct` in place of every array."""
        return self._in.tree()

    @property
    def out_struct(self) -> Any:
        """The result, likewise; found by tracing the function."""
        args, kwargs = self._in.tree()
        return filter_eval_shape(self.fn, *args, **kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        _check(self.__name__, self._in, _struct((args, kwargs))[1])
        return self.fn(*args, **kwargs)


def _hides_arrays(fn: Any) -> bool:
    """Whether a callable holds arrays where JAX does not see them."""
    arrays, rest = split(fn)
    values, recipe = captured(rest.fill([None] * len(arrays)), is_array)
    return bool(values) or any(map(_has_arrays_inside, recipe.leaves()))


def _without_jit(fn: Any) -> Any:
    """A callable in which nothing that holds arrays is compiled on its own: concrete arrays that a
    compiled function closes over would stay inside its program."""
    values, rebuild = captured(fn, is_array)
    return rebuild(values)


def _has_arrays_inside(x: Any) -> bool:
    """Whether an ordinary object, which can be neither called nor flattened, has arrays among its
    attributes."""
    attributes = [] if isinstance(x, type) else getattr(x, "__dict__", {}).values()
    return any(is_array(leaf) for leaf in jtu.tree_leaves(list(attributes)))


def filter_closure_convert(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """A function without hidden arrays: what it closes over becomes part of a pytree.

    Pass such a function where JAX caches by the function, or where it must not close over a traced
    value: into a loop, a custom rule, as an argument through `jax.jit`. The function is traced
    once, for arguments like these; every array and traced value that it closes over (of any dtype,
    random keys included) is a child of the result, and can be differentiated, mapped and replaced.

    A function that hides no array is passed through: it is not traced, and the result calls it.
    That are functions that close over no array (those of module scope do not count), modules and
    their methods, whose arrays are children already. What this function returned is returned as it
    is, if it was made for the same arguments.

    Args:
        fn: the function.
        *args: arguments like those of the later calls: any Python objects, where
            `jax.ShapeDtypeStruct` may stand for an array.
        **kwargs: likewise.

    Returns:
        A module that is called like `fn`, with arrays of the same shapes and dtypes (weak types are
        ignored) in the same places, and everything else equal. It has two properties: `in_struct`,
        which is `(args, kwargs)` with a `jax.ShapeDtypeStruct` in place of every array, and
        `out_struct`, the result likewise. `hash` and `==` never look at the value of an array: two
        of them are equal if they are one program with the very same arrays.

    Raises:
        TypeError: if `fn` is not callable.
        ValueError: at a call with arguments that differ from those it was converted for.
        TracedShapeError: if a traced value reaches a shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.transforms import filter_closure_convert
        >>> def energy(weight):
        ...     def of_state(x):
        ...         return jnp.sum(weight * x**2)
        ...     of_state = filter_closure_convert(of_state, jnp.zeros(2))
        ...     return jax.jit(lambda f, x: f(x))(of_state, jnp.ones(2))
        >>> jax.grad(energy)(jnp.array([1.0, 2.0]))
        Array([1., 1.], dtype=float32)
    """
    check_callable(fn, "filter_closure_convert")
    arrays, struct = _struct((args, kwargs))
    if isinstance(fn, (_Converted, _PassedThrough)) and fn._in == struct:
        return fn
    if not _hides_arrays(fn):
        return _PassedThrough(fn, struct)
    return trace_closure(fn, *args, **kwargs)


def trace_closure(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What `filter_closure_convert` does with a function that hides arrays, whether it does or not.

    Args:
        fn: the function.
        *args: arguments like those of the later calls.
        **kwargs: likewise.

    Returns:
        A module as `filter_closure_convert` returns it, with the fields `consts` (what the function
        closed over) and `jaxpr` (its program).
    """
    arrays, struct = _struct((args, kwargs))
    rest = split((None, args, kwargs), _has_shape)[1]
    open_fn = _without_jit(fn)

    def run(arrays: list[Any]) -> Any:
        # Traced for arrays that are not weakly typed, whatever these are.
        strong = [jax.lax.convert_element_type(x, x.dtype) if x.weak_type else x for x in arrays]
        return split(call_inside(open_fn, rest, strong))

    closed: Any
    closed, (shapes, out_rest) = jax.make_jaxpr(run, return_shape=True)(arrays)
    consts = tuple(map(jnp.asarray, closed.consts))
    # Once more, with the constants as arguments: since JAX 0.12 a jaxpr keeps its own.
    program = jax.make_jaxpr(partial(eval_jaxpr, closed.jaxpr))(consts, *arrays)
    return _Converted(
        consts=consts,
        jaxpr=program.jaxpr,
        name=callable_name(fn),
        _in=struct,
        _out=_Struct(out_rest, tuple(map(_shape, shapes))),
    )


class _Closure(_ByIdentity):
    """A callable whose arrays were taken out of it, and are children."""

    values: tuple[Any, ...]
    recipe: Recipe = field(static=True)

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (of an instance)
        return callable_name(self.__wrapped__)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        # Remembered outside the fields: JAX recognises functions by identity, also those that the
        # callable holds.
        remembered: dict[str, Any] = self.__dict__  # pyright: ignore[reportAssignmentType] (an instance's)
        fn = remembered.get("_rebuilt")
        if fn is None:
            fn = remembered["_rebuilt"] = self.recipe(self.values)
        return fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def closure_to_pytree(tree: Any) -> Any:
    """Makes the arrays that functions close over visible to JAX.

    Every callable in a tree that is not a pytree itself (a function, `functools.partial`, what
    `jax.jit` returns, an object with `__call__`), and that holds arrays in closures, defaults,
    or in other callables, is replaced by a pytree with these arrays as children, which is called
    in the same way. So is a function that closes over anything else, which then has no children.
    An optimiser of Optax, or any other tuple of closures, can so be an argument of a compiled
    function: one that is made afresh, with other values of its arrays, does not compile again.
    Nothing is traced here.

    Two such functions have the same structure if they are made of the same code and differ in
    nothing but the values of arrays. `hash` and `==` never look at these values: they compare the
    structure and the identity of the arrays. An array that is held in several places is one child.
    Functions inside that `jax.jit` wraps are called as plain functions, so that what holds them
    should be compiled as a whole.

    Args:
        tree: any pytree with functions among its leaves, or one function.

    Returns:
        The tree with these functions replaced. Everything else is the same object.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.transforms import closure_to_pytree
        >>> def scale_by(factor):
        ...     return lambda x: factor * x
        >>> double = closure_to_pytree(scale_by(jnp.array(2.0)))
        >>> jax.tree.leaves(double)
        [Array(2., dtype=float32, weak_type=True)]
        >>> print(jax.jit(lambda fn, x: fn(x))(double, jnp.array(3.0)))
        6.0
    """
    if callable(tree) and (jtu.all_leaves([tree]) or isinstance(tree, jtu.Partial)):
        values, recipe = captured(tree, is_array)
        made_again = type(tree) is types.FunctionType and tree.__closure__
        return _Closure(tuple(values), recipe) if values or made_again else tree
    changes: dict[Any, Any] = {}
    for key, part in node_parts(tree) or []:
        changed = closure_to_pytree(part)
        if changed is not part:
            changes[key] = changed
    return replace_parts(tree, changes) if changes else tree
