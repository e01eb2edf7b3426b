"""`filter_jit`: `jax.jit` for functions of arbitrary Python objects.

Arrays are traced, everything else is static. What a call costs beyond `jax.jit` on a flat list of
the same arrays is kept small: the call is flattened in C; a *plan*, cached by the treedef and the
types of the leaves, says which leaves are arrays; a *program*, cached by the values of the other
leaves, is one `jax.jit` of a function of the arrays. Nothing waits for results, unless the program
holds a run-time check: see `_failures.py`.
"""

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
import jax.tree_util as jtu
import numpy as np
from typing_extensions import ParamSpec

from .._ground import callable_name, intern_key, register_cache
from ..modules import field
from ..show import message, short
from ..trees import is_array
from ._boundary import Rest, argument_text, hold, release, split, to_positional
from ._donation import Donate, check_donate, donated_leaves, quietly
from ._failures import Program, reraise, traced, wait
from ._lowered import Lowered
from ._prefixes import broadcast_prefix
from ._transformed import Transformed, call_inside, check_callable, wrap

P = ParamSpec("P")
T = TypeVar("T")


class _Settings:
    """The options of one `filter_jit`. Compared by value, as part of the structure of the
    wrapper."""

    __slots__ = ("donate", "in_shardings", "options", "out_shardings")

    def __init__(self, donate: str, in_shardings: Any, out_shardings: Any, options: dict[str, Any]):
        self.donate = donate
        self.in_shardings = in_shardings
        self.out_shardings = out_shardings
        self.options = options

    def key(self) -> Any:
        shardings = [jtu.tree_flatten(s) for s in (self.in_shardings, self.out_shardings)]
        return (
            self.donate,
            *((tuple(leaves), treedef) for leaves, treedef in shardings),
            repr(sorted(self.options.items())),
        )

    def __eq__(self, other: Any) -> bool:
        return type(other) is _Settings and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())


def _picker(positions: list[int]) -> Callable[[list[Any]], Any]:
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    if positions:
        only = positions[0]
        return lambda leaves: (leaves[only],)
    return lambda leaves: ()


class _Plan:
    """How to take calls of one structure apart. Holds the programs compiled for their static
    values."""

    def __init__(self, treedef: Any, mask: tuple[bool, ...], donate: str):
        self.treedef = treedef
        self.mask = mask
        dynamic = [i for i, m in enumerate(mask) if m]
        donated = donated_leaves(treedef, dynamic, donate)
        kept = sorted(set(dynamic) - set(donated))
        self.donated = _picker(donated)
        self.kept = _picker(kept)
        self.fixed = _picker([i for i, m in enumerate(mask) if not m])
        # Where each array of a call goes among the arrays of `Rest.fill`.
        self.rank = sorted(range(len(dynamic)), key=[*donated, *kept].__getitem__)
        self.in_call_order = [dynamic.index(i) for i in [*donated, *kept]]
        self.programs: dict[Any, Program] = {}

    def rest(self, leaves: list[Any]) -> Rest:
        return Rest(self.treedef, self.mask, tuple(self.fixed(leaves)))


class _Cache:
    """Everything compiled for one function with one set of options."""

    def __init__(self, fn: Any):
        self.fn = fn  # a weak reference, or None where the function travels with its arguments
        self.plans: dict[Any, _Plan] = {}
        self.traces: list[None] = []


# Compiled programs live as long as the function they belong to. Callables that are not plain
# functions travel as arguments.
_by_function: weakref.WeakKeyDictionary[Any, dict[_Settings, _Cache]] = weakref.WeakKeyDictionary()
_by_structure: dict[Any, _Cache] = {}


def _clear() -> None:
    for caches in list(_by_function.values()):
        for cache in caches.values():
            cache.plans.clear()
    for cache in _by_structure.values():
        cache.plans.clear()


register_cache(_clear)


def _has_identity(fn: Any) -> bool:
    """Whether a callable is compared by identity, holds nothing that JAX can see, and can be
    watched."""
    kind = type(fn)
    return (
        kind.__eq__ is object.__eq__ and kind.__weakrefoffset__ != 0 and not jtu.is_tree_node(kind)
    )


def _cache_of(fn: Any, settings: _Settings) -> _Cache:
    if _has_identity(fn):
        caches = _by_function.setdefault(fn, {})
        if settings not in caches:
            caches[settings] = _Cache(weakref.ref(fn))
        return caches[settings]
    return _by_structure.setdefault((type(fn), settings), _Cache(None))


def _program(cache: _Cache, plan: _Plan, leaves: list[Any], settings: _Settings) -> Program:
    """Makes the function of arrays that stands for calls with these static values, and hands it to
    `jax.jit`."""
    rest = plan.rest(leaves)
    reference = cache.fn
    fn = rest.fill([None] * sum(rest.mask))[0] if reference is None else reference()
    options = dict(settings.options)
    if settings.donate != "none":
        options["donate_argnums"] = 0
    if settings.in_shardings is not None:
        chosen = _in_shardings(fn, rest, settings.in_shardings)
        ordered = [chosen[i] for i in plan.in_call_order]
        count = len(plan.donated(leaves))
        options["in_shardings"] = (tuple(ordered[:count]), tuple(ordered[count:]))
    keep_shape = settings.out_shardings is not None
    if keep_shape:
        options["out_shardings"] = settings.out_shardings

    compiled = Program()
    # Not the objects that hold the program: such a cycle would outlive the function, and with it
    # the tracers that it closes over, until Python looks for cycles.
    traces, rank, attention = cache.traces, plan.rank, compiled.attention

    def program(donated: Any, kept: Any) -> Any:
        traces.append(None)
        given = [*donated, *kept]
        arrays = [given[i] for i in rank]
        target = None if reference is None else reference()
        out = traced(attention, call_inside, target, rest, arrays)
        return hold(out) if keep_shape else split(out)

    program.__name__ = program.__qualname__ = callable_name(fn)
    compiled.run = jax.jit(program, **options)
    return compiled


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


def _unhashable(fn: Any, treedef: Any, leaves: list[Any], mask: tuple[bool, ...]) -> ValueError:
    indices = treedef.unflatten(range(treedef.num_leaves))
    for path, i in jtu.tree_flatten_with_path(indices)[0]:
        if mask[i]:
            continue
        try:
            intern_key(leaves[i])
        except TypeError:
            return ValueError(
                message(
                    "Non-hashable static arguments: a compiled function is chosen by the values of "
                    "what is not an array",
                    where=f"`{callable_name(fn)}`, argument {argument_text(fn, path)}",
                    expected="arrays, or hashable Python values",
                    got=short(leaves[i]),
                    instead="pass an array, a tuple or a frozenset; give your own class `__hash__` and `__eq__`",
                )
            )
    raise AssertionError("every static leaf is hashable")


def _traceable(x: Any) -> bool:
    return is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


class _Jit(Transformed[P, T]):
    """What `filter_jit` returns."""

    settings: _Settings = field(static=True)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        plan, program, leaves = self._prepare(args, kwargs, is_array)
        donated, kept = plan.donated(leaves), plan.kept(leaves)
        try:
            if self.settings.donate == "none":
                out = program.run(donated, kept)
            else:
                with quietly(self.settings.donate):
                    out = program.run(donated, kept)
            if program.attention:
                program.settle(donated, kept, out)
        except Exception as error:
            program.failed(error, donated, kept)
            raise
        if self.settings.out_shardings is not None:
            return release(out)
        arrays, rest = out
        return rest.fill(arrays)

    def _prepare(self, args: Any, kwargs: Any, is_dynamic: Any) -> tuple[_Plan, Program, list[Any]]:
        fn = self.fn
        cache = self._cache()
        if kwargs:
            args, kwargs = to_positional(fn, args, kwargs)
        named = cache.fn is not None
        leaves, treedef = jtu.tree_flatten((None if named else fn, args, kwargs))
        types_ = tuple(map(type, leaves))
        key: Any = (treedef, types_)
        if np.ndarray in types_ or is_dynamic is not is_array:
            # Arrays of objects or strings are static values, which their type does not tell.
            key = (treedef, types_, tuple(map(is_dynamic, leaves)))
        plan = cache.plans.get(key)
        if plan is None:
            # NumPy and JAX arrays in the same places are one plan, and so one program.
            mask = tuple(map(is_dynamic, leaves))
            shared = _Plan(treedef, mask, self.settings.donate)
            plan = cache.plans[key] = cache.plans.setdefault((treedef, mask), shared)
        fixed = plan.fixed(leaves)
        try:
            static = tuple(map(intern_key, fixed)) if fixed else ()
            program = plan.programs.get(static)
        except TypeError:
            raise _unhashable(fn, treedef, leaves, plan.mask) from None
        if program is None:
            program = _program(cache, plan, leaves, self.settings)
            plan.programs[static] = program
        return plan, program, leaves

    def _cache(self) -> _Cache:
        # Remembered outside the fields: it is found again after every flatten and unflatten.
        values: dict[str, Any] = self.__dict__  # pyright: ignore[reportAssignmentType] (an instance's)
        cache = values.get("_found_cache")
        if cache is None:
            cache = values["_found_cache"] = _cache_of(self.fn, self.settings)
        return cache

    @property
    def trace_count(self) -> int:
        """How often the function has been traced (and, but for JAX's own caches, compiled)."""
        return len(self._cache().traces)

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Traces and lowers without compiling or running.

        Args:
            *args: as for a call; `jax.ShapeDtypeStruct` may stand for arrays.
            **kwargs: likewise.

        Returns:
            The lowered program: `.as_text()`, `.compile()`.
        """
        plan, program, leaves = self._prepare(args, kwargs, _traceable)
        donated, kept = plan.donated(leaves), plan.kept(leaves)
        with quietly(self.settings.donate):
            lowered = program.run.lower(donated, kept)
        run = functools.partial(self._compiled_call, program.look(donated, kept))
        return Lowered(lowered, self.fn, plan.treedef.unflatten(leaves), run)

    def _compiled_call(self, checks: Any, compiled: Any, args: Any, kwargs: Any) -> Any:
        """Runs a compiled program on a call's arguments, already known to have the structure it
        was lowered for."""
        if kwargs:
            args, kwargs = to_positional(self.fn, args, kwargs)
        named = self._cache().fn is not None
        leaves, treedef = jtu.tree_flatten((None if named else self.fn, args, kwargs))
        plan = _Plan(treedef, tuple(map(is_array, leaves)), self.settings.donate)
        try:
            out = compiled(plan.donated(leaves), plan.kept(leaves))
            wait(out, checks)
        except Exception as error:
            reraise(error)
            raise
        return release(out) if self.settings.out_shardings is not None else out[1].fill(out[0])


@overload
def filter_jit(
    fn: Callable[P, T],
    *,
    donate: Donate = "none",
    in_shardings: Any = None,
    out_shardings: Any = None,
    inline: bool = False,
    keep_unused: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> _Jit[P, T]: ...
@overload
def filter_jit(
    *,
    donate: Donate = "none",
    in_shardings: Any = None,
    out_shardings: Any = None,
    inline: bool = False,
    keep_unused: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[Callable[P, T]], _Jit[P, T]]: ...
def filter_jit(
    fn: Any = None,
    *,
    donate: str = "none",
    in_shardings: Any = None,
    out_shardings: Any = None,
    inline: bool = False,
    keep_unused: bool = False,
    compiler_options: dict[str, Any] | None = None,
    **refused: Any,
) -> Any:
    """Compiles a function that takes and returns arbitrary Python objects.

    Arrays anywhere in the arguments are traced; everything else is static, and the function is
    compiled again when it changes. Calls are asynchronous, as those of `jax.jit`, except where the
    program holds a check (`vernal.runtime.error_if`), whose error the call raises. Use it as
    `filter_jit(f)`, as a decorator (also of methods), or with options as
    `@filter_jit(donate="all")`.

    Args:
        fn: the function. If it is a module (or a method of one), its arrays are traced too.
        donate: whose memory the results may take over: `"all"` arguments, `"all-except-first"`, or
            `"none"`. `"warn"` and `"warn-except-first"` donate likewise and let JAX warn about
            buffers that it could not use.
        in_shardings: a sharding, or a prefix of the tuple of positional arguments with shardings
            and None as leaves. Leaves that are not arrays are passed over.
        out_shardings: likewise, a prefix of the result.
        inline: as for `jax.jit`.
        keep_unused: as for `jax.jit`.
        compiler_options: passed to XLA.

    Returns:
        The compiled function, with `.lower(*args)` and `.trace_count`.

    Raises:
        TypeError: if `fn` is not callable, or for the options of `jax.jit` that have no meaning
            here.
        ValueError: for an unknown `donate`; at a call, for a static argument that cannot be hashed.
        TracedShapeError: at a call, if a traced value reaches a shape.
        RuntimeCheckError: at a call, if a check in the program fails.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> @vernal.filter_jit
        ... def apply(fn, x):
        ...     return fn(x), "any object"
        >>> apply(jnp.negative, jnp.ones(2))
        (Array([-1., -1.], dtype=float32), 'any object')
    """
    if refused:
        name = next(iter(refused))
        raise TypeError(
            message(
                f"filter_jit has no option `{name}`",
                where=f"filter_jit(fn, {name}=...)",
                expected="donate, in_shardings, out_shardings, inline, keep_unused or compiler_options",
                got=name,
                instead="leave static_argnums and static_argnames out: whatever is not an array is static already; "
                "in place of donate_argnums use donate='all' or 'all-except-first'",
            )
        )
    check_donate("filter_jit", donate)
    options: dict[str, Any] = {}
    if inline:
        options["inline"] = True
    if keep_unused:
        options["keep_unused"] = True
    if compiler_options is not None:
        options["compiler_options"] = compiler_options
    settings = _Settings(donate, in_shardings, out_shardings, options)

    def decorate(fn: Any) -> Any:
        check_callable(fn, "filter_jit")
        return wrap(_Jit(fn, settings))

    return decorate if fn is None else decorate(fn)
