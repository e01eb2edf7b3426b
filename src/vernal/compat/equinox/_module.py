"""`Module` with Equinox's rules: every field that is not static is a child, whatever it holds."""

import dataclasses
import warnings
from typing import Any

from typing_extensions import dataclass_transform

from ...modules import Module as _VernalModule
from ...modules import ModuleMeta, field


# As `ModuleMeta`; type checkers do not inherit it.
@dataclass_transform(field_specifiers=(dataclasses.field, field), eq_default=False)
class _Meta(ModuleMeta):
    """Takes Equinox's arguments of a class, and counts Vernal's own modules as instances."""

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        *,
        strict: bool | None = False,
        is_abstract: bool = False,
        **kwargs: Any,
    ) -> Any:
        # `strict=True` is only a convention in Equinox; None is what its `StrictConfig` says of an abstract class.
        return super().__new__(
            mcs, name, bases, namespace, is_abstract=is_abstract or strict is None, **kwargs
        )

    def __instancecheck__(cls, instance: Any) -> bool:
        if cls is Module:
            return _VernalModule in type(instance).__mro__
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls is Module:
            return _VernalModule in subclass.__mro__
        return super().__subclasscheck__(subclass)


class Module(_VernalModule, metaclass=_Meta, layout="fields"):
    """`vernal.Module` with Equinox's rule: every field that is not static is a child."""


def static_field(**kwargs: Any) -> Any:
    """Equinox's old spelling of `field(static=True)`.

    Args:
        **kwargs: as for `field`.

    Returns:
        The field.
    """
    warnings.warn("`static_field` is deprecated: write `field(static=True)`", stacklevel=2)
    return field(**kwargs, static=True)


def StrictConfig(force_abstact: bool = False, **kwargs: Any) -> bool | None:
    """What `strict=` of a class takes in Equinox.

    Args:
        force_abstact: whether the class is abstract (spelt as in Equinox).
        **kwargs: ignored, as there.

    Returns:
        None for an abstract class, else False.
    """
    return None if force_abstact else False
