"""Which calls there are of which name of Equinox, and which of them are known to differ on Vernal.

A file of calls has generators, each for one name or for several that are alike:

    @calls("is_array", "is_array_like")
    def kinds(name, eqx):
        yield name, 1.0                             # the call `name(1.0)`
        yield lambda: name(jnp.ones(2))             # any other call
        yield natively(lambda: name(eqx.nn.PReLU))  # differs with `import vernal as eqx`
        yield differs(name, None)                   # differs with `vernal.compat` as well

`name` is the object of that name, and `eqx` stands for Equinox: it is the real one, `vernal.compat.equinox` or `vernal`.
What a call gives must not depend on the other calls.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

COMPAT, NATIVE = "compat", "native"

GENERATORS: dict[str, list[Callable[..., Iterator[Any]]]] = {}


class Call(NamedTuple):
    """What is called, and on which of the two it is known to give something else."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    differs_on: tuple[str, ...] = ()


def calls(*names: str) -> Callable[[Any], Any]:
    def register(generator: Any) -> Any:
        for name in names:
            GENERATORS.setdefault(name, []).append(generator)
        return generator

    return register


def natively(function: Callable[..., Any], *args: Any) -> Call:
    return Call(function, args, (NATIVE,))


def differs(function: Callable[..., Any], *args: Any) -> Call:
    return Call(function, args, (COMPAT, NATIVE))


def in_compat(function: Callable[..., Any], *args: Any) -> Call:
    return Call(function, args, (COMPAT,))


def as_call(yielded: Any) -> Call:
    if isinstance(yielded, Call):
        return yielded
    if isinstance(yielded, tuple):
        return Call(yielded[0], yielded[1:])
    return Call(yielded, ())


class Counted:
    """A function that counts how often its body runs, which is once for every trace."""

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self.function, self.count = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)
