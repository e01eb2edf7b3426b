"""Code that all derivatives share: the options `wrt` and `has_aux`, and calls flattened by them.

A call is flattened once, into the arrays that are differentiated, the other arrays, and the
rest. A *target* is one argument that is differentiated, wholly or in part. It is a range of the
leaves of `(fn, args, kwargs)`, found by counting rather than by path, because this runs at every
call. Its result has the structure of the argument, with `NoGradient` for every leaf that was not
differentiated.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.tree_util as jtu

from .._ground import callable_name, signature_of
from ..modules import Static, field, frozen_leaves
from ..show import listed, path_text, short, type_error, value_error
from ..trees import (
    NoGradient,
    Rest,
    is_array,
    is_inexact_array,
    picked_nodes,
    split,
    values_with_paths,
)
from ._boundary import parameter_name, to_positional
from ._transformed import Transformed, call_inside, check_callable, wrap
from ._wrt import check_wrt, is_mask, spread_mask

P = ParamSpec("P")
T = TypeVar("T")

_INSTEAD_OF = {
    "argnums": "choose what to differentiate with `wrt`: wrt=1, wrt=(0, 2), wrt='x', or wrt=lambda model: model.weight",
    "argnames": "choose what to differentiate with `wrt`: wrt='x' or wrt=('x', 'y')",
    "holomorphic": "make the result real with jnp.real; for a holomorphic function of arrays use JAX itself",
    "allow_int": "leave it out: integers are not differentiated, and get NoGradient()",
}


class Derivative(Transformed[P, T]):
    """A function under `filter_grad` or another derivative."""

    has_aux: bool = field(static=True)
    wrt: Static
    transform: str = field(static=True)
    # Stands for leaves that are not differentiated. (None in `vernal.compat`, whose gradients may have no other leaf.)
    missing: NoGradient | None = field(static=True, default_factory=NoGradient)


def decorator(
    cls: type[Derivative[Any, Any]],
    transform: str,
    fn: Any,
    has_aux: bool,
    wrt: Any,
    refused: dict[str, Any],
) -> Any:
    """Both forms of a derivative: `transform(fn)`, and `@transform(option=...)` with `fn` None. `cls` is the class of
    the transformed function, `refused` are unknown options."""
    if refused:
        name = next(iter(refused))
        raise type_error(
            f"{transform} has no option `{name}`",
            where=f"{transform}(fn, {name}=...)",
            expected="has_aux or wrt",
            got=name,
            instead=_INSTEAD_OF.get(name, f"leave `{name}` out"),
        )
    check_wrt(wrt, transform)

    def decorate(fn: Any) -> Any:
        check_callable(fn, transform)
        return wrap(cls(fn, has_aux, Static(wrt), transform))

    return decorate if fn is None else decorate(fn)


def value_and_aux(fn: Any, out: Any, has_aux: bool, transform: str) -> tuple[Any, Any]:
    """The result of a function, as `(value, aux)`. Raises `TypeError` if `has_aux` and it is not a pair."""
    if not has_aux:
        return out, None
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    raise type_error(
        f"`{callable_name(fn)}` must return a pair, because has_aux=True",
        where=f"{transform}({callable_name(fn)}, has_aux=True)",
        expected="(value, aux)",
        got=short(out),
        instead="return a pair whose second part may be any Python object, or leave has_aux out",
    )


class Target:
    """One argument that is differentiated: its place, and which of its leaves."""

    __slots__ = ("mask", "name", "parts", "slots", "start", "tree", "treedef")

    def __init__(self, name: str, tree: Any, treedef: Any, start: int):
        self.name = name
        self.tree = tree
        self.treedef = treedef
        # The index of its first leaf among those of `(fn, args, kwargs)`.
        self.start = start
        # What `wrt` selects: nodes of the tree with their paths. At first, the whole.
        self.parts: list[tuple[tuple[Any, ...], Any]] = [((), tree)]
        # Or, for every leaf, whether `wrt` selects it.
        self.mask: list[bool] | None = None
        # For every leaf, the index of the differentiated array there, or None.
        self.slots: tuple[int | None, ...] = ()

    def asked(self) -> list[list[bool]]:
        """For every selected part, which leaves belong to it."""
        if self.mask is not None:
            return [self.mask]
        if not self.parts[0][0]:
            return [[True] * self.treedef.num_leaves]
        paths = [path for path, _ in jtu.tree_flatten_with_path(self.tree)[0]]
        return [[path[: len(part)] == part for path in paths] for part, _ in self.parts]


class Call:
    """A flattened call: the arrays that are differentiated, and the rest."""

    __slots__ = ("arrays", "fn", "positions", "rest", "targets")

    def __init__(self, fn: Any, arrays: list[Any], rest: Rest, targets: list[Target]):
        self.fn = fn
        self.arrays = arrays
        self.rest = rest
        self.targets = targets
        self.positions = [i for target in targets for i in target.slots if i is not None]

    def chosen(self) -> list[Any]:
        """The arrays that are differentiated."""
        return [self.arrays[i] for i in self.positions]

    def run(self, chosen: Sequence[Any]) -> Any:
        """Calls the function with other values of the differentiated arrays."""
        arrays = list(self.arrays)
        for i, array in zip(self.positions, chosen, strict=True):
            arrays[i] = array
        return call_inside(self.fn, self.rest, arrays)

    def outline(self) -> tuple[tuple[Any, tuple[int | None, ...]], ...]:
        """What `assemble` needs to know of the targets."""
        return tuple((target.treedef, target.slots) for target in self.targets)


def assemble(outline: Any, values: Sequence[Any], missing: Any) -> tuple[Any, ...]:
    """Puts one result for each differentiated array into trees like the targets, with `missing` everywhere else.
    `outline` is the result of `Call.outline`."""
    left = iter(values)
    return tuple(
        treedef.unflatten([missing if slot is None else next(left) for slot in slots])
        for treedef, slots in outline
    )


def flatten_call(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wrt: Any,
    transform: str,
    may_be_nothing: bool = False,
) -> Call:
    """Flattens a call by what is to be differentiated: what `wrt` selects (None: the first argument) and is not
    frozen. Raises `ValueError` if `wrt` names an argument that does not exist, or the same one twice, or is a mask
    that does not fit, and `TypeError` if it selects no floating-point array that is not frozen."""
    if kwargs:
        args, kwargs = to_positional(fn, args, kwargs)
    arrays, rest = split((fn, args, kwargs))
    masked = is_mask(wrt)
    if wrt is None or masked or callable(wrt):
        places = [_place(fn, args, kwargs, 0, transform)]
    else:
        several = wrt if isinstance(wrt, tuple) else (wrt,)
        places = [_place(fn, args, kwargs, one, transform) for one in several]
        _refuse_twice(places, wrt, fn, transform)
    targets = [_target(fn, args, kwargs, rest, place) for place in places]
    if masked:
        targets[0].mask = spread_mask(wrt, targets[0].tree, targets[0].name, transform)
    elif callable(wrt):
        targets[0].parts = picked_nodes(wrt, targets[0].tree, "wrt")
    fill_slots(targets, arrays, rest)
    for target in () if may_be_nothing else targets:
        _refuse_nothing(target, fn, transform)
    return Call(fn, arrays, rest, targets)


def fill_slots(targets: list[Target], arrays: list[Any], rest: Rest) -> None:
    """Finds the arrays that are differentiated in every target: the selected floating-point arrays that
    are not frozen."""
    numbers = _array_numbers(rest.mask)
    for target in targets:
        asked = [any(parts) for parts in zip(*target.asked(), strict=True)]
        found = numbers[target.start : target.start + len(asked)]
        target.slots = tuple(
            i if wanted and not frozen and i is not None and is_inexact_array(arrays[i]) else None
            for i, wanted, frozen in zip(found, asked, frozen_leaves(target.tree), strict=True)
        )


def _array_numbers(mask: Sequence[bool]) -> list[int | None]:
    count = 0
    numbers: list[int | None] = []
    for is_dynamic in mask:
        numbers.append(count if is_dynamic else None)
        count += is_dynamic
    return numbers


# An argument of a call: its number, or its name if it can only be passed by keyword.
_Place = int | str


def _place(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], one: int | str, transform: str
) -> _Place:
    if isinstance(one, int):
        if 0 <= one < len(args):
            return one
        what = f"there is no positional argument number {one}"
    else:
        signature = signature_of(fn)
        for i, parameter in enumerate(signature.parameters.values() if signature else ()):
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                break
            if parameter.name == one and i < len(args):
                return i
        if one in kwargs:
            return one
        what = f"there is no argument `{one}`"
    given = [*(parameter_name(fn, i) for i in range(len(args))), *kwargs]
    raise value_error(
        f"{what} to differentiate in this call of `{callable_name(fn)}`",
        where=f"{transform}({callable_name(fn)}, wrt=...)",
        expected="the number or the name of an argument that the call passes",
        got="a call with " + (", ".join(f"`{name}`" for name in given) or "no arguments"),
        instead="count from 0; pass the argument explicitly if it has a default; use the name, wrt='x', for an "
        "argument that is passed by keyword",
    )


def _refuse_twice(places: list[_Place], wrt: Any, fn: Any, transform: str) -> None:
    if len(set(places)) < len(places):
        raise value_error(
            "`wrt` names the same argument twice",
            where=f"{transform}({callable_name(fn)}, wrt={wrt!r})",
            expected="different arguments",
            got=", ".join(f"`{_name(fn, place)}`" for place in places),
            instead="name each argument once, by its number or by its name",
        )


def _name(fn: Any, place: _Place) -> str:
    return place if isinstance(place, str) else parameter_name(fn, place)


def _target(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rest: Rest, place: _Place
) -> Target:
    part, (index, tree) = (
        # JAX orders dictionaries by their keys.
        (2, (sorted(kwargs).index(place), kwargs[place]))
        if isinstance(place, str)
        else (1, (place, args[place]))
    )
    parts = rest.treedef.children()
    siblings = parts[part].children()
    before = [*parts[:part], *siblings[:index]]
    start = sum(treedef.num_leaves for treedef in before)
    return Target(_name(fn, place), tree, siblings[index], start)


def targets_of(fn: Any, args: tuple[Any, ...], rest: Rest) -> list[Target]:
    """Every positional argument as a target."""
    return [_target(fn, args, {}, rest, i) for i in range(len(args))]


def _refuse_nothing(target: Target, fn: Any, transform: str) -> None:
    """Refuses a part with nothing to differentiate: it would silently never be trained."""
    if len(target.parts) == 1 and any(slot is not None for slot in target.slots):
        return
    for (path, node), leaves in zip(target.parts, target.asked(), strict=True):
        if any(s is not None for s, wanted in zip(target.slots, leaves, strict=True) if wanted):
            continue
        root = path_text(path, target.name)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(node)):
            raise _abstract(root, fn, transform)
        frozen = frozen_leaves(target.tree)
        if any(f for f, wanted in zip(frozen, leaves, strict=True) if wanted):
            raise _all_frozen(root, fn, transform)
        numbers = listed(_numbers(node, root))
        raise type_error(
            f"{transform} of `{callable_name(fn)}`: nothing to differentiate, there is no floating-point array",
            where=f"argument `{root}`",
            expected="at least one floating-point array",
            got=numbers or short(node),
            instead="make numbers arrays: annotate the field of the module as `jax.Array`, which converts the "
            "number it is given, or write jnp.asarray(2.0); for integers, x.astype(float)",
        )


def _abstract(root: str, fn: Any, transform: str) -> TypeError:
    return type_error(
        f"{transform} of `{callable_name(fn)}`: nothing to differentiate, the arrays have no values",
        where=f"argument `{root}`",
        expected="arrays",
        got="jax.ShapeDtypeStruct, as jax.eval_shape makes them",
        instead=f"vernal.filter_eval_shape({transform}(fn), model) for shapes alone",
    )


def _all_frozen(root: str, fn: Any, transform: str) -> TypeError:
    return type_error(
        f"{transform} of `{callable_name(fn)}`: nothing to differentiate, every floating-point array is frozen",
        where=f"argument `{root}`",
        expected="at least one floating-point array that is not frozen",
        got="frozen arrays only",
        instead="vernal.unfreeze(model, where), or differentiate another part",
    )


def _numbers(node: Any, root: str) -> Iterator[str]:
    """The leaves that the user probably meant to differentiate: Python numbers, and arrays of integers."""
    for path, value in values_with_paths(node):
        if type(value) in (int, float, complex):
            yield f"{path_text(path, root)} = {value!r} (a Python number)"
        elif is_array(value):
            yield f"{path_text(path, root)}: {short(value)}"
