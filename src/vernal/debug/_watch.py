"""Records every call of every layer, in one abstract run of a model.

The difficulty: the model's own code calls the layers, perhaps inside `vmap`, `scan`, `jit` or a list
that it makes itself, and each of these rebuilds them from their leaves. So an observer cannot be
recognised by identity.

The solution: a copy of the model in which every callable module is wrapped in a `Watched`, a pytree
with the same leaves that behaves like the module and records the arguments and result of each call.
Its place in the model is part of its structure, so it survives being rebuilt. The copy is run with
`jax.eval_shape`: nothing is allocated or computed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from .._ground import one_level_with_keys
from ..modules import BoundMethod, Module
from ..nn import Stack
from ..show import UnnamedKey
from ..trees import Rest, has_shape, is_array, split

Path = tuple[Any, ...]


class Layer(NamedTuple):
    """A module in a model, with its place."""

    path: Path
    module: Module


class Call(NamedTuple):
    """One call of a layer: its arrays as shapes, everything else, the result, and how many times it runs: once for each
    layer of the `Stack` that it is in."""

    shapes: list[Any]
    rest: Rest
    out: Any
    times: int = 1


def _shape(x: Any) -> Any:
    if not is_array(x):
        return x
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def layers_of(node: Any, path: Path = ()) -> Iterator[Layer]:
    """Every module in a tree, outer ones first."""
    if isinstance(node, Module):
        yield Layer(path, node)
    for key, child in one_level_with_keys(node)[0]:
        yield from layers_of(child, (*path, key))


class Recorder:
    """Collects the calls of one run, by the path of the layer."""

    def __init__(self, tell_apart: bool):
        self.calls: dict[Path, list[Call]] = {}
        # How many times a call recorded now runs.
        self.times = 1
        # Whether layers that differ only in their place count as different structures. If so, a model
        # that stacks the leaves of several layers fails; if not, a compiled function that is called with
        # one after the other is traced only once.
        self.tell_apart = tell_apart

    def watch(self, node: Any, path: Path = ()) -> Any:
        """A copy of a tree in which every callable module is watched."""
        children, treedef = one_level_with_keys(node)
        if isinstance(node, BoundMethod) and node.__func__.__name__ == "__call__":
            # A bound method: calling it calls its module.
            key, owner = children[0]
            return self.watch(owner, (*path, key))
        if children:
            node = treedef.unflatten([self.watch(child, (*path, key)) for key, child in children])
        if isinstance(node, Module) and callable(node):
            return Watched(node, _Place(self, path))
        return node


class _Place:
    """The place of a layer: the part of `Watched` that is structure."""

    __slots__ = ("path", "recorder")

    def __init__(self, recorder: Recorder, path: Path):
        self.recorder = recorder
        self.path = path

    def __eq__(self, other: Any) -> bool:
        if type(other) is not _Place or other.recorder is not self.recorder:
            return False
        return not self.recorder.tell_apart or other.path == self.path

    def __hash__(self) -> int:
        return id(self.recorder)


def unwatched(tree: Any) -> Any:
    """The tree with the layers themselves in place of their `Watched` wrappers."""
    children, treedef = one_level_with_keys(tree)
    if type(tree) is Watched:
        return unwatched(children[0][1])
    return treedef.unflatten([unwatched(child) for _, child in children]) if children else tree


class Watched:
    """A layer whose calls are recorded. Otherwise it behaves like the layer."""

    __slots__ = ("__weakref__", "_layer", "_place")

    def __init__(self, layer: Any, place: _Place):
        self._layer = layer
        self._place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arrays, rest = split(unwatched((self._layer, args, kwargs)), has_shape)
        recorder, layer = self._place.recorder, self._layer
        times = recorder.times
        # The loop of a `Stack` is traced once.
        recorder.times *= layer.num_layers if isinstance(layer, Stack) else 1
        try:
            out = layer(*args, **kwargs)
        finally:
            recorder.times = times
        call = Call(list(map(_shape, arrays)), rest, jtu.tree_map(_shape, unwatched(out)), times)
        recorder.calls.setdefault(self._place.path, []).append(call)
        return out

    def __getattr__(self, name: str) -> Any:
        if name in Watched.__slots__:
            raise AttributeError(name)
        return getattr(self._layer, name)

    # Code that looks at the signature, for a `key` for example, must see the layer's.
    @property
    def __wrapped__(self) -> Any:
        return self._layer

    # `isinstance` reads it.
    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] (read-only)
        return type(self._layer)

    # Python looks these up on the type.

    def __getitem__(self, index: Any) -> Any:
        return self._layer[index]

    def __iter__(self) -> Any:
        return iter(self._layer)

    def __len__(self) -> int:
        return len(self._layer)

    def __contains__(self, item: Any) -> bool:
        return item in self._layer


def _unflatten(place: _Place, children: Any) -> Watched:
    return Watched(children[0], place)


jtu.register_pytree_with_keys(
    Watched,
    lambda w: (((UnnamedKey("_layer"), w._layer),), w._place),
    _unflatten,
    lambda w: ((w._layer,), w._place),
)
