"""The loops with Equinox's options, of which a kind ignores what it has no use for."""

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
        cond_fun: as there, and so are all others.
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
        f: as there, and so are all others.
        checkpoints: ignored unless `kind` is `"checkpointed"`.

    Returns:
        The last carry, and the stacked results.
    """
    checkpoints = checkpoints if kind == "checkpointed" else None
    return loops.scan(f, init, xs, length, buffers=buffers, kind=kind, checkpoints=checkpoints)
