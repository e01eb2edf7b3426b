"""The settings that an Optax factory is called with: from a call to names, and back.

Optimisers and schedules store the factory and its arguments instead of its result. A new one may be made at every step
of a loop, so the facts about a factory are cached.
"""

import contextlib
import weakref
from typing import Any

from .._ground import callable_name, register_cache, signature_of
from ..modules import Module
from ..show import message, short, type_error
from ._optax_table import row_of

_KEPT_WHOLE = "Optimizer(optax.adam, learning_rate=...), whose settings can be replaced: those of an object in "
_KEPT_WHOLE += "from_optax cannot"


class Factory:
    """The facts about a function that makes transformations or schedules. It does not hold the function itself, because
    it is cached for as long as the function lives."""

    def __init__(self, fn: Any):
        if not callable(fn) and hasattr(fn, "init") and hasattr(fn, "update"):
            raise type_error(
                "an optimiser was given where its factory is expected",
                where="argument `factory`",
                expected="a factory such as `optax.adam`, followed by its settings",
                got=short(fn),
                instead="vernal.Optimizer(optax.adam, 1e-3), or vernal.optim.from_optax(optax.adam(1e-3))",
            )
        signature = signature_of(fn)
        if signature is None:
            raise type_error(
                "a factory needs a signature, which names its settings",
                where=short(fn),
                expected="a function such as `optax.adam`",
                got=short(fn),
                instead="wrap it in a function that names its parameters",
            )
        if _is_injected(fn):
            raise TypeError(_no_settings_in_the_state(callable_name(fn)))
        self.name = callable_name(fn)
        self.signature = signature
        self.parameters = signature.parameters
        self.row = row_of(fn)

    def takes(self, name: str) -> bool:
        """Whether the factory has a setting of this name."""
        return name in self.parameters or any(
            p.kind is p.VAR_KEYWORD for p in self.parameters.values()
        )

    def by_name(self, args: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
        """The settings of a call, keyed by the names of the parameters, in their order."""
        for name in settings:
            if not self.takes(name):
                raise self.unknown(f"no setting is called {name!r}")
        try:
            values = dict(self.signature.bind(*args, **settings).arguments)
        except TypeError as error:
            raise self.unknown(str(error)) from None
        for name, parameter in self.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                values.update(values.pop(name, {}))
        return values

    def arguments(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments for these settings: the inverse of `by_name`."""
        bound = self.signature.bind_partial()
        for name, parameter in self.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                more = {n: v for n, v in values.items() if n not in self.parameters}
                bound.arguments[name] = more
            elif name in values:
                bound.arguments[name] = values[name]
        return bound.args, bound.kwargs

    def unknown(self, problem: str) -> TypeError:
        """The error for settings that the factory does not take."""
        parameters = [p.replace(annotation=p.empty) for p in self.parameters.values()]
        return type_error(
            f"`{self.name}` does not take these settings",
            where=f"{self.name}(...)",
            expected=f"{self.name}({', '.join(map(str, parameters))})",
            got=problem,
            instead=None if self.parameters else _KEPT_WHOLE,
        )


def _is_injected(fn: Any) -> bool:
    """Whether a function comes from `optax.inject_hyperparams`, which gives it the name of the factory it wraps."""
    name = getattr(getattr(fn, "__code__", None), "co_qualname", "")
    module = getattr(fn, "__globals__", {}).get("__name__", "")
    return module.startswith("optax.") and name.startswith("inject_hyperparams.")


def _no_settings_in_the_state(name: str) -> str:
    return message(
        "an optimiser made by `optax.inject_hyperparams` reads its numbers from its state",
        where=f"Optimizer(optax.inject_hyperparams({name}), ...)",
        expected="a factory whose settings belong to the optimiser: changes of these would have no effect",
        got=f"optax.inject_hyperparams({name})",
        instead=f"Optimizer({name}, ...), whose numbers are leaves; or, to keep using such states, "
        f"from_optax(optax.inject_hyperparams({name})(...))",
    )


_known: weakref.WeakKeyDictionary[Any, Factory] = weakref.WeakKeyDictionary()
register_cache(_known.clear)


def factory_of(fn: Any) -> Factory:
    """The `Factory` of a function, cached; a TypeError if it has no signature."""
    if isinstance(fn, Module):  # compared by values, which may be traced
        return Factory(fn)
    try:
        return _known[fn]
    except (KeyError, TypeError):  # TypeError: not hashable, or not weakly referable
        factory = Factory(fn)
    with contextlib.suppress(TypeError):
        _known[fn] = factory
    return factory
