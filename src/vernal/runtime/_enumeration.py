"""`Enumeration`: result codes with messages, which compiled code can carry, choose and raise.

A member is a module with one int32 leaf, its position in the enumeration, and the enumeration
itself as structure. So it passes through every transformation, and the treedef keeps members of
different enumerations apart.
"""

import contextlib
import enum
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl

from ..modules import Module, field
from ..show import is_traced, message, short, type_error, value_error
from ..trees import is_array
from ._error_if import branched_error_if

RESERVED = ("where", "promote")


def _now(*values: Any) -> contextlib.AbstractContextManager[Any]:
    """A context that computes with known values at once, even during a trace."""
    if any(map(is_traced, values)):
        return contextlib.nullcontext()
    return jax.ensure_compile_time_eval()


def _name(enumeration: type) -> str:
    return f"{enumeration.__module__}.{enumeration.__qualname__}"


class EnumerationItem(Module):
    """A member of an `Enumeration`, or (under `vmap` and in batches) an array of members.

    Do not call this: enumerations make their members. Members of one enumeration compare by value,
    element by element. A single member that is not traced can be hashed.

    Args:
        _value: int32[...], the position of the member in its enumeration.
        _enumeration: the enumeration.
    """

    _value: Any
    _enumeration: Any = field(static=True)

    def is_traced(self) -> bool:
        """Whether the member is known only when a compiled program runs.

        Returns:
            True inside compiled functions, unless the member is a constant there.
        """
        return is_traced(self._value)

    def error_if(self, token: Any, pred: Any) -> Any:
        """Raises the member's message as an error when the program runs, if `pred` holds.

        Args:
            token: any tree with an array in it. The check runs only if the result is used.
            pred: a bool, or an array of them: the error is raised if any is true. For a batch of
                members it is broadcast to the batch.

        Returns:
            `token`.

        Raises:
            RuntimeCheckError: with the message of this member, when the program runs.

        Example:
            >>> import jax.numpy as jnp
            >>> from vernal.runtime import Enumeration
            >>> class Result(Enumeration):
            ...     ok = "all is well"
            ...     failed = "the solver did not converge"
            >>> Result.failed.error_if(jnp.array(1.0), False)
            Array(1., dtype=float32, weak_type=True)
        """
        if jnp.ndim(self._value):
            pred = jnp.broadcast_to(pred, self._value.shape)
        return branched_error_if(token, pred, self._value, self._enumeration._vernal_messages)

    def __eq__(self, other: Any) -> Any:
        if type(other) is not EnumerationItem or other._enumeration is not self._enumeration:
            raise value_error(
                "a member of an enumeration can only be compared with members of the same enumeration",
                where=f"comparison with a member of {_name(self._enumeration)}",
                expected=f"a member of {_name(self._enumeration)}",
                got=short(other),
                instead="`Child.promote(item)` for a member of a parent; `item in Enumeration` to ask "
                "whether it is a member",
            )
        with _now(self._value, other._value):
            if isinstance(self._value, np.ndarray) and isinstance(other._value, np.ndarray):
                # Single known members, as in the class: compared without compiling anything.
                return jax.device_put(np.asarray(self._value == other._value))
            return jnp.equal(self._value, other._value)

    def __ne__(self, other: Any) -> Any:
        equal = self == other
        with _now(equal):
            return jnp.logical_not(equal)

    def __hash__(self) -> int:
        if not is_array(self._value) or self.is_traced() or self._value.shape != ():
            raise type_error(
                "only a single member with a known value can be hashed",
                where=f"hash of a member of {_name(self._enumeration)}",
                expected="a member such as the attributes of the class",
                got=repr(self),
                instead="compare with `==`, or choose with `jax.lax.switch`",
            )
        return hash((self._enumeration, int(self._value)))

    def __repr__(self) -> str:
        return f"{_name(self._enumeration)}<{_text(self)}>"

    def __pdoc__(self, **kwargs: Any) -> Any:
        return wl.TextDoc(repr(self))


def _text(item: EnumerationItem) -> str:
    """The message of a member, or those of a batch of members as a list."""
    messages, value = item._enumeration._vernal_messages, item._value
    if is_traced(value):
        return "traced"
    try:
        codes = np.asarray(value)
    except Exception:
        # Deleted, or sharded over other processes.
        return "unknown"
    if not np.issubdtype(codes.dtype, np.integer):
        # `jax.tree.map` may have put anything in its place.
        return "unknown"
    texts = np.full(codes.shape, "unknown", object)
    for index, text in enumerate(messages):
        texts[codes == index] = text
    return texts.item() if texts.shape == () else str(texts)


def _messages(
    name: str, bases: tuple[type, ...], own: dict[str, Any]
) -> tuple[dict[str, int], list[str]]:
    """The positions of all members by name, and their messages; members of the parents come first."""
    index: dict[str, int] = {}
    messages: list[str] = []
    inherited = [
        (key, base._vernal_messages[i])
        for base in bases
        for key, i in getattr(base, "_vernal_index", {}).items()
    ]
    for key, text in (*inherited, *own.items()):
        if key not in index:
            index[key] = len(messages)
            messages.append(text)
        elif messages[index[key]] != text:
            warnings.warn(
                f"the enumeration {name} has two messages for `{key}`, {messages[index[key]]!r} and "
                f"{text!r}: the last one is used",
                stacklevel=4,
            )
            messages[index[key]] = text
    return index, messages


def _check_members(name: str, own: dict[str, Any]) -> None:
    for key, text in own.items():
        if key in RESERVED:
            raise value_error(
                f"`{key}` is a method of every enumeration and cannot be a member",
                where=f"class {name}",
                expected="a name other than " + " and ".join(map(repr, RESERVED)),
                got=f"{key} = {text!r}",
                instead=f"{key}_ = {text!r}",
            )
        if not isinstance(text, str):
            raise value_error(
                "a member of an enumeration must be declared by its message",
                where=f"{name}.{key}",
                expected="a string",
                got=short(text),
                instead=f'{key} = "what happened"',
            )


if TYPE_CHECKING:
    # To a type checker a member is an instance of its enumeration, as in the standard library, so
    # `def f() -> Result: return Result.ok` is right. (It then also assumes that an enumeration with
    # members has no children; and mypy, that `Result[item]` takes a name.)
    class EnumerationMeta(enum.EnumMeta):
        def __getitem__(cls, item: Any) -> str: ...  # pyright: ignore[reportIncompatibleMethodOverride] (by name there)

    class Enumeration(enum.Enum, metaclass=EnumerationMeta):
        _value: Any
        _enumeration: Any

        @classmethod
        def where(cls, pred: Any, a: Any, b: Any) -> Any: ...
        @classmethod
        def promote(cls, item: Any) -> Any: ...
        def error_if(self, token: Any, pred: Any) -> Any: ...
        def is_traced(self) -> bool: ...
        def __eq__(self, other: Any) -> Any: ...
        def __ne__(self, other: Any) -> Any: ...
        def __hash__(self) -> int: ...
else:

    class EnumerationMeta(type):
        """The metaclass of `Enumeration`: turns messages into members."""

        def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
            if not bases:
                return super().__new__(mcs, name, bases, namespace)
            own = {
                key: text
                for key, text in namespace.items()
                if not (key.startswith("__") and key.endswith("__"))
            }
            _check_members(namespace["__qualname__"], own)
            index, messages = _messages(namespace["__qualname__"], bases, own)
            entries = "\n".join(f"- `{key}`: {messages[i]}" for key, i in index.items())
            doc = namespace.get("__doc__") or "An enumeration."
            rest = {key: value for key, value in namespace.items() if key not in own}
            rest |= {
                "__doc__": f"{doc}\n\nMembers:\n\n{entries}",
                "_vernal_index": index,
                "_vernal_messages": messages,
            }
            cls = super().__new__(mcs, name, bases, rest)
            for key, i in index.items():
                type.__setattr__(cls, key, EnumerationItem(np.array(i, np.int32), cls))
            return cls

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            raise type_error(
                "an enumeration cannot be instantiated",
                where=f"{_name(cls)}(...)",
                expected="one of " + ", ".join(cls._vernal_index),
                got="a call of the class",
                instead=f"`{cls.__name__}.name` for a member, `{cls.__name__}[item]` for its message",
            )

        def __setattr__(cls, name: str, value: Any) -> None:
            if name in cls._vernal_index:
                raise AttributeError(
                    message(
                        "the members of an enumeration are fixed",
                        where=f"{_name(cls)}.{name}",
                        expected="no assignment",
                        got=short(value),
                        instead=f"class New({cls.__name__}): ...",
                    )
                )
            super().__setattr__(name, value)

        def __instancecheck__(cls, item: Any) -> bool:
            return type(item) is EnumerationItem and item._enumeration is cls

        def __contains__(cls, item: Any) -> bool:
            return isinstance(item, cls)

        def __len__(cls) -> int:
            return len(cls._vernal_messages)

        def __iter__(cls) -> Iterator[EnumerationItem]:
            return (getattr(cls, name) for name in cls._vernal_index)

        def __bool__(cls) -> bool:
            # Otherwise Python would use the length, and an empty enumeration would be false.
            return True

        def __getitem__(cls, item: Any) -> str:
            _check_member(cls, f"{cls.__name__}[item]", item)
            return _text(item)

    class Enumeration(metaclass=EnumerationMeta):
        """Result codes with messages, for use inside compiled programs.

        Declare members as `name = "message"`. A member is a pytree with one int32 array, so it can be
        returned from `jit`, batched by `vmap`, carried by `scan`. `len(cls)` is the number of members,
        `list(cls)` the members, `cls[item]` the message of a member (`"traced"` if it is not known yet;
        of a batch, the messages of its elements), `item in cls` whether it is a member. `==` and `!=`
        compare members of one enumeration. The result is a bool array, which is known at once if both
        members are.

        A child class has the members of its parents, then its own. A name with two messages keeps the
        last one, with a warning. `where` and `promote` cannot be names of members.

        Raises:
            ValueError: at class creation, for a reserved name or a message that is not a string; in
                `cls[item]`, `==` and `!=`, for anything but a member of the same enumeration.
            TypeError: if the class is called.
            AttributeError: if a member is assigned to.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from vernal.runtime import Enumeration
            >>> class Result(Enumeration):
            ...     ok = "all is well"
            ...     failed = "the solver did not converge"
            >>> @jax.jit
            ... def check(x):
            ...     return Result.where(jnp.isfinite(x), Result.ok, Result.failed)
            >>> check(jnp.inf) == Result.failed
            Array(True, dtype=bool)
            >>> Result[jax.vmap(check)(jnp.array([1.0, jnp.nan]))]
            "['all is well' 'the solver did not converge']"
        """

        _vernal_index: dict[str, int] = {}
        _vernal_messages: list[str] = []

        @classmethod
        def where(cls, pred: Any, a: Any, b: Any) -> Any:
            """One of two members, chosen by a scalar.

            Args:
                pred: a bool, or an array of one.
                a: a member of this enumeration, or a batch of them.
                b: another.

            Returns:
                `a` if `pred` holds, else `b`. It is known at once if `pred` is.

            Raises:
                ValueError: if `a` or `b` is not a member, or `pred` is not a scalar bool.
            """
            _check_member(cls, f"{cls.__name__}.where", a, b)
            if not isinstance(pred, bool) and not (
                is_array(pred) and pred.shape == () and pred.dtype == bool
            ):
                raise value_error(
                    f"the predicate of {cls.__name__}.where must be a scalar bool",
                    where="argument `pred`",
                    expected="bool[], or a Python bool",
                    got=short(pred),
                    instead=f"jax.vmap({cls.__name__}.where, in_axes=(0, None, None))(pred, a, b)",
                )
            if a._value is b._value:
                return a
            with _now(pred):
                if not is_traced(pred) and jnp.shape(a._value) == jnp.shape(b._value):
                    return a if pred else b
            with _now(pred, a._value, b._value):
                return EnumerationItem(jnp.where(pred, a._value, b._value), cls)

        @classmethod
        def promote(cls, item: Any) -> Any:
            """Converts a member of a parent to the member of this enumeration with the same name.

            Args:
                item: a member, or a batch of members, of an enumeration that this one inherits
                    from.

            Returns:
                The member of this enumeration that has the same name.

            Raises:
                ValueError: if `item` is anything else.
            """
            parent = item._enumeration if type(item) is EnumerationItem else None
            if parent is None or parent is cls or not issubclass(cls, parent):
                raise value_error(
                    f"only members of a parent enumeration can be promoted to {cls.__name__}",
                    where=f"{cls.__name__}.promote",
                    expected="a member of a parent of " + _name(cls),
                    got=short(item),
                    instead=f"class {cls.__name__}(Parent): ...",
                )
            value = item._value
            with _now(value):
                # Selections rather than a table: indexing one would gather a batch that is sharded
                # over devices. With a single parent the positions do not change.
                for i, name in enumerate(parent._vernal_index):
                    j = cls._vernal_index[name]
                    if i != j:
                        value = jnp.where(item._value == np.int32(i), np.int32(j), value)
            return EnumerationItem(value, cls)


def _check_member(cls: Any, where: str, *items: Any) -> None:
    for item in items:
        if not isinstance(item, cls):
            raise value_error(
                f"not a member of the enumeration {_name(cls)}",
                where=where,
                expected=f"a member of {_name(cls)}",
                got=short(item),
                instead=f"`{cls.__name__}.promote(item)` for a member of a parent",
            )
