"""`Module`: a class whose instances are immutable trees of arrays.

The metaclass turns a class body into a dataclass, registers it with JAX, and finishes every
instance when its construction ends (see `_building.py`). Flattening reads the instance's
`__dict__` through its `Structure`; unflattening makes a bare object and fills its `__dict__`.
Neither ever runs user code.
"""

import abc
import dataclasses
import functools
import inspect
import re
import types
import typing
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, Union

import jax.tree_util as jtu
from typing_extensions import dataclass_transform

from .._ground import frozen
from ..show import tree_pformat
from ..trees import by_name
from . import _refusals as refuse
from ._abstract import owed, take_abstract
from ._attributes import attributes_of
from ._building import NUMBERS, ClassInfo, check_declared, check_new, finish
from ._calls import telling
from ._equality import equal_arrays, hashed
from ._fields import array_dtype_for, field, resolve_annotation
from ._lazy import unflattened
from ._marks import freeze_fields
from ._methods import as_method
from ._sorting import Kind, is_data, sort_again
from ._strict import check_strict
from ._structure import KEY, assemble, layout_of, structure_of
from ._torch_names import WithHints

# Every class of modules. (JAX's registry of pytrees keeps them alive as well.)
module_classes: set[type] = set()

_CLASS_VAR = re.compile(r"\s*(?:\w+\.)*ClassVar\b")


def _flatten(module: Any) -> tuple[tuple[Any, ...], Any]:
    values = attributes_of(module)
    try:
        aux = values[KEY]
        # In two steps, because Python 3.11 calls a function that is kept in a slot more slowly in one.
        flatten = aux[0].flatten
        return flatten(values), aux
    except KeyError:
        return _flatten_unready(module)


def _flatten_unready(module: Any) -> tuple[tuple[Any, ...], Any]:
    """Flattens a module that is lazy, inside its own `__init__`, made without it, or changed despite every guard."""
    values = unflattened(module)
    if KEY in values:
        layout = values[KEY][0].layout
        aux = values[KEY] = structure_of(layout, values).aux
    else:
        # The fields set so far: all children except the static ones.
        named = type(module)._vernal_class.filled().named
        kinds: dict[str, Kind] = {name: not static for name, static in named if name in values}
        aux = structure_of(layout_of(type(module), kinds), values).aux
    return aux[0].flatten(values), aux


def _flatten_with_keys(module: Any) -> tuple[tuple[Any, ...], Any]:
    children, structure = _flatten(module)
    return tuple(zip(structure[0].layout.keys, children, strict=True)), structure


def _unflatten(structure: Any, children: Any) -> Any:
    # In two steps, because Python 3.11 calls a function that is kept in a slot more slowly in one.
    make = structure[0].make
    return make(children)


def _writes_init(cls: type) -> bool:
    """Whether the `__init__` in effect was written by hand, on `cls` or on a base."""
    for klass in cls.__mro__[:-1]:
        if "__init__" in klass.__dict__:
            return not klass.__dict__.get("_vernal_generated_init", False)
    return False


def _check_defaults(cls: type, namespace: dict[str, Any]) -> None:
    for name, annotation in namespace.get("__annotations__", {}).items():
        if typing.get_origin(annotation) is ClassVar or annotation is ClassVar:
            continue
        if isinstance(annotation, str) and _CLASS_VAR.match(annotation):
            continue
        default = namespace.get(name, None)
        if isinstance(default, dataclasses.Field):
            default = default.default
        if type(default).__hash__ is None and not isinstance(default, dataclasses.Field):
            raise refuse.mutable_default(cls.__qualname__, name, default)


def _accept_unconverted(cls: Any) -> None:
    """Annotates the generated `__init__` with the types it takes, which may differ from the types of the fields."""
    annotations = cls.__init__.__annotations__
    for f in dataclasses.fields(cls):
        if f.name not in annotations:
            continue
        converter = f.metadata.get("converter")
        if converter is not None:
            annotations[f.name] = _first_parameter(converter)
            continue
        annotation = resolve_annotation(cls, f.name, f.type)
        if annotation is not None and array_dtype_for(annotation, 1) is not None:
            annotations[f.name] = Union[annotation, bool, int, float, complex]  # noqa: UP007 (string-free)


def _first_parameter(converter: Any) -> Any:
    try:
        first = next(iter(inspect.signature(converter).parameters.values()))
    except (ValueError, TypeError, StopIteration):
        return Any
    return Any if first.annotation is inspect.Parameter.empty else first.annotation


def _make_dataclass(cls: Any) -> None:
    custom = _writes_init(cls)
    if custom and "__post_init__" in cls.__dict__ and "__init__" in cls.__dict__:
        warnings.warn(
            f"{cls.__module__}.{cls.__qualname__} defines both `__init__` and `__post_init__`: "
            "`__post_init__` will not be called",
            stacklevel=4,
        )
    inherited_doc = getattr(cls.__init__, "__doc__", None)
    dataclasses.dataclass(eq=False, repr=False, init=not custom)(cls)
    cls._vernal_generated_init = not custom
    if not custom:
        cls.__init__.__doc__ = inherited_doc
        _accept_unconverted(cls)


def _is_transparent(bases: tuple[type, ...], namespace: dict[str, Any]) -> bool:
    """Whether a new class wraps functions: its instances are not layers, and binding their calls would be too slow."""
    return "_vernal_may_hide_arrays" in namespace or any(
        getattr(base, "_vernal_may_hide_arrays", False) for base in bases
    )


# Not `frozen_default`: type checkers would then refuse `self.x = ...` in a hand-written `__init__`.
@dataclass_transform(field_specifiers=(dataclasses.field, field), eq_default=False)
class ModuleMeta(abc.ABCMeta):
    """The metaclass of `Module`."""

    _vernal_class: ClassInfo
    _vernal_owes: bool
    __abstractvars__: frozenset[str]
    __abstractclassvars__: frozenset[str]

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        *,
        layout: str | None = None,
        strict: bool | None = None,
        is_abstract: bool = False,
        **kwargs: Any,
    ) -> Any:
        if layout not in (None, "arrays", "fields"):
            raise refuse.unknown_layout(name, layout)
        namespace = dict(namespace)
        namespace["_own_abstract"] = take_abstract(name, namespace)
        declared = namespace.get("__annotations__", {})
        plain = {"__call__"} if _is_transparent(bases, namespace) else ()
        if "__call__" in namespace and not plain:
            namespace["__call__"] = telling(namespace["__call__"])
        namespace = {k: as_method(k, value, declared, plain) for k, value in namespace.items()}
        cls: Any = super().__new__(mcs, name, bases, namespace, **kwargs)
        inherited = next((b for b in cls.__mro__[1:] if "_vernal_class" in b.__dict__), None)
        if layout is None and inherited is not None:
            layout = "fields" if inherited._vernal_class.every_field_is_child else "arrays"
        _check_defaults(cls, namespace)
        _make_dataclass(cls)
        cls._vernal_class = ClassInfo(cls, layout == "fields")
        # With Equinox's rule a field may stand for a class variable.
        owes = owed(cls, by_field=layout == "fields")
        cls.__abstractvars__ = frozenset(n for n, k in owes.items() if k == "AbstractVar")
        cls.__abstractclassvars__ = frozenset(n for n, k in owes.items() if k == "AbstractClassVar")
        cls._vernal_is_abstract = is_abstract
        cls._vernal_owes = bool(is_abstract or cls.__abstractvars__ or cls.__abstractclassvars__)
        check_strict(cls, strict)
        module_classes.add(cls)
        jtu.register_pytree_with_keys(cls, _flatten_with_keys, _unflatten, _flatten)
        return cls

    # No return annotation: pyright would believe it instead of reading `__init__`.
    def __call__(cls, *args: Any, **kwargs: Any):
        if cls._vernal_owes:
            raise refuse.owing(cls)
        try:
            module = super().__call__(*args, **kwargs)
        except TypeError as error:
            refuse.note_arguments(cls, error)
            raise
        if type(module) is cls:
            values = attributes_of(module)
            if KEY not in values:
                finish(module, values, cls._vernal_class)
        return module

    def __setattr__(cls, name: str, value: Any) -> None:
        if type(value) is types.FunctionType:
            fields = getattr(cls, "__dataclass_fields__", ())
            value = as_method(name, value, cls.__dict__.get("__annotations__", ()), fields)
        super().__setattr__(name, value)

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def register(cls, subclass: Any) -> Any:
        raise refuse.virtual_subclass(cls, subclass)


class Module(WithHints, metaclass=ModuleMeta):
    """Base class of models: a frozen dataclass that is a tree of arrays.

    Declare fields as in a dataclass and write methods as in any class. Instances are immutable pytrees:
    arrays, modules and other pytrees are children; everything else, such as an activation function, a
    name or a size, is structure and travels in the treedef. So every JAX transformation accepts a
    module directly. An error raised in the call of a nested module carries a note:
    `Raised in model.blocks[2].linear (Model > Block > Linear)`.

    Class options:
        layout: `"arrays"` (default) sorts fields by their values, as above. `"fields"` makes every
            field that is not `static=True` a child, whatever it holds. Inherited.
        strict: `True` enforces "abstract or final": a class that can be instantiated is never
            subclassed, and no method is overridden once it is implemented. Inherited.
        is_abstract: `True` forbids instances of this class (not of its subclasses).

    Raises:
        TypeError: at construction, for a field without a value or an abstract attribute that is
            not provided.
        ValueError: at construction, for an array in a static field, a method of the module
            assigned to itself, a cycle, or arrays hidden in a function; at class creation, for a
            mutable default.
        dataclasses.FrozenInstanceError: for assigning or deleting an attribute after construction.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> class Neuron(vernal.Module):
        ...     weight: jax.Array
        ...     activation: object = jax.nn.relu
        ...     def __call__(self, x):
        ...         return self.activation(self.weight @ x)
        >>> neuron = Neuron(jnp.array([1.0, -2.0]))
        >>> jax.jit(neuron)(jnp.array([3.0, 1.0]))
        Array(1., dtype=float32)
        >>> jax.tree.leaves(neuron)
        [Array([ 1., -2.], dtype=float32)]
    """

    if not TYPE_CHECKING:
        # Hidden from type checkers: they would otherwise allow assignment to any attribute.

        @property
        def __dict__(self) -> dict[str, Any]:
            return unflattened(self)

        def __setattr__(self, name: str, value: Any) -> None:
            values = attributes_of(self)
            if KEY in values:
                if name == "__orig_class__":
                    # The note that `typing` puts on the result of `G[int](...)` is not part of the structure.
                    values[name] = value
                    return
                raise dataclasses.FrozenInstanceError(refuse.frozen(type(self), name, "assign"))
            info = type(self)._vernal_class
            if name not in info.declared:
                check_declared(info, name)
            if type(value) in NUMBERS and name not in info.converted:
                value = info.as_array(name, value)
            values[name] = value

        def __delattr__(self, name: str) -> None:
            raise dataclasses.FrozenInstanceError(refuse.frozen(type(self), name, "delete"))

    def __hash__(self) -> int:
        # By structure, shapes and dtypes: never by array values. Equal modules have equal hashes.
        leaves, treedef = jtu.tree_flatten(self)
        return hash((type(self), treedef, tuple(map(hashed, leaves))))

    def __eq__(self, other: Any) -> Any:
        if self is other:
            return True
        if type(self) is not type(other):
            return False
        leaves, treedef = jtu.tree_flatten(self)
        other_leaves, other_treedef = jtu.tree_flatten(other)
        if treedef != other_treedef:
            return False
        if all(a is b for a, b in zip(leaves, other_leaves, strict=True)):
            return True
        return equal_arrays(self, other)

    def __repr__(self) -> str:
        return tree_pformat(self)

    def __reduce__(self) -> Any:
        current = unflattened(self)
        kinds = current[KEY][0].layout.kinds
        values = {name: by_name(current[name]) for name in kinds}
        return assemble, (type(self), kinds, values)

    def __copy__(self) -> Any:
        # An immutable object is its own copy.
        return self

    def __tree_fields__(self) -> dict[str, Any]:
        """The fields that surgery may reach: those not declared static, with their values."""
        info = type(self)._vernal_class.filled()
        values = unflattened(self)
        return {name: values[name] for name, static in info.named if not static and name in values}

    def __tree_replace__(self, changes: dict[str, Any], sort: bool = True) -> Any:
        """A copy with some fields replaced and, if `sort`, sorted afresh. No `__init__`, no checks."""
        info = type(self)._vernal_class.filled()
        current = unflattened(self)
        kinds = dict(current[KEY][0].layout.kinds)
        values = {name: current[name] for name in kinds}
        for name, value in changes.items():
            if sort and type(value) in NUMBERS and (kinds[name] is False or is_data(values[name])):
                value = info.as_array(name, value)
            if sort and not info.every_field_is_child:
                kinds[name] = sort_again(values[name], kinds[name], value)
                if kinds[name] is not True and value is not values[name]:
                    check_new(info, name, value)
            values[name] = frozen(value) if kinds[name] is False else value
        if sort and info.buffers:
            kinds = freeze_fields(type(self), kinds, values, info.buffers)
        return assemble(type(self), kinds, values)


_WRAPPER_NAMES = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


def module_update_wrapper(wrapper: Any, wrapped: Any = None) -> Any:
    """`functools.update_wrapper` for a module: copies the name, the documentation and the signature of
    what it wraps.

    Args:
        wrapper: a module whose class defines the property `__wrapped__`.
        wrapped: the object to copy them from. Default: `wrapper.__wrapped__`.

    Returns:
        A copy of `wrapper` with `__module__`, `__name__`, `__qualname__`, `__doc__` and
        `__annotations__` of `wrapped`. They are structure, and stay with the module through every
        transformation.

    Raises:
        TypeError: if the class of `wrapper` has no property `__wrapped__`.

    Example:
        >>> import vernal
        >>> class Twice(vernal.Module):
        ...     fn: object
        ...     @property
        ...     def __wrapped__(self):
        ...         return self.fn
        ...     def __call__(self, x):
        ...         return 2 * self.fn(x)
        >>> def add_one(x):
        ...     "Adds one."
        ...     return x + 1
        >>> twice = vernal.module_update_wrapper(Twice(add_one))
        >>> twice.__name__, twice.__doc__, twice(1)
        ('add_one', 'Adds one.', 4)
    """
    cls: Any = type(wrapper)
    if not isinstance(
        inspect.getattr_static(cls, "__wrapped__", None), (property, functools.cached_property)
    ):
        raise refuse.no_wrapped(cls)
    source = wrapper.__wrapped__ if wrapped is None else wrapped
    current = unflattened(wrapper)
    kinds = dict(current[KEY][0].layout.kinds)
    values = {name: current[name] for name in kinds}
    for name in _WRAPPER_NAMES:
        if hasattr(source, name):
            values[name] = getattr(source, name)
            kinds[name] = False
    return assemble(cls, kinds, values)
