"""What stands in a snapshot for an object that the snapshot may not keep alive.

An address alone will not do: when the object is gone, another one can be given the same.
"""

import types
import weakref
from typing import Any


class Weak:
    """An object that may not be kept alive. Equal to another one if both are of the same living
    object, or of two that are equal by their own rule."""

    __slots__ = ("hash", "own_rule", "ref")

    def __init__(self, value: Any, own_rule: bool = False):
        self.ref = weakref.ref(value)
        self.own_rule = own_rule
        self.hash = hash(value) if own_rule else id(value)

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if type(other) is not Weak or self.own_rule is not other.own_rule:
            return False
        a, b = self.ref(), other.ref()
        if a is None or b is None:
            return False
        return a is b or (self.own_rule and type(a) is type(b) and (a == b) is True)

    def __hash__(self) -> int:
        return self.hash


class Code:
    """Code, with a quicker hash than that of all its constants and names."""

    __slots__ = ("code",)

    def __init__(self, code: types.CodeType):
        self.code = code

    def __eq__(self, other: Any) -> bool:
        return type(other) is Code and (self.code is other.code or self.code == other.code)

    def __hash__(self) -> int:
        return hash((self.code.co_name, self.code.co_firstlineno))


class Namespace:
    """The global variables of a function that is in no module. Dictionaries cannot be referred to
    weakly; while the function lives, so do they."""

    __slots__ = ("id", "owner")

    def __init__(self, owner: types.FunctionType):
        self.id = id(owner.__globals__)
        self.owner = weakref.ref(owner)

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        alive = type(other) is Namespace and None not in (self.owner(), other.owner())
        return alive and self.id == other.id

    def __hash__(self) -> int:
        return self.id


class Snapshot:
    """What a function was made of. Equal to that of a function that does the same."""

    __slots__ = ("hash", "parts")

    def __init__(self, parts: Any):
        self.parts = parts
        self.hash = hash(parts)

    def __eq__(self, other: Any) -> bool:
        return self is other or (
            type(other) is Snapshot and self.hash == other.hash and self.parts == other.parts
        )

    def __hash__(self) -> int:
        return self.hash
