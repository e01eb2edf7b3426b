"""Finding a setting whose value is needed: inside a compiled step a leaf has no value.

A factory that branches on a number, or converts it, works outside of a compiled function and fails inside. So that both
behave alike, every new kind of call is tried once with traced leaves: a factory when the optimiser or schedule is made,
the rest at the first use outside of a compiled function. Only if a trial fails is the setting looked for, by tracing
one leaf at a time.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._ground import callable_name, register_cache, trace_state_clean
from ..show import is_traced, message, path_text, type_error
from ..trees import is_array

_LOOKED_AT = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)

# The trials that succeeded: a function, and the structures and types it ran with.
_tried: set[Any] = set()
_MOST = 512
register_cache(_tried.clear)


def try_building(call: Any, build: Callable[[Any], Any]) -> None:
    """Calls a factory with traced leaves, and raises its error, or a TypeError that names the settings that the factory
    looks at."""
    error = _try(call, build, ())
    if error is None:
        return
    own = _error_of(call, build, (), traced=())
    if own is None:
        raise _refusal(call, build, ()) or error from error
    if isinstance(own, _LOOKED_AT):
        raise TypeError(_converts(callable_name(call.factory))) from own
    # Numbers with axes are meant for `vmap`, under which they have none.
    if not any(np.ndim(x) > 0 for x in jtu.tree_leaves(call)):
        raise own


def run_alike(call: Any, run: Callable[..., Any], *args: Any) -> Any:
    """`run(call, *args)`; if it looks at settings, a TypeError that names them, even outside of a compiled function,
    where it would work."""
    error: Exception | None = None
    try:
        if trace_state_clean() and jtu.tree_leaves(call):
            error = _try(call, run, args)
        if error is None:
            return run(call, *args)
    except _LOOKED_AT as inside:
        error = inside
    refusal = _refusal(call, run, args)
    if refusal is not None:
        raise refusal from error
    # It fails for another reason, or only if everything is traced.
    return run(call, *args)


def _kind(tree: Any) -> tuple[Any, ...]:
    leaves, treedef = jtu.tree_flatten(tree)
    # For functions, which some transformations take, the type is enough: a new function for each step is not a new
    # kind of step.
    return treedef, *(jax.typeof(x) if is_array(x) else type(x) for x in leaves)


def _try(call: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> Exception | None:
    """The error of the first run of this kind with traced leaves."""
    key = (run, _kind(call), _kind(args))
    with contextlib.suppress(TypeError):  # A structure that is not hashable is tried each time.
        if key in _tried:
            return None
    error = _error_of(call, run, args, traced=range(len(jtu.tree_leaves(call))))
    with contextlib.suppress(TypeError):
        if error is None:
            if len(_tried) >= _MOST:
                _tried.clear()
            _tried.add(key)
    return error


def _error_of(
    call: Any, run: Callable[..., Any], args: tuple[Any, ...], traced: Sequence[int]
) -> Exception | None:
    """The error of an abstract run in which these leaves are traced, and the others are plain numbers."""
    leaves, treedef = jtu.tree_flatten(call)
    numbers = list(map(_number, leaves))

    def trial(given: list[Any]) -> None:
        for i, x in zip(traced, given, strict=True):
            numbers[i] = x
        run(treedef.unflatten(numbers), *args)

    try:
        jax.eval_shape(trial, [_spec(leaves[i]) for i in traced])
    except Exception as error:  # A factory may raise anything for a traced number.
        return error
    return None


def _spec(x: Any) -> jax.ShapeDtypeStruct:
    aval: Any = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _number(x: Any) -> Any:
    """A leaf as a Python number or NumPy array; an arbitrary number if it is traced already."""
    if not is_array(x):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    known = np.full(x.shape, 0.5).astype(x.dtype) if is_traced(x) else np.asarray(x)
    return known.item() if known.ndim == 0 else known


def _number_text(x: Any) -> str:
    number = np.asarray(x)
    return str(bool(number)) if number.dtype == bool else f"{number:.6g}"


def _refusal(call: Any, run: Callable[..., Any], args: tuple[Any, ...]) -> TypeError | None:
    """The error that names the settings that a run looks at; None if it fails for another reason."""
    keyed = jtu.tree_flatten_with_path(call)[0]
    if _error_of(call, run, args, traced=()) is not None:
        return None
    found = [i for i in range(len(keyed)) if _error_of(call, run, args, traced=(i,)) is not None]
    if not found:
        return None
    names = [_name(keyed[i][0]) for i in found]
    value = keyed[found[0]][1]
    shown = "..." if is_traced(value) or np.ndim(value) > 0 else _number_text(value)
    name, kind = callable_name(call.factory), type(call).__name__
    return type_error(
        f"`{name}` looks at the value of a setting that is a leaf: {', '.join(names)}",
        where=f"{kind}({name}, ...)",
        expected="settings that are only used in arithmetic: a leaf has no value while a step is "
        "compiled",
        got="a comparison, or a conversion to a Python number",
        instead=f"vernal.Static({shown}) for `{names[0]}`, with a Python number: it is "
        "structure, and each value is compiled separately",
    )


def _converts(name: str) -> str:
    return message(
        f"`{name}` converts an array to a Python number, but it runs inside compiled functions",
        where=f"{name}(...)",
        expected="a factory that computes with Python numbers, or converts no array",
        got="for example `float(jnp.log(rate))`",
        instead="`math` or NumPy in place of `jax.numpy`; or from_optax of what the factory returns",
    )


def _name(path: tuple[Any, ...]) -> str:
    """The name of a leaf by settings, such as `args[1].learning_rate`."""
    text = ""
    for before, key in zip((None, *path), path, strict=False):
        if getattr(before, "name", None) == "settings":
            text += f".{key.key}"
        elif getattr(key, "name", None) != "settings":
            text += path_text((key,))
    return text.removeprefix(".")
