"""One value (an axis, a sharding) for every array among the arguments, from the user's option.

The option has the same forms everywhere: one value for everything; a tuple with one prefix tree for
each positional argument; or a dictionary from argument names to prefix trees, in which arguments
without an entry keep the default.
"""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._ground import callable_name, signature_of
from ..show import message, short, type_error, value_error
from ..trees import Rest
from ._boundary import parameter_name
from ._prefixes import broadcast_prefix


def refuse_options(transform: str, refused: dict[str, Any], expected: str, instead: str) -> None:
    """Refuses unknown options of a transformation: the keyword arguments that were left over. `expected` are the
    options it has."""
    for name in refused:
        raise type_error(
            f"{transform} has no option `{name}`",
            where=f"{transform}(fn, {name}=...)",
            expected=expected,
            got=name,
            instead=instead,
        )


def check_names(fn: Callable[..., Any], given: Any, what: str) -> None:
    """Refuses a dictionary `given` for the arguments of `fn` with a key that is not a parameter. `what` is the name
    of the option."""
    if not isinstance(given, dict):
        return
    signature = signature_of(fn)
    names = [] if signature is None else list(signature.parameters)
    for name in given:
        if name not in names:
            raise value_error(
                f"`{what}` names an argument that `{callable_name(fn)}` does not have",
                where=f"{what}[{name!r}]",
                expected=", ".join(map(repr, names)) or "a function with a known signature",
                got=short(name),
                instead="use the names in the signature, or a tuple with one entry for each positional argument",
            )


class _Place:
    """A placeholder for a leaf of the arguments, which prints like it."""

    def __init__(self, index: int, leaf: Any):
        self.index = index
        self.leaf = leaf

    def __repr__(self) -> str:
        return short(self.leaf)


def for_arguments(
    fn: Callable[..., Any],
    rest: Rest,
    arrays: list[Any],
    given: Any,
    *,
    what: str,
    default: Any,
    of_function: Any,
    is_leaf: Callable[[Any], bool],
) -> list[Any]:
    """The value for every array of a call.

    Args:
        fn: the function.
        rest: the structure of `(fn, args, kwargs)`.
        arrays: the arrays that fill it.
        given: one value, a tuple of prefixes, or a dictionary of prefixes by argument name.
        what: the name of the option, for messages.
        default: the value for arguments that are not in the dictionary, or can only be passed by keyword.
        of_function: the value for the arrays of the function itself.
        is_leaf: whether an object is a value.
    """
    in_function = rest.treedef.children()[0].num_leaves
    if not isinstance(given, (tuple, list, dict)):
        return [of_function if i < in_function else given for i, m in enumerate(rest.mask) if m]
    leaves = rest.treedef.flatten_up_to(rest.fill(arrays))
    _, args, kwargs = rest.treedef.unflatten([_Place(*leaf) for leaf in enumerate(leaves)])
    values = dict.fromkeys(range(in_function), of_function)

    def spread(prefix: Any, tree: Any, root: str) -> None:
        found = broadcast_prefix(
            prefix, tree, what=f"`{what}` of `{callable_name(fn)}`", root=root, is_leaf=is_leaf
        )
        places = [place.index for place in jtu.tree_leaves(tree)]
        values.update(zip(places, found, strict=True))

    if isinstance(given, dict):
        signature = signature_of(fn)
        bound = {} if signature is None else signature.bind(*args, **kwargs).arguments
        for name, prefix in given.items():
            if name not in bound and prefix is not None:
                raise value_error(
                    f"`{what}` names an argument of `{callable_name(fn)}` that the call does not pass",
                    where=f"{what}[{name!r}]",
                    expected=", ".join(map(repr, bound)) or "no name",
                    got=repr(name),
                    instead=f"pass `{name}` in the call; or write {name!r}: None",
                )
        for name, tree in bound.items():
            if name in given:
                spread(given[name], tree, name)
    elif len(given) != len(args):
        raise ValueError(_wrong_count(fn, len(given), len(args), what))
    else:
        for i, (prefix, tree) in enumerate(zip(given, args, strict=True)):
            spread(prefix, tree, parameter_name(fn, i))
    return [values.get(i, default) for i, m in enumerate(rest.mask) if m]


def _wrong_count(fn: Callable[..., Any], given: int, called: int, what: str) -> str:
    return message(
        f"`{what}` must have one entry for each positional argument",
        where=f"{what} of `{callable_name(fn)}`",
        expected=f"{called} entries: {', '.join(parameter_name(fn, i) for i in range(called))}",
        got=f"{given} entries",
        instead=f"give one entry for each argument of the call, or name some: {what}={{'name': ...}}",
    )
