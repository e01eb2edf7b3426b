"""`logical_to_mesh`: rules with logical names for the axes of arrays, for any mesh."""

from collections.abc import Mapping
from typing import Any

from jax import P

from ..show import listed, short, type_error, value_error
from ..transforms import axis_names


def logical_to_mesh(
    rules: Mapping[str, P], axes: Mapping[str, str | tuple[str, ...] | None]
) -> dict[str, P]:
    """Turns rules with logical axes (`"embed"`, `"heads"`, `"mlp"`) into rules for a mesh, by a dictionary that maps
    each logical axis to axes of the mesh.

    Write the rules once, beside the model; another mesh only needs another dictionary. This is like the logical axes of
    Flax and the axis mappings of Haliax.

    Args:
        rules: by path, a `jax.P` with a logical name, a tuple of several, or None for each axis of an array.
        axes: by logical name, the axis of the mesh, a tuple of several, or None for an axis that is not sharded. It may
            have names that no rule uses.

    Returns:
        Rules for `place`, `shardings`, `init_sharded`, `fsdp(rules=...)`.

    Raises:
        TypeError: if a rule is not a `jax.P`.
        ValueError: for a logical name that `axes` does not have, or a rule that shards two axes of an array over the
            same axis of the mesh.

    Example:
        >>> import jax
        >>> from vernal.sharding import logical_to_mesh
        >>> rules = {"**.up.weight": jax.P("mlp", "embed"), "**.down.weight": jax.P("embed", "mlp")}
        >>> logical_to_mesh(rules, {"mlp": "model", "embed": None})
        {'**.up.weight': P('model', None), '**.down.weight': P(None, 'model')}
        >>> logical_to_mesh(rules, {"mlp": "model", "embed": ("replica", "data")})["**.up.weight"]
        P('model', ('replica', 'data'))
    """
    return {path: _spec(path, spec, axes) for path, spec in rules.items()}


def _spec(path: str, spec: Any, axes: Mapping[str, str | tuple[str, ...] | None]) -> P:
    where = f"logical_to_mesh(rules, axes), the rule {path!r}"
    if not isinstance(spec, P):
        raise type_error(
            "a rule does not give a jax.P of logical names",
            where=where,
            expected='one entry for each axis of the array, such as jax.P("heads", "embed")',
            got=short(spec),
        )
    entries = [tuple(map(str, axis_names(entry))) for entry in spec]
    unknown = [name for entry in entries for name in entry if name not in axes]
    if unknown:
        raise value_error(
            "a rule names logical axes that `axes` does not map",
            where=where,
            expected=f"some of {listed(map(repr, axes))}",
            got=listed(map(repr, unknown)),
            instead=f"axes | {{{unknown[0]!r}: None}} for an axis that is not cut",
        )
    cut = [[a for name in entry for a in axis_names(axes[name])] for entry in entries]
    names = [a for entry in cut for a in entry]
    twice = sorted({a for a in names if names.count(a) > 1})
    if twice:
        raise value_error(
            "two axes of an array would be cut over the same axis of the mesh",
            where=where,
            expected="each axis of the mesh at most once",
            got=f"{listed(map(repr, twice))} more than once, for {spec}",
            instead="None for one of the logical axes, or a logical name of its own",
        )
    return P(
        *[None if not entry else entry[0] if len(entry) == 1 else tuple(entry) for entry in cut]
    )
