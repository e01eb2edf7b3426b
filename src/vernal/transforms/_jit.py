"""`filter_jit`: `jax.jit` for functions of arbitrary Python objects.

Arrays are traced, everything else is static. The cost of a call beyond `jax.jit` on a flat list of
the same arrays is kept small: each argument is flattened into arrays and a key, which modules cache
(`_flatten.py`); the keys select a *program*, one `jax.jit` of a function of the arrays
(`_programs.py`); modules in the result are lazy (`_results.py`). A call does not wait for the device,
unless the program has a run-time check: see `_failures.py`.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, overload

import jax.tree_util as jtu
from typing_extensions import ParamSpec

from .._ground import ArrayImpl, callable_name, static_key
from ..modules import Flat, field, module_classes
from ..show import short, type_error, value_error
from ..trees import has_shape, is_array
from ._boundary import argument_text, to_positional
from ._donation import Donate, check_donate
from ._explain import traces_of
from ._failures import Program, reraise, wait
from ._flatten import ARRAY, Flattener
from ._lowered import Lowered
from ._programs import Programs, Settings, as_call, make_program, programs_of
from ._results import whole_result
from ._transformed import Transformed, check_callable, wrap

P = ParamSpec("P")
T = TypeVar("T")


def _unhashable(fn: Any, args: Any, kwargs: Any) -> ValueError | None:
    """The error for the first static value that cannot be hashed, or None."""
    for path, leaf in jtu.tree_flatten_with_path((fn, args, kwargs))[0]:
        if is_array(leaf):
            continue
        try:
            static_key(leaf)
        except TypeError:
            return value_error(
                "Non-hashable static arguments: every value that is not an array is part of the key of a "
                "compiled program",
                where=f"`{callable_name(fn)}`, argument {argument_text(fn, path)}",
                expected="arrays, or hashable Python values",
                got=short(leaf),
                instead="pass an array, a tuple, a frozenset or a module; make a dataclass frozen; give any other "
                "class of yours `__hash__` and `__eq__`",
            )
    return None


class _Jit(Transformed[P, T]):
    """What `filter_jit` returns."""

    # The programs that it caches are those of the function inside.
    _vernal_remembers = True

    settings: Settings = field(static=True)
    _found_programs: ClassVar[Programs | None] = None

    # Long, because a second frame would add a tenth to the time of the smallest call: everything that
    # runs at every call is here. `Flattener.flatten` is repeated inline for the two most frequent kinds
    # of argument, and so is `whole_result`.
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        programs = self._found_programs or self._programs()
        if kwargs:
            args, kwargs = to_positional(self.fn, args, kwargs)  # pyright: ignore[reportAssignmentType] (not P's)
        given: Any = args if programs.fn is not None else (self.fn, *args)
        keys: list[Any] = []
        leaves: list[Any] = []
        try:
            for x in given:
                cls = type(x)
                if cls is ArrayImpl:
                    keys.append(ARRAY)
                    leaves.append(x)
                elif (
                    cls in module_classes and type(flat := x._vernal_flat) is Flat and flat.fits(x)
                ):
                    keys.append(flat.key)
                    leaves.append(flat.arrays)
                else:
                    key, arrays = programs.flattener.flatten(x)
                    keys.append(key)
                    leaves.append(arrays)
            if kwargs:
                key, arrays = programs.flattener.flatten_keywords(kwargs)
                keys.append(key)
                leaves.append(arrays)
            program = programs.by_key.get(tuple(keys))
        except TypeError:
            error = _unhashable(self.fn, args, kwargs)
            if error is None:
                raise
            raise error from None
        if program is None:
            program = self._add_program(programs, given, kwargs, keys, leaves)
        try:
            out = program.run(*leaves)
            if program.attention:
                program.settle(leaves, out)
        except Exception as error:
            program.failed(error, leaves)
            raise
        return out[1].unflatten(out[0]) if type(out) is tuple else out

    def _add_program(
        self, programs: Programs, given: Any, kwargs: Any, keys: list[Any], leaves: list[Any]
    ) -> Program:
        call = as_call(programs.fn is None, given, kwargs)
        program = make_program(programs, self.settings, call, leaves)
        return programs.add(tuple(keys), program)

    def _flatten(
        self, args: Any, kwargs: Any, flattener: Flattener
    ) -> tuple[Any, Any, list[Any], list[Any]]:
        """`(given, kwargs, keys, leaves)` of a call that need not be fast."""
        if kwargs:
            args, kwargs = to_positional(self.fn, args, kwargs)
        given = (self.fn, *args) if self._programs().fn is None else args
        try:
            flat = [*map(flattener.flatten, given)]
            flat += [flattener.flatten_keywords(kwargs)] if kwargs else []
        except TypeError:
            error = _unhashable(self.fn, args, kwargs)
            if error is None:
                raise
            raise error from None
        return given, kwargs, [key for key, _ in flat], [leaves for _, leaves in flat]

    def _programs(self) -> Programs:
        # Cached outside the fields: flatten and unflatten drop it, and it is looked up again.
        programs = self._found_programs
        if programs is None:
            programs = programs_of(self.fn, self.settings)
            values: dict[str, Any] = self.__dict__  # pyright: ignore[reportAssignmentType] (an instance's)
            values["_found_programs"] = programs
        return programs

    @property
    def trace_count(self) -> int:
        """How often the function has been traced (and compiled, except for hits in JAX's own caches)."""
        return len(self._programs().traces)

    def explain(self) -> str:
        """Why the function was traced each time: one line per trace, with the place of the call,
        how long it took, and what had changed since the most similar earlier trace.

        Traces are counted over all `filter_jit` of one function, whatever their options.
        """
        return traces_of(self.fn).explain(callable_name(self.fn))

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Traces and lowers without compiling or running. `f.lower(...).compile()` compiles ahead of
        time: see `vernal.transforms.Compiled`.

        Args:
            *args: as for a call; `jax.ShapeDtypeStruct` may stand for arrays.
            **kwargs: likewise.

        Returns:
            The lowered program: `.as_text()`, `.compile()`.
        """
        programs = self._programs()
        is_dynamic = has_shape
        flat = self._flatten(args, kwargs, Flattener(is_dynamic))
        given, kwargs, keys, leaves = flat  # pyright: ignore[reportAssignmentType] (not P's)
        call = as_call(programs.fn is None, given, kwargs)
        program = programs.by_key.get(tuple(keys))
        if program is None:
            made = make_program(programs, self.settings, call, leaves, is_dynamic)
            program = programs.add(tuple(keys), made)
        try:
            lowered = program.jit.lower(*leaves)
        finally:
            program.finish(leaves)
        checks = program.look(leaves)

        def run(compiled: Any, args: Any, kwargs: Any) -> Any:
            # The caller has checked that the arguments have the structure that it was lowered for.
            leaves = self._flatten(args, kwargs, programs.flattener)[3]
            try:
                out = compiled(*leaves)
                wait(out, checks)
            except Exception as error:
                reraise(error)
                raise
            return whole_result(out)

        return Lowered(lowered, self.fn, (self.fn, *call[1:]), run)


@overload
def filter_jit(
    fun: Callable[P, T],
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
    fun: Any = None,
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

    Use it as `filter_jit(f)`, as a decorator (also of methods), or with options as
    `@filter_jit(donate="all")`. Arrays anywhere in the arguments are traced; everything else is
    static, and the function is compiled again when it changes. Calls are asynchronous, as with
    `jax.jit`, unless the program has a check (`vernal.runtime.error_if`), whose error the call raises.

    Args:
        fun: the function. If it is a module (or a method of one), its arrays are traced too.
        donate: whose memory the results may take over: `"all"` arguments, `"all-except-first"`, or
            `"none"`. `"warn"` and `"warn-except-first"` donate likewise and let JAX warn about
            buffers that it could not use. The arrays of the function itself are never donated: the next call needs
            them.
        in_shardings: a sharding, or a prefix of the tuple of positional arguments with shardings
            and None as leaves. Leaves that are not arrays are ignored.
        out_shardings: likewise, a prefix of the result.
        inline: as for `jax.jit`.
        keep_unused: as for `jax.jit`.
        compiler_options: passed to XLA.

    Returns:
        The compiled function, with `.lower(*args)`, `.trace_count` and `.explain()`.

    Raises:
        TypeError: if `fun` is not callable, or for options of `jax.jit` that do not apply here.
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
        raise type_error(
            f"filter_jit has no option `{name}`",
            where=f"filter_jit(fn, {name}=...)",
            expected="donate, in_shardings, out_shardings, inline, keep_unused or compiler_options",
            got=name,
            instead="leave static_argnums and static_argnames out: whatever is not an array is static already; "
            "in place of donate_argnums use donate='all' or 'all-except-first'",
        )
    check_donate("filter_jit", donate)
    options: dict[str, Any] = {}
    if inline:
        options["inline"] = True
    if keep_unused:
        options["keep_unused"] = True
    if compiler_options is not None:
        options["compiler_options"] = compiler_options
    settings = Settings(donate, in_shardings, out_shardings, options)

    def decorate(fn: Any) -> Any:
        check_callable(fn, "filter_jit")
        return wrap(_Jit(fn, settings))

    return decorate if fun is None else decorate(fun)
