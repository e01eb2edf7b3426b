"""Arrays sharded over a mesh of devices: `filter_shard` and `filter_shard_map`, for arbitrary Python
objects.

The axes of a mesh are of two types. For `Auto` axes a sharding is a request to the compiler,
`with_sharding_constraint`. For `Explicit` axes (the default of `jax.make_mesh`) it is part of an
array's type, and `reshard` changes it. Both are handled, axis by axis.
"""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
    get_abstract_mesh,
)

from .._ground import callable_name
from ..modules import Static, field
from ..show import is_traced, message, path_text, short, type_error, value_error
from ..trees import is_array, split
from ._arguments import check_names, for_arguments, refuse_options
from ._boundary import argument_text, hold, release, to_positional
from ._cuts import check_axes_of, check_cut, check_lies
from ._prefixes import broadcast_prefix
from ._transformed import Transformed, call_inside, check_callable, wrap

P = ParamSpec("P")
T = TypeVar("T")


def _is_placement(x: Any) -> bool:
    return x is None or isinstance(x, (Sharding, PartitionSpec, jax.Device))


def _only(spec: PartitionSpec, names: AbstractSet[Any]) -> PartitionSpec:
    """The part of a spec that names these axes."""

    def keep(entry: Any) -> Any:
        if isinstance(entry, tuple):
            return tuple(name for name in entry if name in names) or None
        return entry if not isinstance(entry, str) or entry in names else None

    return PartitionSpec(*map(keep, spec))


def _explicit(mesh: Mesh | AbstractMesh) -> set[Any]:
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name for name, kind in types if kind == AxisType.Explicit}


def _constrain(x: Any, placement: Any) -> Any:
    """Places a traced array."""
    if isinstance(placement, NamedSharding):
        mesh, spec = placement.mesh, placement.spec
    elif isinstance(placement, PartitionSpec):
        mesh, spec = get_abstract_mesh(), placement
    else:
        return jax.lax.with_sharding_constraint(x, placement)

    def part(names: AbstractSet[Any]) -> Any:
        some = _only(spec, names)
        return some if isinstance(placement, PartitionSpec) else placement.update(spec=some)

    explicit = _explicit(mesh)
    if not explicit:
        return jax.lax.with_sharding_constraint(x, placement)
    x = jax.reshard(x, part(explicit))
    others = set(mesh.axis_names) - explicit
    return jax.lax.with_sharding_constraint(x, part(others)) if others else x


def _place(x: Any, placement: Any) -> Any:
    if isinstance(placement, jax.Device):
        placement = SingleDeviceSharding(placement)
    if isinstance(x, np.ndarray):
        # On the CPU, JAX may share the memory of an array that is changed later, such as the buffer of a data loader.
        x = np.array(x)
    if not is_traced(x):
        placed = jax.device_put(x, placement)
        if not is_traced(placed):
            return placed
    return _constrain(x, placement)


def filter_shard(x: T, device_or_shardings: Any) -> T:
    """Places the arrays of a tree on a device, or shards them over a mesh.

    Outside of compiled code it moves the arrays, and copies NumPy arrays. Inside, the placement is a constraint for
    the compiler, or, for explicit mesh axes, a change of the arrays' types (`jax.reshard`).

    Args:
        x: any tree. Leaves that are not arrays are ignored.
        device_or_shardings: a `jax.Device`, a `jax.sharding.Sharding`, a `PartitionSpec` (which
            needs `jax.set_mesh`), None for arrays that stay as they are, or a prefix tree of `x`
            with those as leaves.

    Returns:
        The same tree, with its arrays placed.

    Raises:
        TypeError: if a leaf of `device_or_shardings` is something else.
        ValueError: if it is not a prefix of `x`, or an array cannot be placed that way; the message
            names the array.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> mesh = jax.make_mesh((jax.device_count(),), ("batch",))
        >>> batch = {"x": jnp.zeros((jax.device_count(), 2)), "name": "train"}
        >>> vernal.filter_shard(batch, jax.NamedSharding(mesh, jax.P("batch")))["x"].sharding.spec
        P('batch',)
    """
    for path, leaf in jtu.tree_leaves_with_path(device_or_shardings, is_leaf=_is_placement):
        if not _is_placement(leaf):
            raise type_error(
                "not a device or a sharding",
                where=path_text(path, root="device_or_shardings"),
                expected="a jax.Device, a Sharding, a PartitionSpec, or None",
                got=short(leaf),
                instead="jax.NamedSharding(mesh, jax.P('axis'))",
            )
    placements = broadcast_prefix(
        device_or_shardings, x, what="`device_or_shardings`", root="x", is_leaf=_is_placement
    )
    keyed, treedef = jtu.tree_flatten_with_path(x)
    leaves = []
    for (path, leaf), placement in zip(keyed, placements, strict=True):
        if placement is not None and is_array(leaf):
            try:
                leaf = _place(leaf, placement)
            # JAX raises a bare AssertionError for a spec with too many entries.
            except (ValueError, RuntimeError, AssertionError) as error:
                raise ValueError(_misplaced(path, leaf, placement, error)) from error
        leaves.append(leaf)
    return treedef.unflatten(leaves)


def _misplaced(path: Any, leaf: Any, placement: Any, error: Exception) -> str:
    return message(
        "an array cannot be placed with this sharding",
        where=path_text(path, root="x"),
        expected=f"a placement that fits {short(leaf)}",
        got=f"{placement}\n{error}",
        instead="a prefix tree gives each part its own sharding; None leaves an array as it is; inside "
        "jax.jit, explicit mesh axes and a bare PartitionSpec need `with jax.set_mesh(mesh)`",
    )


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)


class _Own:
    """A placeholder for the sharding in the array's type."""


def _own_spec(array: Any, axis_names: AbstractSet[Any]) -> PartitionSpec:
    sharding = jax.typeof(array).sharding
    names = _explicit(sharding.mesh)
    return _only(sharding.spec, names & axis_names if axis_names else names)


class _ShardMap(Transformed[P, T]):
    """What `filter_shard_map` returns."""

    mesh: Any = field(static=True)
    in_specs: Static
    out_specs: Static
    axis_names: frozenset[Any] = field(static=True)
    check_vma: bool = field(static=True)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        fn = self.fn
        given: Any = (args, kwargs)
        if kwargs:
            given = to_positional(fn, args, kwargs)
        arrays, rest = split((fn, *given))

        def run(arrays: list[Any]) -> Any:
            out = hold(call_inside(fn, rest, arrays))
            # JAX's own message would not use the names of the user's result.
            what = f"`out_specs` of `{callable_name(fn)}`"
            broadcast_prefix(
                self.out_specs.value, out, what=what, root="the result", is_leaf=_is_spec
            )
            return out

        run.__name__ = run.__qualname__ = callable_name(fn)
        if self.in_specs.value is None:
            self._check_explicit()
        sizes, where = self._mapped(), f"filter_shard_map of `{callable_name(fn)}`"
        check_axes_of(_without_none(self.out_specs.value), sizes, where, "out_specs")
        options = {}
        dynamic: list[Any] = []
        specs: list[PartitionSpec] = []
        if self.in_specs.value is not None:
            specs = self._specs(rest, arrays)
            paths = [path for path, _ in jtu.tree_leaves_with_path((fn, *given))]
            dynamic = [path for path, is_array in zip(paths, rest.mask, strict=True) if is_array]
            for path, array, spec in zip(dynamic, arrays, specs, strict=True):
                check_cut(array, spec, sizes, f"{where}, argument {argument_text(fn, path)}")
            options["in_specs"] = (specs,)
        mapped = jax.shard_map(
            run,
            mesh=self.mesh,
            out_specs=_without_none(self.out_specs.value),
            axis_names=self.axis_names,
            check_vma=self.check_vma,
            **options,
        )
        try:
            return release(mapped(arrays))
        except ValueError as error:
            if str(error).startswith("in_specs passed to shard_map"):
                for path, array, spec in zip(dynamic, arrays, specs, strict=True):
                    check_lies(array, spec, f"{where}, argument {argument_text(fn, path)}")
            raise

    def _mapped(self) -> dict[Any, int]:
        """The axes that are mapped over, with the number of devices along each."""
        mesh = get_abstract_mesh() if self.mesh is None else self.mesh
        names = self.axis_names or mesh.axis_names
        return {name: size for name, size in mesh.shape.items() if name in names}

    def _check_explicit(self) -> None:
        mesh = get_abstract_mesh() if self.mesh is None else self.mesh
        others = set(self.axis_names or mesh.axis_names) - _explicit(mesh)
        if others or mesh.empty:
            raise value_error(
                "in_specs can only be left out on a mesh with explicit axes",
                where=f"filter_shard_map of `{callable_name(self.fn)}`",
                expected="a mesh with explicit axes only, as jax.make_mesh makes it",
                got=f"{mesh}",
                instead="in_specs=jax.P('axis') for all arguments, or a tuple with one entry for each",
            )

    def _specs(self, rest: Any, arrays: list[Any]) -> list[PartitionSpec]:
        specs = for_arguments(
            self.fn,
            rest,
            arrays,
            _without_none(self.in_specs.value),
            what="in_specs",
            default=_Own,
            of_function=_Own,
            is_leaf=_is_spec,
        )
        return [
            _own_spec(array, self.axis_names) if spec is _Own else spec
            for spec, array in zip(specs, arrays, strict=True)
        ]


def _without_none(specs: Any) -> Any:
    return jtu.tree_map(lambda s: PartitionSpec() if s is None else s, specs, is_leaf=_is_spec)


def _check_specs(what: str, specs: Any) -> None:
    for path, leaf in jtu.tree_leaves_with_path(specs, is_leaf=_is_spec):
        if not _is_spec(leaf):
            raise type_error(
                "not a PartitionSpec",
                where=path_text(path, root=what),
                expected="a PartitionSpec, or None for a value that every device has whole",
                got=short(leaf),
                instead="jax.P('axis')",
            )


@overload
def filter_shard_map(
    fn: Callable[P, T],
    *,
    out_specs: Any,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
    axis_names: AbstractSet[Any] | None = None,
    check_vma: bool = True,
) -> _ShardMap[P, T]: ...
@overload
def filter_shard_map(
    *,
    out_specs: Any,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
    axis_names: AbstractSet[Any] | None = None,
    check_vma: bool = True,
) -> Callable[[Callable[P, T]], _ShardMap[P, T]]: ...
def filter_shard_map(
    fn: Any = None,
    *,
    out_specs: Any,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any = None,
    axis_names: AbstractSet[Any] | None = None,
    check_vma: bool = True,
    **refused: Any,
) -> Any:
    """Runs a function of arbitrary Python objects on every shard of its arguments: `jax.shard_map`.

    Call the mapped function inside `filter_jit`: outside, calls are slow, as with `jax.shard_map`. If
    the function is a module (or a method of one), its own arrays are sharded as in their types: whole
    on every device, unless they are sharded over explicit mesh axes.

    Args:
        fn: the function. It sees each device's part of the arrays, and may use collectives over the
            mesh axes.
        out_specs: how results are put together: a `PartitionSpec`, None for those that are the same
            on all devices, or a prefix tree of the result with those as leaves. Leaves that are not
            arrays are returned unchanged.
        mesh: the mesh; by default that of `jax.set_mesh`.
        in_specs: how arguments are cut: a `PartitionSpec` or None (not cut) for all of them; a
            tuple with one prefix tree for each positional argument; or a dictionary of prefix trees
            by argument name. Arguments without an entry, and those that can only be passed by
            keyword, are sharded as in their types. By default all arguments are, which needs a mesh
            with explicit axes. Leaves that are not arrays are ignored.
        axis_names: the mesh axes to map over; by default all of them.
        check_vma: whether JAX checks that results declared the same on all devices are the same.

    Returns:
        The mapped function.

    Raises:
        TypeError: if `fn` is not callable, if a leaf of the specs is not a spec, or for an unknown
            option.
        ValueError: for a name that is not an argument; at a call, if the specs do not fit the
            arguments or the result.
        TracedShapeError: at a call, if a traced value reaches a shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> mesh = jax.make_mesh((jax.device_count(),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        >>> @vernal.filter_shard_map(mesh=mesh, in_specs=(None, jax.P("i")), out_specs=(None, None))
        ... def total(fn, x):
        ...     return jax.lax.psum(fn(x), "i"), "a sum"
        >>> total(jnp.sum, jnp.ones((jax.device_count(), 2)) / jax.device_count())
        (Array(2., dtype=float32), 'a sum')
    """
    refuse_options(
        "filter_shard_map",
        refused,
        "mesh, in_specs, out_specs, axis_names or check_vma",
        "check_vma in place of check_rep, axis_names in place of auto",
    )
    _check_specs("in_specs", in_specs)
    _check_specs("out_specs", out_specs)

    def decorate(fn: Any) -> Any:
        check_callable(fn, "filter_shard_map")
        check_names(fn, in_specs, "in_specs")
        names = frozenset() if axis_names is None else frozenset(axis_names)
        return wrap(_ShardMap(fn, mesh, Static(in_specs), Static(out_specs), names, check_vma))

    return decorate if fn is None else decorate(fn)
