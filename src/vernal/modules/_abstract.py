"""Abstract attributes: `AbstractVar`, `AbstractClassVar`, and those that a class does not provide yet."""

import re
import typing
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from ..show import type_error
from ._lazy import LazyChild

_T = TypeVar("_T")

# With postponed evaluation (`from __future__ import annotations`) annotations arrive as text.
_BARE_TEXT = re.compile(r"^\s*(?:\w+\.)*(AbstractVar|AbstractClassVar)\s*$")
_AS_TEXT = re.compile(r"^\s*(?:\w+\.)*(AbstractVar|AbstractClassVar)\s*\[")


class _Subscripted:
    """What `AbstractVar[T]` and `AbstractClassVar[T]` evaluate to."""

    def __init__(self, kind: str, item: Any):
        self.kind = kind
        self.item = item

    def __repr__(self) -> str:
        return f"{self.kind}[{self.item!r}]"


if TYPE_CHECKING:
    AbstractVar = Annotated[_T, "AbstractVar"]
    from typing import ClassVar as AbstractClassVar
else:

    class AbstractVar:
        """An abstract instance attribute: subclasses must provide it as a field, a property or a
        class attribute.

        Example:
            >>> import vernal
            >>> class Shape(vernal.Module):
            ...     sides: vernal.AbstractVar[int]
            >>> class Square(Shape):
            ...     sides: int = 4
            >>> Square().sides
            4
        """

        def __class_getitem__(cls, item: Any) -> Any:
            return _Subscripted("AbstractVar", item)

    class AbstractClassVar:
        """An abstract class attribute: subclasses must give it a value on the class.

        Example:
            >>> from typing import ClassVar
            >>> import vernal
            >>> class Solver(vernal.Module):
            ...     order: vernal.AbstractClassVar[int]
            >>> class Euler(Solver):
            ...     order: ClassVar[int] = 1
            >>> Euler.order
            1
        """

        def __class_getitem__(cls, item: Any) -> Any:
            return _Subscripted("AbstractClassVar", item)


def _kind(annotation: Any) -> str | None:
    if isinstance(annotation, _Subscripted):
        return annotation.kind
    if isinstance(annotation, str):
        found = _AS_TEXT.match(annotation)
        return found.group(1) if found else None
    return None


def _unsubscripted(annotation: Any) -> str | None:
    if annotation is AbstractVar or annotation is AbstractClassVar:
        return annotation.__name__
    found = _BARE_TEXT.match(annotation) if isinstance(annotation, str) else None
    return found.group(1) if found else None


def take_abstract(class_name: str, namespace: dict[str, Any]) -> dict[str, str]:
    """Removes abstract annotations from a class body (so that they make no dataclass field) and
    returns `{name: kind}`."""
    annotations = namespace.get("__annotations__", {})
    taken: dict[str, str] = {}
    for name, annotation in list(annotations.items()):
        bare = _unsubscripted(annotation)
        if bare is not None:
            raise type_error(
                "an abstract attribute was declared with an unsubscripted annotation",
                where=f"{class_name}.{name}",
                expected=f"{bare}[SomeType]",
                got=bare,
                instead=f"{name}: {bare}[Any]",
            )
        kind = _kind(annotation)
        if kind is None:
            continue
        if name in namespace:
            raise type_error(
                "an abstract attribute cannot have a value",
                where=f"{class_name}.{name}",
                expected=f"{name}: {kind}[...]",
                got=f"{name}: {kind}[...] = ...",
                instead="give the value in the subclass that implements it, or declare an ordinary field",
            )
        taken[name] = kind
        del annotations[name]
    return taken


def owed(cls: type, by_field: bool) -> dict[str, str]:
    """The abstract attributes that `cls` does not provide yet: `{name: kind}`. `by_field` says whether an instance
    field may provide a class attribute."""
    names: dict[str, str] = {}
    for klass in cls.__mro__:
        for name, kind in klass.__dict__.get("_own_abstract", {}).items():
            # If any class declares it as a class variable, it must be one.
            names[name] = (
                "AbstractClassVar" if "AbstractClassVar" in (kind, names.get(name)) else kind
            )
    return {name: kind for name, kind in names.items() if not _provided(cls, name, kind, by_field)}


def _provided(cls: type, name: str, kind: str, by_field: bool) -> bool:
    for klass in cls.__mro__:
        if name in klass.__dict__.get("_own_abstract", {}):
            return False
        if name in klass.__dict__ and type(klass.__dict__[name]) is not LazyChild:
            return True
        annotation = klass.__dict__.get("__annotations__", {}).get(name)
        if annotation is None:
            continue
        if kind == "AbstractVar" or by_field:
            return True
        # A bare annotation does not give a class attribute a value, unless it hides the abstract one
        # as a ClassVar.
        if typing.get_origin(annotation) is typing.ClassVar or "ClassVar" in str(annotation):
            return True
    return False
