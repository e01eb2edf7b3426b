"""`announce_transform`: an identity that announces the transformations that reach it.

It is a primitive whose every rule (derivative, batching, transposition, abstract evaluation,
lowering) announces that it was applied, and records that in the operations that it leaves behind.
"""

from collections.abc import Callable
from typing import Any

from .._ground import (
    Primitive,
    UndefinedPrimal,
    Zero,
    fancy_primitive_batchers,
    primitive_jvps,
    primitive_transposes,
    register_lowering,
)
from ..trees import split

# On all arrays at once, so that there is one line, however many arrays there are.
_announce_p = Primitive("announce_transform")
_announce_p.multiple_results = True


def _tell(*event: str, stack: Any, name: Any, announce: Any, **_: Any) -> None:
    prefix = "" if name is None else f"{name}: "
    announce(prefix + " > ".join((*stack, *event)))


def _after(event: str, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the operation that a transformation leaves behind."""
    return {**params, "stack": (*params["stack"], event)}


def _evaluate(*args: Any, **params: Any) -> list[Any]:
    _tell("evaluated", **params)
    return list(args)


def _evaluate_abstractly(*avals: Any, **params: Any) -> list[Any]:
    _tell("abstract evaluation", **params)
    return list(avals)


def _lower(ctx: Any, *args: Any, **params: Any) -> Any:
    del ctx
    _tell("lowering", **params)
    return args


def _batch(axis_data: Any, args: Any, dims: Any, **params: Any) -> Any:
    del axis_data
    if all(dim is None for dim in dims):
        # Inside a `vmap`, but none of its arguments is batched.
        return _announce_p.bind(*args, **params), dims
    if params["intermediates"]:
        _tell("vmap", **params)
    return _announce_p.bind(*args, **_after("vmap", params)), dims


def _bind_live(values: Any, event: str, params: dict[str, Any]) -> list[Any]:
    """Announces the values that are not symbolic zeros."""
    live = [x for x in values if type(x) is not Zero]
    out = iter(_announce_p.bind(*live, **_after(event, params)) if live else ())
    return [x if type(x) is Zero else next(out) for x in values]


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    if params["intermediates"]:
        _tell("jvp", **params)
    out = _announce_p.bind(*primals, **_after("jvp (primal)", params))
    return out, _bind_live(tangents, "jvp (tangent)", params)


def _transpose(cotangents: Any, *args: Any, **params: Any) -> list[Any]:
    if params["intermediates"]:
        _tell("transpose", **params)
    found = _bind_live(cotangents, "transpose", params)
    return [ct if type(x) is UndefinedPrimal else None for ct, x in zip(found, args, strict=True)]


_announce_p.def_impl(_evaluate)
_announce_p.def_abstract_eval(_evaluate_abstractly)
register_lowering(_announce_p, _lower)
fancy_primitive_batchers[_announce_p] = _batch
primitive_jvps[_announce_p] = _jvp
primitive_transposes[_announce_p] = _transpose


def announce_transform(
    x: Any,
    name: str | None = None,
    intermediates: bool = False,
    announce: Callable[[str], Any] = print,
) -> Any:
    """Returns `x`, and announces which transformations reach it.

    Each line is one path of the value, from the first transformation to the end: `evaluated` (eagerly),
    `abstract evaluation` (its shape was computed, in order to compile) or `lowering` (it was compiled).
    In between are `vmap`, `jvp (primal)`, `jvp (tangent)` and `transpose`. If a line is missing, the
    result was cached, or the value was not needed.

    Args:
        x: any tree. Leaves that are not arrays are ignored; without arrays nothing is announced.
        name: a prefix of every line.
        intermediates: whether to announce a transformation also when it is applied, before its result
            is evaluated.
        announce: called with each line.

    Returns:
        `x`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> def f(x):
        ...     return jnp.sin(vernal.debug.announce_transform(x, "x"))
        >>> _ = jax.vmap(f)(jnp.arange(3.0))
        x: vmap > evaluated
        >>> _ = jax.jit(f)(jnp.array(1.0))
        x: abstract evaluation
        x: lowering
    """
    arrays, rest = split(x)
    if not arrays:
        return x
    out = _announce_p.bind(
        *arrays, stack=(), name=name, intermediates=intermediates, announce=announce
    )
    return rest.fill(out)
