"""The loops with Equinox's options; each kind ignores the options that it does not use."""

from collections.abc import Callable
from typing import Any, Literal

from .... import loops


def while_loop(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Any,
    *,
    max_steps: int | None = None,
    buffers: Callable[[Any], Any] | None = None,
    kind: Literal["lax", "checkpointed", "bounded"],
    checkpoints: int | None = None,
    base: int = 16,
) -> Any:
    """`vernal.loops.while_loop`.

    Args:
        cond_fun: as in `vernal.loops.while_loop`, like all other arguments.
        checkpoints: ignored unless `kind` is `"checkpointed"`.
        base: ignored unless `kind` is `"bounded"`.

    Returns:
        The last carry.
    """
    return loops.while_loop(
        cond_fun,
        body_fun,
        init_val,
        max_steps=max_steps,
        buffers=buffers,
        kind=kind,
        checkpoints=checkpoints if kind == "checkpointed" else None,
        base=base if kind == "bounded" else None,
    )


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int | None = None,
    *,
    buffers: Callable[[Any], Any] | None = None,
    kind: Literal["lax", "checkpointed"],
    checkpoints: int | Literal["all"] | None = None,
) -> tuple[Any, Any]:
    """`vernal.loops.scan`.

    Args:
        f: as in `vernal.loops.scan`, like all other arguments.
        checkpoints: ignored unless `kind` is `"checkpointed"`.

    Returns:
        The last carry, and the stacked results.
    """
    checkpoints = checkpoints if kind == "checkpointed" else None
    return loops.scan(f, init, xs, length, buffers=buffers, kind=kind, checkpoints=checkpoints)
