"""Compiling ahead of time: what `filter_jit(f).lower(...)` and `.compile()` return."""

from collections.abc import Callable
from typing import Any

from .._ground import callable_name
from ..show import diff, diff_text, type_error
from ._boundary import to_positional


class Lowered:
    """A function that has been traced and lowered, but not compiled: `filter_jit(f).lower(...)`.

    Args:
        lowered: the `jax.stages.Lowered` of the program over flat arrays.
        fn: the user's function.
        call: the `(fn, args, kwargs)` that it was lowered for.
        run: runs a compiled program on `(args, kwargs)`.
    """

    def __init__(
        self,
        lowered: Any,
        fn: Callable[..., Any],
        call: Any,
        run: Callable[[Any, Any, Any], Any],
    ):
        self.lowered = lowered
        self._fn = fn
        self._call = call
        self._run = run

    def as_text(self, dialect: str | None = None) -> str:
        """The program as text.

        Args:
            dialect: as for `jax.stages.Lowered.as_text`; by default StableHLO.

        Returns:
            The text.
        """
        return self.lowered.as_text(dialect)

    def cost_analysis(self) -> Any:
        """XLA's estimate of the program's operations and memory traffic, by name."""
        return self.lowered.cost_analysis()

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        """Compiles the program.

        Args:
            compiler_options: passed to XLA.

        Returns:
            A callable that takes the arguments of the function.
        """
        return Compiled(self.lowered.compile(compiler_options), self._fn, self._call, self._run)


class Compiled:
    """A function that was compiled ahead of time: `filter_jit(f).lower(...).compile()`.

    Use it to compile before a deadline, or to see how much memory and time a program needs. Shapes are
    enough to lower it (`jax.ShapeDtypeStruct`, or a model made by `filter_eval_shape`). From call to
    call only the values of arrays may change.

    Args:
        compiled: the `jax.stages.Compiled` of the program over flat arrays.
        fn: the user's function.
        call: the `(fn, args, kwargs)` that it was lowered for.
        run: runs a compiled program on `(args, kwargs)`.

    Raises:
        TypeError: at a call with arguments of another structure, shape, dtype or static value.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> model = vernal.nn.Linear(3, 2, key=jax.random.key(0))
        >>> batch = jax.ShapeDtypeStruct((8, 3), jnp.float32)
        >>> predict = vernal.filter_jit(lambda model, x: model(x)).lower(model, batch).compile()
        >>> predict.memory_analysis().output_size_in_bytes  # 8 * 2 * 4
        64
        >>> predict(model, jnp.ones((8, 3))).shape
        (8, 2)
    """

    def __init__(
        self,
        compiled: Any,
        fn: Callable[..., Any],
        call: Any,
        run: Callable[[Any, Any, Any], Any],
    ):
        self.compiled = compiled
        self._fn = fn
        self._call = call
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program on arguments of the structure, shapes, dtypes and static values that it
        was lowered for."""
        args, kwargs = to_positional(self._fn, args, kwargs)
        differences = diff(self._call[1:], (args, kwargs))
        if differences:
            raise type_error(
                f"`{callable_name(self._fn)}` was compiled for different arguments",
                where="a call of lower(...).compile()",
                expected="arguments like those given to lower",
                got=diff_text(self._call[1:], (args, kwargs)),
                instead="lower and compile again for these arguments, or call the filter_jit function",
            )
        return self._run(self.compiled, args, kwargs)

    def as_text(self) -> str:
        """The optimised program as text."""
        return self.compiled.as_text()

    def cost_analysis(self) -> Any:
        """XLA's count of the program's operations and memory traffic, by name."""
        return self.compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        """XLA's account of the program's memory, in bytes."""
        return self.compiled.memory_analysis()
