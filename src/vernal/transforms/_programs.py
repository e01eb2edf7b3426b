"""The programs compiled for one function: how they are made and cached."""

import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu

from .._ground import callable_name, register_cache
from ..trees import Rest, is_array, split
from ._boundary import hold, parameter_name, release
from ._compilation_notes import expect_compilations
from ._donation import donated_arguments, without_donation_warnings
from ._explain import Call, Tracing
from ._failures import Program, traced
from ._flatten import Flattener
from ._prefixes import broadcast_prefix
from ._results import Unflatten, flatten_result
from ._returned import check_returned
from ._signatures import has_identity
from ._transformed import call_inside


class Settings:
    """The options of one `filter_jit`. Compared by value, as part of the structure of the
    wrapper.

    Args:
        donate: as for `filter_jit`.
        in_shardings: likewise.
        out_shardings: likewise.
        options: the options that are passed on to `jax.jit`.
    """

    __slots__ = ("donate", "in_shardings", "options", "out_shardings")

    def __init__(self, donate: str, in_shardings: Any, out_shardings: Any, options: dict[str, Any]):
        self.donate = donate
        self.in_shardings = in_shardings
        self.out_shardings = out_shardings
        self.options = options

    def by_name(self) -> dict[str, Any]:
        """The options by name, for descriptions."""
        return {name: getattr(self, name) for name in self.__slots__}

    def key(self) -> Any:
        """The value that equality compares."""
        shardings = [jtu.tree_flatten(s) for s in (self.in_shardings, self.out_shardings)]
        return (
            self.donate,
            *((tuple(leaves), treedef) for leaves, treedef in shardings),
            repr(sorted(self.options.items())),
        )

    def __eq__(self, other: Any) -> bool:
        return type(other) is Settings and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())


# How many programs one function keeps: as many as `jax.jit`, and fewer where the functions of one class
# share them, because those programs outlive each function.
_MOST, _MOST_SHARED = 4096, 256


class Programs:
    """Everything compiled for one function with one set of options.

    Args:
        fn: a weak reference to the function, or None if it is passed with its arguments.

    Attributes:
        by_key: the programs, by the keys of the arguments.
        flattener: flattens the arguments.
        traces: one item for each trace of the function.
    """

    __slots__ = ("by_key", "fn", "flattener", "traces")

    def __init__(self, fn: Any):
        self.fn = fn
        self.by_key: dict[Any, Program] = {}
        self.flattener = Flattener()
        self.traces: list[None] = []

    def add(self, key: Any, program: Program) -> Program:
        """Caches a program, unless another thread was faster.

        Args:
            key: the keys of the arguments.
            program: the program for them.

        Returns:
            The cached program.
        """
        most = _MOST if self.fn is not None else _MOST_SHARED
        for known in (self.by_key, self.flattener.known):
            while len(known) >= most:
                known.pop(next(iter(known)), None)
        return self.by_key.setdefault(key, program)


# Programs live as long as the function they belong to. Callables that are not plain functions are
# passed as arguments.
_by_function: weakref.WeakKeyDictionary[Any, dict[Settings, Programs]] = weakref.WeakKeyDictionary()
_by_structure: dict[Any, Programs] = {}


def _clear() -> None:
    everything = [p for by_settings in list(_by_function.values()) for p in by_settings.values()]
    for programs in [*everything, *_by_structure.values()]:
        programs.by_key.clear()
        programs.flattener.known.clear()


register_cache(_clear)


def programs_of(fn: Any, settings: Settings) -> Programs:
    """The cached programs of a function.

    Args:
        fn: the function.
        settings: the options they are compiled with.
    """
    if has_identity(fn):
        by_settings = _by_function.setdefault(fn, {})
        found = by_settings.get(settings)
        # In one step, for threads that ask at the same time.
        return found or by_settings.setdefault(settings, Programs(weakref.ref(fn)))
    return _by_structure.setdefault((type(fn), settings), Programs(None))


def as_call(travels: bool, given: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """`(fn, args, kwargs)`, where `fn` is None if it is not passed with its arguments.

    Args:
        travels: whether the function is passed with its arguments.
        given: the positional arguments, after the function if that is passed.
        kwargs: the keyword arguments.
    """
    return (given[0], given[1:], kwargs) if travels else (None, given, kwargs)


def make_program(
    programs: Programs,
    settings: Settings,
    call: tuple[Any, Any, Any],
    leaves: list[Any],
    is_dynamic: Callable[[Any], bool] = is_array,
) -> Program:
    """The program that serves all calls like this one: a `jax.jit` of a function of their leaves.

    Args:
        programs: where it will be cached.
        settings: the options to compile it with.
        call: `(fn, args, kwargs)`, where `fn` is None if it is not passed with its arguments.
        leaves: the arrays of the call.
        is_dynamic: whether a leaf is an array.

    Returns:
        The program.
    """
    reference = programs.fn
    fn = call[0] if reference is None else reference()
    rest = split(call, is_dynamic)[1]
    options = dict(settings.options)
    donated = donated_arguments(settings.donate, len(leaves), int(reference is None))
    if donated:
        options["donate_argnums"] = donated
    if settings.in_shardings is not None:
        chosen = _in_shardings(fn, rest, settings.in_shardings)
        options["in_shardings"] = tuple(jtu.tree_structure(leaves).unflatten(chosen))
    keep_shape = settings.out_shardings is not None
    if keep_shape:
        options["out_shardings"] = (settings.out_shardings, None)
    flatten_out = _hold if keep_shape else flatten_result

    def described(leaves: Any) -> Call:
        called, args, kwargs = rest.fill(jtu.tree_leaves(leaves))
        target = called if reference is None else reference()
        return Call(target, settings.by_name(), (args, kwargs))

    compiled = Program(described)
    # Not the program itself, nor the objects that hold it: such a cycle would keep the function, and the tracers
    # that it closes over, alive until the garbage collector runs.
    traces, attention, opened = programs.traces, compiled.attention, compiled.opened
    name = callable_name(fn)
    quiet = [without_donation_warnings] if donated and settings.donate.startswith("all") else []

    def program(*leaves: Any) -> Any:
        target = None if reference is None else reference()
        if getattr(jax.config, "jax_disable_jit", False):
            return flatten_out(call_inside(target, rest, jtu.tree_leaves(leaves)))
        opened.enter(Tracing(described(leaves)), *(context() for context in quiet))
        traces.append(None)
        out = traced(attention, call_inside, target, rest, jtu.tree_leaves(leaves))
        return flatten_out(check_returned(out, name))

    program.__name__ = program.__qualname__ = name
    _stand_for(program, fn, len(leaves) if reference is not None and not call[2] else None)
    compiled.use(jax.jit(program, **options))
    expect_compilations(program.__name__, compiled)
    return compiled


_NOTHING = (lambda *leaves: None).__code__


def _stand_for(program: Any, fn: Any, count: int | None) -> None:
    """Lets JAX's errors report the place of the user's function, and, if the program takes `count` arguments of it,
    their names."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return

    place = _NOTHING.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
    # JAX reads the place from `__wrapped__`.
    program.__wrapped__ = types.FunctionType(place, {}, program.__name__)
    names = [parameter_name(fn, i) for i in range(count or 0)]
    if count and all(map(str.isidentifier, names)):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        program.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])


def _hold(out: Any) -> tuple[Any, Unflatten]:
    """A result that keeps its structure, of which `out_shardings` is a prefix."""
    return hold(out), Unflatten(release)


def _in_shardings(fn: Any, rest: Rest, prefix: Any) -> list[Any]:
    """One sharding (or None) for every traced array."""
    index_tree = rest.treedef.unflatten(range(rest.treedef.num_leaves))
    if not isinstance(prefix, (tuple, list)):
        prefix = tuple(prefix for _ in index_tree[1])
    spread = broadcast_prefix(
        tuple(prefix),
        index_tree[1],
        what=f"`in_shardings` of `{callable_name(fn)}`",
        root="in_shardings",
        is_leaf=lambda x: x is None or isinstance(x, jax.sharding.Sharding),
    )
    by_index = dict(zip(jtu.tree_leaves(index_tree[1]), spread, strict=True))
    return [by_index.get(i) for i, m in enumerate(rest.mask) if m]
