"""A call of a factory as a value: settings, some of them leaves, that can be replaced.

Such a value may itself be a setting: schedules of optimisers, optimisers of optimisers. `replace` finds a setting at
any depth.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax.tree_util as jtu

from ..modules import Module, Static, field
from ..transforms import Recipe
from ._factory import factory_of
from ._refusals import refuse_a_model_first, refuse_axes, refuse_other_trees, refuse_settings
from ._settings import as_settings, is_structure, on_the_same_side
from ._trials import try_building
from ._whole import Whole, optax_promotes


def _is_call(x: Any) -> bool:
    return isinstance(x, FactoryCall)


def _is_opened(x: Any) -> bool:
    return isinstance(x, (FactoryCall, Static, Whole)) or _is_closure(x)


def _is_closure(x: Any) -> bool:
    """Whether a setting is a function whose closed-over arrays were made leaves."""
    return isinstance(getattr(x, "recipe", None), Recipe)


def _opened(x: Any) -> Any:
    """What is passed to the factory for a part of a setting."""
    if isinstance(x, FactoryCall):
        return x._as_setting()
    if isinstance(x, Static):
        return x.value
    if _is_closure(x):
        # Optax would treat a function that is a pytree as a tree, of masks for example.
        return x.__wrapped__
    return x() if isinstance(x, Whole) else x


class FactoryCall(Module):
    """A factory and its settings."""

    _vernal_instead: ClassVar[str] = "new = old.replace({name}=...)"

    factory: Callable[..., Any]
    settings: dict[str, Any]
    structure: tuple[tuple[str, Any], ...] = field(static=True)

    def __init__(self, factory: Callable[..., Any], /, *args: Any, **settings: Any):
        kind = type(self).__name__
        refuse_a_model_first(kind, factory, args)
        known = factory_of(factory)
        given = known.by_name(args, settings)
        refuse_settings(kind, factory, {n: x for n, x in given.items() if not _is_opened(x)})
        values = as_settings(known.row, given)
        self.factory = factory
        self.settings = {n: value for n, value in values.items() if not is_structure(value)}
        self.structure = tuple((n, value) for n, value in values.items() if is_structure(value))

    def __check_init__(self):
        try_building(self, type(self).build)

    def build(self) -> Any:
        """Calls the factory with the settings.

        Returns:
            What the factory returns.
        """
        opened = jtu.tree_map(_opened, self.settings, is_leaf=_is_opened)
        values = {**dict(self.structure), **opened}
        if isinstance(labels := values.get("param_labels"), Module):
            # Optax would call them, as a function that makes labels.
            values["param_labels"] = lambda params: labels
        args, kwargs = factory_of(self.factory).arguments(values)
        with optax_promotes():
            return self.factory(*args, **kwargs)

    def _refuse_axes(self) -> None:
        """Raises `ValueError` if a number among the settings, nested ones too, has an axis."""
        refuse_axes(self.factory, factory_of(self.factory).row, self.settings)
        for nested in jtu.tree_leaves(self.settings, is_leaf=_is_call):
            if _is_call(nested):
                nested._refuse_axes()

    def _refuse_trees(self, params: Any, error: Exception) -> None:
        """Raises `ValueError` if a mask or labels among the settings, nested ones too, do not fit the parameters, which
        is why Optax raised `error`."""
        values = {
            **dict(self.structure),
            **jtu.tree_map(_opened, self.settings, is_leaf=_is_opened),
        }
        refuse_other_trees(self.factory, values, params, error)
        for nested in jtu.tree_leaves(self.settings, is_leaf=_is_call):
            if _is_call(nested):
                nested._refuse_trees(params, error)

    def _as_setting(self) -> Any:
        """What is passed to another factory that has this among its settings."""
        return self.build()

    def replace(self, **settings: Any) -> Any:
        """A copy with other settings.

        A number that replaces a leaf is a leaf, so nothing is compiled again; a number that replaces a `Static` is
        static. Otherwise the new value is treated as if it had been given at construction; an array makes any setting
        a leaf, and `Static` makes it structure.

        A setting that the factory does not have is looked for in nested optimisers and schedules, and must be found in
        exactly one.

        Args:
            **settings: the new values.

        Returns:
            The new optimiser or schedule.

        Raises:
            TypeError: for a setting that is not found, or is found in several nested optimisers or schedules; for a
                leaf that the factory looks at (compares or converts).

        Example:
            >>> import optax
            >>> import vernal
            >>> clip = vernal.Optimizer(optax.clip, 1.0)
            >>> opt = vernal.Optimizer(optax.chain, clip, vernal.Optimizer(optax.sgd, 0.1))
            >>> opt.replace(learning_rate=0.2).settings["args"][1].settings["learning_rate"]
            Array(0.2, dtype=float32, weak_type=True)
        """
        made = self
        for name, value in settings.items():
            made = made._replace_one(name, value)
        return made

    def _reaches(self, name: str) -> bool:
        nested = jtu.tree_leaves(self.settings, is_leaf=_is_call)
        return factory_of(self.factory).takes(name) or any(
            _is_call(x) and x._reaches(name) for x in nested
        )

    def _replace_one(self, name: str, value: Any) -> Any:
        factory = factory_of(self.factory)
        values = {**dict(self.structure), **self.settings}
        if factory.takes(name):
            values[name] = on_the_same_side(self.settings.get(name), value)
        else:
            leaves, treedef = jtu.tree_flatten(self.settings, is_leaf=_is_call)
            found = [i for i, x in enumerate(leaves) if _is_call(x) and x._reaches(name)]
            if len(found) != 1:
                several = f"{name!r} is a setting of {len(found)} nested factories"
                raise factory.unknown(several if found else f"no setting is called {name!r}")
            leaves[found[0]] = leaves[found[0]]._replace_one(name, value)
            values.update(treedef.unflatten(leaves))
        args, kwargs = factory.arguments(values)
        return type(self)(self.factory, *args, **kwargs)
