"""`filter_closure_convert` and `closure_to_pytree`: functions whose captured arrays JAX can see.

JAX caches a trace by the function it was given, so it hashes and compares functions. It does not see
what a Python function closes over: a tracer inside is not an argument, and leaks into other traces.
Both functions of this file return modules: the captured arrays are children, everything else is
structure. Their `==` and `hash` use the structure and the identity of the arrays, never their
values. Shapes are kept as structure too, so that no transformation replaces them.
"""

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import eval_jaxpr

from .._ground import as_arrays, callable_name
from ..modules import Module, field
from ..show import diff_text, value_error
from ..trees import (
    Rest,
    has_shape,
    is_array,
    node_parts,
    replace_parts,
    split,
)
from ._captured import Recipe, captured
from ._returned import check_returned
from ._transformed import call_inside, check_callable


class _ByIdentity(Module):
    """A function as a module, compared by structure and by the identity of its arrays."""

    # What it wraps is opened here, or known to hide nothing.
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
        # Equal structures have the same number of leaves.
        return treedef == other_treedef and all(map(_is, leaves, other_leaves))


def _is(a: Any, b: Any) -> bool:
    return a is b


def _shape(x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        return _struct(x)
    return _struct(jax.typeof(x)) if is_array(x) else x


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _with_shapes(tree: Any) -> Rest:
    """A tree with shapes in place of its arrays, as one comparable value."""
    return split(jtu.tree_map(_shape, tree), is_dynamic=lambda _: False)[1]


def _check(name: str, expected: Rest, args: Any, kwargs: Any) -> None:
    """Refuses a call with arguments that the function was not converted for."""
    got = _with_shapes((args, kwargs))
    if got == expected:
        return
    differences = [
        diff_text(a, b, weak_type=False, root=root)
        for root, a, b in zip(("args", "kwargs"), expected.fill(()), got.fill(()), strict=True)
        if _with_shapes(a) != _with_shapes(b)
    ]
    raise value_error(
        f"`{name}` was converted for different arguments",
        where=f"the call of filter_closure_convert({name}, ...)",
        expected="arguments of the same structure, with equal shapes, dtypes and non-array parts",
        got="\n".join(differences),
        instead="convert the function again for these arguments",
    )


class _Converted(_ByIdentity):
    """A traced function: the arrays that it closed over are children, its program is structure."""

    consts: tuple[Any, ...]
    jaxpr: Any = field(static=True)
    name: str = field(static=True)
    _in: Rest = field(static=True)
    _out: Rest = field(static=True)

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (of an instance)
        return self.name

    @property
    def in_struct(self) -> Any:
        """`(args, kwargs)` with a `jax.ShapeDtypeStruct` in place of every array."""
        return self._in.fill(())

    @property
    def out_struct(self) -> Any:
        """The result, likewise."""
        return self._out.fill([_struct(v.aval) for v in self.jaxpr.outvars])

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuses arguments that it was not converted for."""
        _check(self.name, self._in, args, kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.check(args, kwargs)
        arrays = split((args, kwargs), has_shape)[0]
        out = eval_jaxpr(self.jaxpr, (), *self.consts, *map(jnp.asarray, arrays))
        return self._out.fill(as_arrays(out))


def _without_jit(fn: Any) -> Any:
    """The callable with every `jax.jit` around captured arrays removed: concrete arrays that a compiled
    function closes over would stay inside its program."""
    values, rebuild = captured(fn, is_array)
    return rebuild(values)


def filter_closure_convert(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Converts a function into a pytree whose children are the arrays that the function closes over.

    Use it where JAX caches by the function, or where a function must not close over a traced value:
    in a loop, a custom rule, as an argument through `jax.jit`. The function is traced once, for
    arguments like these; every array and traced value that it uses from outside (of any dtype, random
    keys included) is a child of the result, and can be differentiated, mapped and replaced.

    Later changes of what the function reads, such as a rebound variable, do not affect the result. A
    function that was converted for the same arguments is returned unchanged.

    Args:
        fn: the function.
        *args: arguments like those of the later calls: any Python objects, where
            `jax.ShapeDtypeStruct` may stand for an array.
        **kwargs: likewise.

    Returns:
        A module. Call it like `fn`, with arrays of the same shapes and dtypes (weak types are
        ignored) in the same places, and everything else equal. It has two properties: `in_struct`,
        which is `(args, kwargs)` with a `jax.ShapeDtypeStruct` in place of every array, and
        `out_struct`, the result likewise. `hash` and `==` never look at the values of arrays: two
        such modules are equal if they have the same program and the same array objects.

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
    struct = _with_shapes((args, kwargs))
    if isinstance(fn, _Converted) and fn._in == struct:
        return fn
    arrays, rest = split((None, args, kwargs), has_shape)
    open_fn = _without_jit(fn)

    def run(arrays: list[Any]) -> Any:
        # Traced for strongly typed arrays, even if these are weakly typed.
        strong = [jax.lax.convert_element_type(x, x.dtype) if x.weak_type else x for x in arrays]
        return split(check_returned(call_inside(open_fn, rest, strong), callable_name(fn)))

    closed: Any
    closed, (_, out_rest) = jax.make_jaxpr(run, return_shape=True)(arrays)
    consts = tuple(map(jnp.asarray, closed.consts))
    # Traced again, with the constants as arguments: since JAX 0.12 a jaxpr keeps its own.
    program = jax.make_jaxpr(partial(eval_jaxpr, closed.jaxpr))(consts, *arrays)
    return _Converted(
        consts=consts,
        jaxpr=program.jaxpr,
        name=callable_name(fn),
        _in=struct,
        _out=out_rest,
    )


class _Closure(_ByIdentity):
    """A callable whose arrays were taken out of it and are now children."""

    values: tuple[Any, ...]
    recipe: Recipe = field(static=True)

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (of an instance)
        return callable_name(self.__wrapped__)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        # Cached outside the fields: JAX recognises functions by identity, also those that the
        # callable holds.
        remembered: dict[str, Any] = self.__dict__  # pyright: ignore[reportAssignmentType] (an instance's)
        fn = remembered.get("_rebuilt")
        if fn is None:
            if self.values is None:
                raise AttributeError(
                    "a tree in the structure of this function, such as a tree of axes, is not a function"
                )
            fn = remembered["_rebuilt"] = self.recipe(self.values)
        return fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


def closure_to_pytree(tree: Any) -> Any:
    """Makes the arrays that functions close over visible to JAX.

    Use it to pass an Optax optimiser, or any other tuple of closures, to a compiled function: a new
    optimiser with other values in its arrays does not compile again. Nothing is traced here.

    Every callable in a tree that is not a pytree itself (a function, `functools.partial`, what
    `jax.jit` returns, an object with `__call__`), and that holds arrays in closures, defaults, or in
    other callables, is replaced by a pytree with these arrays as children, which is called in the same
    way. So is a function that closes over anything else, which then has no children.

    Two such functions have the same structure if they are made from the same object, or from library
    functions (such as those of Optax) with the same code that captured, besides arrays, equal plain
    values. A new function of your own has a structure of its own, whatever arrays it captures, because
    what it reads may have changed. `hash` and `==` never look at the values of arrays: they compare
    the structure and the identity of the arrays. An array that is held in several places is one child.
    Inner functions that `jax.jit` wraps are called as plain functions, so compile the whole.

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
