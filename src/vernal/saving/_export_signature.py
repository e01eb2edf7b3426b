"""The signature of an exported function as JSON: the names of its parameters, the Python values that
it was exported for, and the structure of its result.

Arguments are matched by the names of their leaves. Nothing else about them is kept, so the process
that calls the function does not need the classes of its arguments.
"""

import inspect
import json
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import signature_of
from ..show import path_text, short, spec_text, type_error
from ..trees import has_shape, is_array, path_name
from ._leaves import leaves_by_name

_PLAIN = (bool, int, float, str)
_Parameter = inspect.Parameter


class Signature(NamedTuple):
    """A function's signature. `parameters` are pairs of name and kind; `values` are the Python values
    among the leaves of the arguments, by name; `output` is what `describe` returned for the result."""

    function: str
    parameters: list[list[str]]
    values: dict[str, Any]
    output: list[Any]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by parameter.

        Args:
            args: the positional ones.
            kwargs: the others.

        Raises:
            TypeError: if they do not fit the parameters.
        """
        known = inspect.Signature(
            [_Parameter(n, getattr(_Parameter, kind)) for n, kind in self.parameters]
        )
        try:
            return known.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise type_error(
                "the call does not fit the exported function",
                where=f"a call of the exported `{self.function}`",
                expected=f"{self.function}{known}",
                got=str(error),
                instead="the arguments that it was exported for, no more and no fewer",
            ) from None

    def arrays(self, given: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
        """The arrays of a call by name.

        Args:
            given: what `bind` returned.
            expected: for every name something with the shape and dtype that the program takes.

        Returns:
            The arrays, in the order of `expected`.

        Raises:
            TypeError: if something is missing, not expected, or of another shape, dtype or value.
                One error lists all of it.
        """
        found: dict[str, Any] = {}
        problems: list[str] = []
        for path, leaf in jtu.tree_flatten_with_path(given)[0]:
            name = path_name(path)
            if name not in expected and name not in self.values:
                # A dictionary keyed by names stands for the tree with these leaves.
                name = ".".join(_key_text(key) for key in path if path_name((key,)))
            if name not in expected and name not in self.values:
                problems.append(f"{name}: not expected, got {_text(leaf)}")
            elif name in found:
                problems.append(f"{name}: given twice")
            else:
                found[name] = leaf
        arrays: dict[str, Any] = {}
        for name, aval in expected.items():
            array = jnp.asarray(found[name]) if is_array(found.get(name)) else None
            if name not in found:
                problems.append(f"{name}: missing, expected {spec_text(aval)}")
            elif array is None or not _fits(aval, array):
                got = short(found[name]) if array is None else spec_text(array)
                problems.append(f"{name}: expected {spec_text(aval)}, got {got}")
            else:
                arrays[name] = array
        for name, value in self.values.items():
            if name not in found:
                problems.append(f"{name}: missing, expected {value!r}")
            elif not _same_value(found[name], value):
                problems.append(f"{name}: expected {value!r}, got {_text(found[name])}")
        if problems:
            raise type_error(
                "the arguments are not those that the function was exported for",
                where=f"a call of the exported `{self.function}`",
                got="\n".join(problems),
                instead="arrays of the shapes and dtypes it expects; or export the function again, "
                "with a symbolic size (`shapes=`) where a size should vary",
            )
        return arrays


def _key_text(key: Any) -> str:
    return key.key if isinstance(key, jtu.DictKey) and type(key.key) is str else path_name((key,))


def _text(leaf: Any) -> str:
    return spec_text(leaf) if is_array(leaf) else short(leaf)


def _fits(aval: Any, array: Any) -> bool:
    # JAX compares sizes that depend on a symbolic one.
    return (
        aval.dtype == array.dtype
        and len(aval.shape) == array.ndim
        and all(
            not isinstance(expected, int) or expected == got
            for expected, got in zip(aval.shape, array.shape, strict=True)
        )
    )


def _same_value(a: Any, b: Any) -> bool:
    # As text, 1, 1.0 and True differ, and nan equals nan.
    return type(a) is type(b) and json.dumps(a) == json.dumps(b)


def bind_example(
    fn: Any, args: tuple[Any, ...], keywords: dict[str, Any]
) -> inspect.BoundArguments:
    """The example of a call, by parameter. A function whose signature Python cannot read has one parameter, `args`.
    Raises `TypeError` if the arguments do not fit the parameters."""
    unknown = inspect.Signature([_Parameter("args", _Parameter.VAR_POSITIONAL)])
    return (signature_of(fn) or unknown).bind(*args, **keywords)


def parameters_of(bound: inspect.BoundArguments) -> list[list[str]]:
    """Names and kinds of the parameters that have an argument. A parameter that was left out keeps its
    default; those after it can be given only by name."""
    parameters: list[list[str]] = []
    skipped = False
    for name, parameter in bound.signature.parameters.items():
        if name not in bound.arguments:
            skipped = True
            continue
        movable = skipped and parameter.kind is _Parameter.POSITIONAL_OR_KEYWORD
        kind = _Parameter.KEYWORD_ONLY if movable else parameter.kind
        parameters.append([name, kind.name])
    return parameters


def plain_values(leaves: dict[str, Any]) -> dict[str, Any]:
    """The leaves of an example, by name, that are neither arrays nor shapes. Raises `TypeError` for one that a file
    cannot hold."""
    values = {name: leaf for name, leaf in leaves.items() if not has_shape(leaf)}
    for name, value in values.items():
        if type(value) not in _PLAIN:
            raise type_error(
                "an argument holds a value that an exported function cannot take",
                where=f"argument {name}",
                expected="arrays; bools, ints, floats and strings",
                got=short(value),
                instead="a function in which it is fixed: `lambda x: f(x, that)`",
            )
    return values


def describe(out: Any, arrays: list[Any], path: tuple[Any, ...] = ()) -> list[Any]:
    """The structure of a result, as lists for `rebuild`; its arrays are appended to `arrays`, in order. Tuples, lists
    and dictionaries keep their type; any other node (a module, a named tuple) becomes a dictionary of its leaves by
    name. Raises `TypeError` for a value that a file cannot hold."""
    if out is None:
        return ["none"]
    if type(out) in (tuple, list):
        parts = [describe(x, arrays, (*path, jtu.SequenceKey(i))) for i, x in enumerate(out)]
        return [type(out).__name__, *parts]
    if type(out) is dict and all(type(key) in (str, int) for key in out):
        return [
            "dict",
            *([k, describe(x, arrays, (*path, jtu.DictKey(k)))] for k, x in out.items()),
        ]
    if is_array(out):
        arrays.append(out)
        return ["array", len(arrays) - 1]
    if type(out) in _PLAIN:
        return ["value", out]
    if not jtu.all_leaves([out]):
        leaves = leaves_by_name(out, f"the result{path_text(path)}").items()
        return ["dict", *([k, describe(x, arrays, (*path, jtu.GetAttrKey(k)))] for k, x in leaves)]
    raise type_error(
        "the result holds a value that an exported function cannot return",
        where=f"the result{path_text(path)}",
        expected="arrays; None, bools, ints, floats and strings",
        got=short(out),
        instead="return it from a function around the exported one",
    )


def rebuild(output: list[Any], arrays: list[Any]) -> Any:
    """Rebuilds a result from what `describe` returned and its arrays."""
    kind, *parts = output
    if kind == "array":
        return arrays[parts[0]]
    if kind == "value":
        return parts[0]
    if kind == "dict":
        return {key: rebuild(part, arrays) for key, part in parts}
    if kind == "none":
        return None
    built = [rebuild(part, arrays) for part in parts]
    return tuple(built) if kind == "tuple" else built


def output_text(output: list[Any], avals: list[Any]) -> str:
    """A result as text, with shapes and dtypes in place of its arrays."""
    kind, *parts = output
    if kind == "array":
        return spec_text(avals[parts[0]])
    if kind == "value":
        return repr(parts[0])
    if kind == "dict":
        return "{" + ", ".join(f"{k!r}: {output_text(p, avals)}" for k, p in parts) + "}"
    if kind == "none":
        return "None"
    texts = ", ".join(output_text(part, avals) for part in parts)
    if kind == "list":
        return f"[{texts}]"
    return f"({texts},)" if len(parts) == 1 else f"({texts})"
