"""`Module` with Equinox's rules: every field that is not static is a child, whatever it holds."""

import dataclasses
import inspect
import warnings
from typing import Any

from typing_extensions import dataclass_transform

from ....modules import BoundMethod as BoundMethod
from ....modules import Module as _VernalModule
from ....modules import ModuleMeta, end_construction, field
from ....modules import module_update_wrapper as module_update_wrapper


class _CountsVernals(type):
    """What `isinstance(cls, _ModuleMeta)` asks: Vernal's layers are Equinox's modules."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return issubclass(type(instance), ModuleMeta if cls is _ModuleMeta else cls)


# As `ModuleMeta`; type checkers do not inherit it.
@dataclass_transform(field_specifiers=(dataclasses.field, field), eq_default=False)
class _ModuleMeta(ModuleMeta, metaclass=_CountsVernals):
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


class Module(_VernalModule, metaclass=_ModuleMeta, layout="fields"):
    """`vernal.Module` with Equinox's rule: every field that is not static is a child."""


def is_abstract_module(cls: type[Any], /) -> bool:
    """Whether a class of modules cannot be instantiated.

    Args:
        cls: the class.

    Returns:
        True if it was declared abstract, or has abstract members that are not overridden.
    """
    return inspect.isabstract(cls) or cls._vernal_owes


class _Initialising:
    """What is told that the `__init__` of a module begins, and that it has returned. quax does so, and then converts
    and checks the module itself."""

    def add(self, module: Any, /) -> None:
        """Nothing: fields can be set until the module is frozen."""

    def remove(self, module: Any, /) -> None:
        """Freezes it."""
        end_construction(module)


_currently_initialising = _Initialising()


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
    """A value for the `strict=` argument of a class, as in Equinox.

    Args:
        force_abstact: whether the class is abstract (spelt as in Equinox).
        **kwargs: ignored, as in Equinox.

    Returns:
        None for an abstract class, otherwise False.
    """
    return None if force_abstact else False
