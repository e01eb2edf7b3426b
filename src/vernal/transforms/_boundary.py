"""How Python objects cross the boundary to JAX.

JAX's transformations take and return arrays. To give them arbitrary Python objects, every
transformation here takes the same three steps:

    arrays, rest = split((fn, args, kwargs))       # everything else, as one comparable value
    out, out_rest = jax_transform(inside)(arrays)  # `inside` fills in, calls, and splits
    return out_rest.fill(out)

Besides `split` they need what is in this file: outputs that keep their structure, and the user's names
for places among the arguments.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._ground import callable_name, same, signature_of
from ..show import path_text
from ..trees import is_array


class Held:
    """A non-array leaf inside the output of a transformation, where the output must keep its structure."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class _HeldStructure:
    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return type(other) is _HeldStructure and same(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


jtu.register_pytree_node(
    Held, lambda held: ((), _HeldStructure(held.value)), lambda aux, _: Held(aux.value)
)


def hold(tree: Any) -> Any:
    """The tree with every leaf that is not an array wrapped in `Held`, so that prefixes of it
    still fit."""
    return jtu.tree_map(lambda x: x if is_array(x) else Held(x), tree)


def release(tree: Any) -> Any:
    """Undoes `hold`."""
    return jtu.tree_map(
        lambda x: x.value if type(x) is Held else x, tree, is_leaf=lambda x: type(x) is Held
    )


def to_positional(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Moves keyword arguments to their positions where the signature allows it, so that `f(1)` and
    `f(x=1)` are the same call."""
    signature = signature_of(fn)
    if signature is None:
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    return bound.args, bound.kwargs


def argument_text(fn: Any, path: tuple[Any, ...]) -> str:
    """The user's name for a place in `(fn, args, kwargs)`: `model.layers[0].weight`, or
    `self.bias` of the function itself."""
    part, rest = path[0].idx, path[1:]
    if part == 0:
        return path_text(rest, root=callable_name(fn))
    if part == 2 and rest:
        return path_text(rest[1:], root=str(getattr(rest[0], "key", rest[0])))
    if not rest:
        return "the arguments"
    return path_text(rest[1:], root=parameter_name(fn, rest[0].idx))


def parameter_name(fn: Any, index: int) -> str:
    """The name of the positional parameter that takes argument number `index`."""
    signature = signature_of(fn)
    parameters = list(signature.parameters.values()) if signature is not None else []
    for i, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{index - i}]"
        if i == index:
            return parameter.name
    return f"args[{index}]"
