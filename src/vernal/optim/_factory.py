"""What a factory of Optax is called with: its settings by name, and a call again.

Optimisers and schedules remember what to call, and with what, instead of what came out. A new one
may be made at every step of a loop, so what there is to know of a factory is found out once.
"""

import contextlib
import weakref
from typing import Any

from .._ground import callable_name, register_cache, signature_of
from ..show import message, short


class Factory:
    """What is known of a function that makes transformations or schedules. It does not hold the
    function, for it is remembered as long as that lives."""

    __slots__ = (
        "_positional",
        "_required",
        "_simple",
        "name",
        "parameters",
        "signature",
        "untraceable",
    )

    def __init__(self, fn: Any):
        signature = signature_of(fn)
        if signature is None:
            raise TypeError(
                message(
                    "a factory needs a signature, for its settings to have names",
                    where=short(fn),
                    expected="a function such as `optax.adam`",
                    got=short(fn),
                    instead="wrap it in a function that names its parameters",
                )
            )
        self.name = callable_name(fn)
        self.signature = signature
        self.parameters = signature.parameters
        parameters = self.parameters.values()
        self._positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        # Whether every setting can be given by its name.
        self._simple = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
        self._required = {p.name for p in parameters if p.default is p.empty}
        # For some names of settings, those of them that cannot be traced (see `_settings.py`).
        self.untraceable: dict[frozenset[str], frozenset[str]] = {}

    def takes(self, name: str) -> bool:
        """Whether it has a setting of this name."""
        return name in self.parameters or any(
            p.kind is p.VAR_KEYWORD for p in self.parameters.values()
        )

    def by_name(self, args: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
        """The settings of a call by the names of the parameters, in their order."""
        if self._simple and len(args) <= len(self._positional):
            # What `bind` does, in a fifth of the time.
            given = dict(zip(self._positional, args, strict=False))
            if given.keys().isdisjoint(settings):
                given.update(settings)
                if given.keys() >= self._required and self.parameters.keys() >= given.keys():
                    return {name: given[name] for name in self.parameters if name in given}
        try:
            values = dict(self.signature.bind(*args, **settings).arguments)
        except TypeError as error:
            raise self.unknown(str(error)) from None
        for name, parameter in self.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                values.update(values.pop(name, {}))
        return values

    def arguments(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Undoes `by_name`."""
        bound = self.signature.bind_partial()
        for name, parameter in self.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                more = {n: v for n, v in values.items() if n not in self.parameters}
                bound.arguments[name] = more
            elif name in values:
                bound.arguments[name] = values[name]
        return bound.args, bound.kwargs

    def unknown(self, problem: str, instead: str | None = None) -> TypeError:
        """The error for settings that it does not take."""
        parameters = [p.replace(annotation=p.empty) for p in self.parameters.values()]
        return TypeError(
            message(
                f"`{self.name}` does not take these settings",
                where=f"{self.name}(...)",
                expected=f"{self.name}({', '.join(map(str, parameters))})",
                got=problem,
                instead=instead,
            )
        )


_known: weakref.WeakKeyDictionary[Any, Factory] = weakref.WeakKeyDictionary()
register_cache(_known.clear)


def factory_of(fn: Any) -> Factory:
    """What is known of a factory.

    Args:
        fn: a function that returns an Optax transformation or schedule.

    Returns:
        Its name, parameters and settings.

    Raises:
        TypeError: if it has no signature.
    """
    try:
        return _known[fn]
    except (KeyError, TypeError):  # TypeError: it cannot be hashed, or not be watched
        factory = Factory(fn)
    with contextlib.suppress(TypeError):
        _known[fn] = factory
    return factory
