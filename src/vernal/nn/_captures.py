"""The layers that `apply` captures, chosen by path, and the hooks that capture their results."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..harvest import capture
from ..modules import Module, hooked
from ..show import listed, short, type_error, value_error
from ..trees import Paths, node_parts, path_name, replace_parts

_WHERE = "apply(model, ..., capture=...)"


class Captured:
    """The hook of a layer whose results are captured, and their label, which no other call of `apply` has.

    Args:
        patterns: the given paths that match the layer.
    """

    def __init__(self, patterns: list[str]):
        self.patterns = patterns

    def __call__(self, result: Any) -> Any:
        return capture(result, self)


def hooks_for(model: Any, patterns: Any) -> dict[str, Captured]:
    """The hooks of the layers in a model that match some paths, by name."""
    asked = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(asked, (list, tuple)) or not all(isinstance(p, str) for p in asked):
        raise type_error(
            "captures are chosen by path",
            where=_WHERE,
            expected="a path, or a list of paths",
            got=short(patterns),
            instead='"layers.0", "layers.*", or ["encoder", "**.norm"]',
        )
    found = list(_layers(model, ()))
    paths, layers = Paths(found, ("layer", "layers")), {path_name(path) for path in found}
    chosen = [[name for name in paths.nodes(text) if name in layers] for text in asked]
    idle = [text for text, names in zip(asked, chosen, strict=True) if not names]
    if idle:
        raise paths.refusal(_WHERE, idle, instead="the path of a layer: a module that is called")
    asked_by: dict[str, list[str]] = {}
    for text, names in zip(asked, chosen, strict=True):
        for name in names:
            asked_by.setdefault(name, []).append(text)
    return {name: Captured(patterns) for name, patterns in asked_by.items()}


def _layers(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The paths of the modules in a model whose calls can have a hook."""
    cls = type(node)
    if path and isinstance(node, Module) and callable(node):
        if not getattr(cls, "_vernal_may_hide_arrays", False):
            yield path
    for key, part in node_parts(node) or ():
        yield from _layers(part, (*path, key))


def with_hooks(node: Any, hooks: Mapping[str, Captured], path: tuple[Any, ...] = ()) -> Any:
    """The model with these hooks on its layers."""
    parts = node_parts(node) or ()
    new = [(key, part, with_hooks(part, hooks, (*path, key))) for key, part in parts]
    changes = {key: after for key, before, after in new if after is not before}
    node = replace_parts(node, changes) if changes else node
    hook = hooks.get(path_name(path))
    return node if hook is None or not isinstance(node, Module) else hooked(node, hook)


def by_name(hooks: Mapping[str, Captured], caught: Mapping[Any, Any]) -> dict[str, Any]:
    """The captured results, by the names of the layers. Raises if no layer that a path matches was called."""
    called = {text for hook in hooks.values() if hook in caught for text in hook.patterns}
    asked = dict.fromkeys(text for hook in hooks.values() for text in hook.patterns)
    missing = [repr(text) for text in asked if text not in called]
    if missing:
        raise value_error(
            "some layers to capture were not called",
            where=_WHERE,
            expected="paths of layers that the model calls, and whose results it uses (an inner `apply` keeps its "
            "captures for itself)",
            got=listed(missing),
            instead="the paths of other layers; debug.summary(model, x) shows which are called",
        )
    return {name: caught[hook] for name, hook in hooks.items() if hook in caught}
