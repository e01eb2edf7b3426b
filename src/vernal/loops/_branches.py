"""`filter_cond` and `filter_switch`: `jax.lax.cond` and `jax.lax.switch` for arbitrary operands,
branches and results.

JAX recognises a branch that it has already traced by identity, and forgets it when the object dies.
So the object made from the user's function is cached as long as that function lives (or, for
modules, by structure): a Python loop that calls `filter_cond` with the same functions compiles
once. Nothing is cached during tracing, because operands and branches may then hold tracers, which
must not outlive the trace.

Where `vmap` maps the choice, JAX computes every branch for every element. So a branch is told for
which elements it is taken, and its checks apply to these alone.
"""

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import eval_jaxpr

from .._ground import callable_name, register_cache, trace_state_clean
from ..harvest import checks, sow_if
from ..show import diff, diff_text, message, short, type_error, value_error
from ..transforms import call_inside, check_callable, varying_axes, varying_over
from ..trees import Rest, is_array, split
from ._per_device import refuse_collectives, vary_inside, without_gradient

T = TypeVar("T")


class _Branch:
    """One branch as JAX sees it: a function of the choice, the arrays of all branches and the operands'
    arrays."""

    def __init__(self, fn: Any, rest: Rest, index: int):
        # A weak reference to a plain function: the cache that holds this object must not keep the
        # function alive.
        self.fn = fn
        self.rest = rest
        self.index = index
        self.__name__ = self.__qualname__ = callable_name(
            fn() if isinstance(fn, weakref.ref) else fn
        )

    def __call__(
        self, choice: Any, of_branches: list[list[Any]], of_operands: list[Any]
    ) -> tuple[list[Any], Rest]:
        args = [*of_branches[self.index], *of_operands]
        closed, (_, rest) = jax.make_jaxpr(self._flat, return_shape=True)(args)

        consts, axes = closed.consts, varying_axes(choice)
        if axes:
            consts = [without_gradient(x, axes, f"`{self.__name__}`") for x in consts]

        def run(*args: Any) -> list[Any]:
            return eval_jaxpr(closed.jaxpr, consts, *args)

        if checks(closed.jaxpr):
            # A bool takes the first branch where it is True.
            index = self.index == 0 if choice.dtype == bool else self.index
            return sow_if(choice == index, run, *args), rest
        return run(*args), rest

    def _flat(self, args: list[Any]) -> tuple[list[Any], Rest]:
        fn = self.fn() if isinstance(self.fn, weakref.ref) else self.fn
        return split(call_inside(fn, self.rest, args))


# How many structures of operands are cached for one function (and how many modules in all).
_MOST = 128
_by_function: weakref.WeakKeyDictionary[Any, dict[Any, _Branch]] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=_MOST)
def _by_structure(rest: Rest, index: int) -> _Branch:
    return _Branch(rest.fill([None] * sum(rest.mask))[0], rest, index)


def _clear() -> None:
    _by_function.clear()
    _by_structure.cache_clear()


register_cache(_clear)


def _branch(fn: Any, operands: tuple[Any, ...], index: int) -> tuple[list[Any], _Branch]:
    """The arrays of a branch, and the branch as a function of arrays."""
    arrays = split(fn)[0]
    # A leaf other than a plain function (`functools.partial`) cannot be told from an equal one.
    plain = type(fn) is types.FunctionType
    if not trace_state_clean() or (not plain and jtu.all_leaves([fn])):
        return arrays, _Branch(fn, split((fn, operands, {}))[1], index)
    if not plain:
        return arrays, _by_structure(split((fn, operands, {}))[1], index)
    rest = split((None, operands, {}))[1]
    known = _by_function.setdefault(fn, {})
    if (index, rest) not in known:
        if len(known) >= _MOST:
            known.clear()
        known[index, rest] = _Branch(weakref.ref(fn), rest, index)
    return arrays, known[index, rest]


def _call(
    transform: str,
    select: Callable[..., Any],
    choice: Any,
    branches: Sequence[Any],
    names: Sequence[str],
    operands: tuple[Any, ...],
) -> Any:
    """Runs `select(branches, choice, *arrays)`, and explains JAX's errors about the branches' results. `choice` is
    the index of the branch that it takes, or whether that is the first of two."""
    for fn in branches:
        check_callable(fn, transform)
    axes = varying_axes(choice)
    if axes:
        branches, operands = vary_inside((list(branches), operands), axes)
    prepared = [_branch(fn, operands, i) for i, fn in enumerate(branches)]
    arrays = choice, [of_branch for of_branch, _ in prepared], split(operands)[0]
    try:
        functions = [branch for _, branch in prepared]
        if jax.sharding.get_abstract_mesh().manual_axes:
            functions = _varying_alike(functions, axes, transform, names, arrays)
        out, rest = select(functions, *arrays)
    except TypeError as error:
        found = _disagreement([branch for _, branch in prepared], names, arrays)
        if found is None:
            raise
        raise TypeError(_disagreement_text(transform, *found)) from error
    return rest.fill(out)


def _varying_alike(
    branches: list[_Branch],
    axes: frozenset[Any],
    transform: str,
    names: Sequence[str],
    arrays: Any,
) -> list[Any]:
    """The branches, wrapped so that each result varies over the axes of `shard_map` that it varies over in any branch,
    or that the choice varies over (`axes`)."""
    traced = [jax.make_jaxpr(branch)(*arrays) for branch in branches]
    if len({len(closed.out_avals) for closed in traced}) > 1:
        # JAX says what is wrong.
        return branches
    for name, closed in zip(names, traced, strict=True):
        refuse_collectives(closed.jaxpr, axes, f"{name} of {transform}")
    of_results = [
        axes.union(*(t.manual_axis_type.varying for t in types))
        for types in zip(*(closed.out_avals for closed in traced), strict=True)
    ]

    def alike(branch: _Branch) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            out, rest = branch(*args)
            return [*map(varying_over, out, of_results)], rest

        return run

    return [*map(alike, branches)]


def _disagreement(
    branches: list[_Branch], names: Sequence[str], arrays: Any
) -> tuple[str, Any, str, Any] | None:
    """Two branches, by name, whose results differ, and the results; None if all agree (or one
    fails)."""
    results = []
    for branch in branches:
        try:
            out, rest = jax.eval_shape(branch, *arrays)
        except Exception:
            # The branch itself fails: its own error says why.
            return None
        results.append(rest.fill(out))
    labels = [f"{name} (`{branch.__name__}`)" for name, branch in zip(names, branches, strict=True)]
    for label, result in zip(labels[1:], results[1:], strict=True):
        if diff(results[0], result, weak_type=False):
            return labels[0], results[0], label, result
    return None


def _disagreement_text(transform: str, first: str, expected: Any, other: str, got: Any) -> str:
    return message(
        f"{transform}: the branches return results that do not match",
        where=f"{first} and {other}",
        expected="results with the same structure, shapes, dtypes and non-array values",
        got=f"(expected: {first}, got: {other})\n"
        + diff_text(expected, got, weak_type=False, root="result"),
        instead="return the same structure from every branch; convert Python numbers that differ with "
        "`jnp.asarray(x)`, and cast to one dtype with `.astype`",
    )


def filter_cond(
    pred: Any, true_fn: Callable[..., T], false_fn: Callable[..., T], /, *operands: Any
) -> T:
    """Calls one of two functions, chosen while the compiled program runs.

    Like `jax.lax.cond`, for arbitrary Python objects. Both functions are traced. They may be plain
    functions, closures, modules or methods; gradients reach the arrays of modules and of closures.
    Under `vmap` with a mapped `pred` both are computed and the result is selected. Inside
    `jax.shard_map` each result varies over the axes that it varies over in either function, or that
    `pred` varies over. If `pred` varies, each device chooses independently, and no collective over
    such an axis is allowed.

    Args:
        pred: a scalar of dtype bool, or a Python bool.
        true_fn: called as `true_fn(*operands)` if `pred` holds.
        false_fn: called otherwise.
        *operands: any Python objects.

    Returns:
        The result: any tree. Its leaves that are not arrays must be equal in both branches, and are
        returned unchanged.

    Raises:
        TypeError: if `pred` is not a scalar bool, if a branch cannot be called, or if the branches'
            results differ in structure, shape, dtype or a leaf that is not an array. Weak types are
            promoted as by JAX.
        ValueError: inside `jax.shard_map`, if a branch that only some devices take has a collective,
            or its gradient would need one, as in `loops.while_loop`.
        TracedShapeError: if a traced value reaches a shape inside a branch.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> double, negate = lambda f, x: (f(2 * x), "done"), lambda f, x: (f(-x), "done")
        >>> vernal.filter_cond(jnp.array(True), double, negate, jnp.square, jnp.array(3.0))
        (Array(36., dtype=float32, weak_type=True), 'done')
    """
    if not _is_scalar(pred, bool, np.bool_):
        raise type_error(
            "the predicate of filter_cond must be a scalar bool",
            where="argument `pred`",
            expected="bool[], or a Python bool",
            got=short(pred),
            instead="`x > 0` for a number; `jnp.any(mask)` or `jnp.all(mask)` for an array; "
            "`filter_vmap` to choose for each element",
        )
    return _call(
        "filter_cond",
        lambda branches, *arrays: jax.lax.cond(pred, *branches, *arrays),
        pred,
        [true_fn, false_fn],
        ["true_fn", "false_fn"],
        operands,
    )


def filter_switch(index: Any, branches: Sequence[Callable[..., T]], /, *operands: Any) -> T:
    """Calls one of several functions, chosen while the compiled program runs.

    Like `jax.lax.switch`, for arbitrary Python objects.

    Args:
        index: a scalar of integer dtype, or a Python int. It is clamped to
            `0 ... len(branches) - 1`.
        branches: a sequence of functions, as for `filter_cond`.
        *operands: any Python objects.

    Returns:
        `branches[index](*operands)`, with the same conditions as for `filter_cond`.

    Raises:
        TypeError: if `index` is not a scalar integer, if a branch cannot be called, or if the
            branches' results differ in structure, shape, dtype or a leaf that is not an array.
        ValueError: if `branches` is empty, or as for `filter_cond`.
        TracedShapeError: if a traced value reaches a shape inside a branch.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> vernal.filter_switch(jnp.array(1), [jnp.sin, jnp.square, jax.nn.relu], jnp.array(3.0))
        Array(9., dtype=float32, weak_type=True)
    """
    if not _is_scalar(index, int, np.integer):
        raise type_error(
            "the index of filter_switch must be a scalar integer",
            where="argument `index`",
            expected="i32[], or a Python int",
            got=short(index),
            instead="`index.astype(int)` for a number; `filter_cond` for a bool",
        )
    branches = list(branches)
    if not branches:
        raise value_error(
            "filter_switch needs at least one branch",
            where="argument `branches`",
            expected="a sequence of functions",
            got="an empty sequence",
            instead="filter_switch(index, [f, g], x)",
        )
    index = _clamped(index, len(branches) - 1)
    return _call(
        "filter_switch",
        lambda branches, *arrays: jax.lax.switch(index, branches, *arrays),
        jnp.asarray(index),
        branches,
        [f"branches[{i}]" for i in range(len(branches))],
        operands,
    )


def _clamped(index: Any, last: int) -> Any:
    """The index, clamped to 0 ... `last`. `jax.lax.switch` would first cast it to int32, where large indices wrap."""
    if not isinstance(index, jax.Array):
        return min(max(int(index), 0), last)
    if index.dtype.itemsize < 4:  # `last` may not fit in its dtype
        index = index.astype(jnp.int32)
    return jnp.clip(index, 0, last).astype(jnp.int32)


def _is_scalar(x: Any, python: type, kind: Any) -> bool:
    if is_array(x):
        return x.shape == () and jax.numpy.issubdtype(x.dtype, kind)
    return type(x) is python
