"""What a compiled program depends on, by path: the signature of a call.

Two calls with equal signatures share a program; the differences of two signatures are why a function
was compiled again. A signature keeps none of the user's objects alive: see `_descriptions.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from .._ground import callable_name, signature_of
from ._cures import OPTIMIZER, SETTING, cure, is_optax
from ._descriptions import STATIC, Array, Description, Part, describe, mesh_text

# The commonly changed settings of JAX that its traces depend on.
_SETTINGS = (
    "jax_allow_f16_reductions",
    "jax_debug_key_reuse",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
    "jax_use_direct_linearize",
)
_MESH = "jax.set_mesh"
_NOTHING = "nothing"
_NOT_GIVEN = "not given"
# A list or a tuple with up to this many parts is reported in full.
_FEW = 12
# Of keys in another order, so many are told.
_KEYS = 4
_ANOTHER = " (another one that prints the same)"


class Difference(NamedTuple):
    """One place where two calls differ.

    Attributes:
        path: the place: `model.layers[0].weight`, `filter_jit(donate=)`, `jax_enable_x64`.
        before: what the earlier call had there, on one line.
        after: what the later call has.
        instead: what to write so that both are one program; empty if there is no general advice.
    """

    path: str
    before: str
    after: str
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


class Signature:
    """What the compiled program for one call depends on.

    Args:
        parts: the description of every argument, setting and option, by name.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: dict[str, Description]):
        self.parts = parts

    def differences(self, later: "Signature", placed: bool = False) -> list[Difference]:
        """Where a later call differs.

        Args:
            later: the signature of that call.
            placed: whether to compare the devices and shardings of arrays even where a trace does not
                depend on them.

        Returns:
            The differences, in the order of the arguments.
        """
        return [difference for difference, _ in self.compared(later, placed)]

    def compared(self, later: "Signature", placed: bool) -> list[tuple[Difference, int]]:
        """The differences, each with the number of parts in it."""
        found: list[tuple[Difference, int]] = []
        for name in dict.fromkeys((*self.parts, *later.parts)):
            a, b = self.parts.get(name), later.parts.get(name)
            here = list(_compare(name, a, b, placed, _NOT_GIVEN))
            found.extend(_advised(here, SETTING) if name in (*_SETTINGS, _MESH) else here)
        return found


_Found = Iterator[tuple[Difference, int]]


def _compare(
    path: str, a: Description | None, b: Description | None, placed: bool, absent: str = _NOTHING
) -> _Found:
    if a is None or b is None:
        size = max(0 if x is None else x.size for x in (a, b))
        yield Difference(path, *(absent if x is None else x.text for x in (a, b))), size
    elif a.hashes[placed] == b.hashes[placed]:
        return
    elif isinstance(a, Array) and isinstance(b, Array):
        yield Difference(path, *a.texts_with(b), cure(path, a, b)), 1
    elif isinstance(a, Array) or isinstance(b, Array):
        yield _difference(path, a, b), max(a.size, b.size)
    elif a.kind != b.kind:
        same_name = a.text == b.text
        texts = [x.full_text if same_name else x.text for x in (a, b)]
        yield _difference(path, a, b, texts), max(a.size, b.size)
    elif is_optax(a):
        yield from _advised(_compare_parts(path, a, b, placed), OPTIMIZER)
    else:
        yield from _compare_parts(path, a, b, placed)


def _compare_parts(path: str, a: Part, b: Part, placed: bool) -> _Found:
    told = a.text != b.text
    if told:
        before, after = _in_full(a), _in_full(b)
        if before is not None and after is not None:
            yield Difference(path, before, after, cure(path, a, b)), max(a.size, b.size)
            return
        yield Difference(path, a.text, b.text), abs(a.size - b.size) + 1
    for key in dict.fromkeys((*a.parts, *b.parts)):
        # The difference in length covers keys that only one of them has.
        if not told or (key in a.parts and key in b.parts):
            for difference in _compare(path + key, a.parts.get(key), b.parts.get(key), placed):
                told = True
                yield difference
    if not told and [*a.parts] != [*b.parts]:
        yield Difference(path, *_in_order(a, b), "insert the keys in one order"), 1
    elif not told and a.mark != b.mark:
        yield _difference(path, a, b), 1


def _in_order(a: Part, b: Part) -> tuple[str, str]:
    """The keys of two parts that have the same ones, from where their order differs."""
    start = next(i for i, pair in enumerate(zip(a.parts, b.parts, strict=True)) if len({*pair}) > 1)

    def text(x: Part) -> str:
        keys = [*x.parts][start:]
        shown = ["..."] * (start > 0) + keys[:_KEYS] + ["..."] * (len(keys) > _KEYS)
        return f"keys in the order {', '.join(shown)}"

    return text(a), text(b)


def _advised(found: Iterable[tuple[Difference, int]], instead: str) -> _Found:
    for difference, size in found:
        yield difference._replace(instead=instead), size


def _in_full(x: Description) -> str | None:
    """The full text of a few plain values, also in lists and tuples, such as static settings of an optimiser."""
    if isinstance(x, Array) or x.size > _FEW:
        return None
    if x.kind not in ("list", "tuple"):
        return None if x.parts else x.text
    inside = [_in_full(part) for part in x.parts.values()]
    if None in inside:
        return None
    texts = ", ".join(filter(None, inside))
    return f"[{texts}]" if x.kind == "list" else f"({texts}{',' * (len(inside) == 1)})"


def _difference(
    path: str, a: Description, b: Description, texts: Sequence[str] | None = None
) -> Difference:
    before, after = texts or (a.text, b.text)
    after += _ANOTHER if before == after else ""
    return Difference(path, before, after, cure(path, a, b))


def has_identity(fn: Any) -> bool:
    """Whether a callable is compared by identity, holds nothing that JAX can see, and can be weakly
    referenced. Any other is passed with the arguments of its calls."""
    kind = type(fn)
    return (
        kind.__eq__ is object.__eq__ and kind.__weakrefoffset__ != 0 and not jtu.is_tree_node(kind)
    )


def signature_of_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> Signature:
    """The signature of a call of a function under `filter_jit`, under the current settings.

    Args:
        fn: the function.
        args: the positional arguments of the call.
        kwargs: the keyword arguments.
        options: the options of `filter_jit`, by name.

    Returns:
        The signature. It keeps none of the arguments alive.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.transforms import signature_of_call
        >>> def f(x, n): ...
        >>> before = signature_of_call(f, (jnp.ones(2), 3), {})
        >>> after = signature_of_call(f, (jnp.ones(2), 4), {})
        >>> [str(difference) for difference in before.differences(after)]
        ['n: 3 -> 4']
    """
    parts = {name: describe(x) for name, x in _by_name(fn, args, kwargs).items()}
    if not has_identity(fn):
        parts = {callable_name(fn): describe(fn), **parts}
    for name, option in (options or {}).items():
        parts[f"filter_jit({name}=)"] = describe(option, static=True)
    for name in _SETTINGS:
        setting = getattr(jax.config, name, None)
        # Some settings are enumerations.
        parts[name] = Part(STATIC, repr(getattr(setting, "value", setting)), None)
    mesh = jax.sharding.get_abstract_mesh()
    parts[_MESH] = Part(STATIC, mesh_text(mesh), hash(mesh))
    return Signature(parts)


def _by_name(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the parameters that take them."""
    signature = signature_of(fn)
    if signature is None:
        return {f"args[{i}]": x for i, x in enumerate(args)} | dict(kwargs)
    try:
        named = signature.bind(*args, **kwargs).arguments
    except TypeError:
        # The call does not fit the function, which will raise its own error.
        return {f"args[{i}]": x for i, x in enumerate(args)} | dict(kwargs)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    return named
