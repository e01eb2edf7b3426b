"""A call of a factory as a value: settings, some of them leaves, that can be replaced.

What is made in this way may be a setting of something else: schedules of optimisers, optimisers of
optimisers. `replace` finds a setting wherever it is.
"""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from ..modules import Module, field
from ._factory import factory_of
from ._settings import as_leaves, is_number


def is_call(x: Any) -> bool:
    """Whether something is a nested optimiser or schedule."""
    return isinstance(x, FactoryCall)


class FactoryCall(Module):
    """A factory and its settings."""

    factory: Callable[..., Any] = field(static=True)
    settings: dict[str, Any]
    structure: tuple[tuple[str, Any], ...] = field(static=True)

    def given(self) -> dict[str, Any]:
        """All settings, leaves and structure, by name.

        Returns:
            Those that were given; not the defaults of the factory.
        """
        return {**dict(self.structure), **self.settings}

    def replace(self, **settings: Any) -> Any:
        """The same with other settings.

        A leaf stays a leaf: nothing is compiled again for another number. A setting that the
        factory does not have is looked for in nested optimisers and schedules, and must be found in
        exactly one.

        Args:
            **settings: the new values.

        Returns:
            The new optimiser or schedule.

        Raises:
            TypeError: for a setting that nothing has, or that several nested ones have.

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
        nested = jtu.tree_leaves(self.settings, is_leaf=is_call)
        return factory_of(self.factory).takes(name) or any(
            is_call(x) and x._reaches(name) for x in nested
        )

    def _replace_one(self, name: str, value: Any) -> Any:
        factory = factory_of(self.factory)
        values = self.given()
        if factory.takes(name):
            if name in self.settings and is_number(value):
                value = as_leaves({name: value})[name]
            values[name] = value
        else:
            leaves, treedef = jtu.tree_flatten(self.settings, is_leaf=is_call)
            found = [i for i, x in enumerate(leaves) if is_call(x) and x._reaches(name)]
            if len(found) != 1:
                raise factory.unknown(f"`{name}`, which {len(found)} nested ones have")
            leaves[found[0]] = leaves[found[0]]._replace_one(name, value)
            values.update(treedef.unflatten(leaves))
        return self._with(values)

    def _with(self, values: dict[str, Any]) -> Any:
        """The same call with all of these settings."""
        args, kwargs = factory_of(self.factory).arguments(values)
        return type(self)(self.factory, *args, **kwargs)
