"""What makes a class of Vernal's a layer of Equinox's."""

import dataclasses
from typing import Any

from typing_extensions import dataclass_transform

from ....modules import field
from .._module._module import _ModuleMeta


def _native(cls: type) -> type | None:
    """The layer of `vernal.nn` that a layer of `equinox.nn` is made of."""
    return next(
        (b for b in cls.__bases__ if b.__module__ == "vernal.nn" and b.__name__ == cls.__name__),
        None,
    )


# As `ModuleMeta`; type checkers do not inherit it.
@dataclass_transform(field_specifiers=(dataclasses.field, field), eq_default=False)
class LayerMeta(_ModuleMeta):
    """Counts layers of `vernal.nn` as instances of the classes here: a check for `Linear` means both."""

    def __instancecheck__(cls, instance: Any) -> bool:  # pyright: ignore[reportSelfClsParameterName]
        return super().__instancecheck__(instance) or _native(cls) in type(instance).__mro__

    def __subclasscheck__(cls, subclass: type) -> bool:  # pyright: ignore[reportSelfClsParameterName]
        return super().__subclasscheck__(subclass) or _native(cls) in subclass.__mro__
