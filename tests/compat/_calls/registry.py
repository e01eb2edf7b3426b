"""Which calls there are of which name of Equinox.

A file of calls has generators, each for one name or for several that are alike:

    @calls("is_array", "is_array_like")
    def kinds(name, eqx):
        yield name, 1.0                     # the call `name(1.0)`
        yield lambda: name(jnp.ones(2))     # any other call

`name` is the object of that name, and `eqx` stands for Equinox: the real one, `vernal.compat.equinox` or `vernal`.
What a call gives must not depend on the other calls. It is known by its text, so that lines may be added anywhere.
"""

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# The files of calls whose programs take long to compile.
HEAVY = {"of_convolutions", "of_layers", "of_loops", "of_state", "of_derivatives"}

GENERATORS: dict[str, list[Callable[..., Iterator[Any]]]] = {}


def calls(*names: str) -> Callable[[Any], Any]:
    def register(generator: Any) -> Any:
        for name in names:
            GENERATORS.setdefault(name, []).append(generator)
        return generator

    return register


def is_heavy(name: str) -> bool:
    return any(g.__module__.rpartition(".")[2] in HEAVY for g in GENERATORS[name])


@functools.cache
def texts(generator: Callable[..., Any]) -> dict[int, str]:
    """The text of each call, by the line of its `yield`."""
    source = textwrap.dedent(inspect.getsource(generator))
    start = generator.__code__.co_firstlineno - 1
    return {
        start + node.lineno: ast.unparse(node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Yield) and node.value is not None
    }


class Counted:
    """A function that counts how often its body runs, which is once for every trace."""

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        self.function, self.count = function, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self.function(*args, **kwargs)


def load() -> None:
    """Imports all files of calls."""
    for path in sorted(Path(__file__).parent.glob("of_*.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
