"""The error for a traced value in a shape: which value, from which argument, and what to write
instead.

JAX raises several kinds of `TypeError` for this, some of them far from the cause and without a
name. The function is traced once more, as a function of its arrays alone, so that JAX's report of
where the value came from can be given with the user's argument names.
"""

import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._ground import callable_name
from ..show import message
from ..trees import Rest
from ._boundary import argument_text
from ._place import is_users_frame

# The name of the arrays in JAX's report of which of them a value depends on.
_PARAMETER = "vernal_array"
_ORIGIN = re.compile(_PARAMETER + r"\[(\d+)\]")
_SHAPE_TEXT = re.compile(
    r"Shapes must be 1D sequences of concrete values|Shapes must be 1D sequences of integer scalars"
    r"|interpreted as an integer|integer conversion|with the `int` function|__index__"
    r"|jnp\.\w+ argument|argument of jnp\.\w+"
)
_VALUE = re.compile(r"(?:Traced<|Tracer<|of type |got \(?)?((?:u?int|float|bool)\d*\[[^\]]*\])")


class TracedShapeError(TypeError):
    """A value that is only known when the compiled program runs was used where a shape needs a
    Python integer.

    Compute sizes with Python's `min`, `max` and `int`, from shapes and static arguments. Shapes are
    fixed when a function is traced, and a size that is computed with `jnp.minimum`, `jnp.maximum` or
    from an array argument is not known then.

    Args:
        text: the message.
        origins: the arguments that the value was computed from, as far as they are known.
    """

    def __init__(self, text: str, origins: Sequence[str] = ()):
        super().__init__(text)
        self.origins = tuple(origins)


def is_shape_error(error: Exception) -> bool:
    """Whether an error is about a traced value where a Python integer is needed."""
    if isinstance(error, TracedShapeError):
        # Explained by an inner transformed function. If the value came to that one through a closure,
        # only the outer one can say from where.
        return not error.origins
    if isinstance(error, jax.errors.TracerIntegerConversionError):
        return True
    return (
        isinstance(error, TypeError)
        and _SHAPE_TEXT.search(str(error)) is not None
        and ("Trace" in str(error) or isinstance(error, jax.errors.ConcretizationTypeError))
    )


def _first_cause(error: BaseException) -> BaseException:
    """The error that JAX itself raised."""
    while isinstance(error, TracedShapeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _user_line(error: BaseException) -> str | None:
    """The line of the user's code where the error was raised."""
    own = [at for at in traceback.walk_tb(error.__traceback__) if is_users_frame(at[0])]
    if not own:
        return None
    (last,) = traceback.StackSummary.extract([own[-1]])
    return f"{os.path.basename(last.filename)}:{last.lineno} in {last.name}: `{last.line}`"


def _origins(fn: Callable[..., Any], rest: Rest, arrays: list[Any]) -> list[str]:
    """The arguments that the offending value was computed from, by the user's names."""

    def again(*vernal_array: Any) -> Any:
        called, args, kwargs = rest.fill(vernal_array)
        (fn if called is None else called)(*args, **kwargs)

    paths = rest.paths()
    try:
        jax.make_jaxpr(again)(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])
    except Exception as error:
        found = sorted({int(i) for i in _ORIGIN.findall(str(_first_cause(error)))})
        return [argument_text(fn, paths[i]) for i in found if i < len(paths)]
    return []


def explain(
    error: Exception, fn: Callable[..., Any], rest: Rest, arrays: list[Any]
) -> TracedShapeError:
    """The error to raise in place of JAX's. It names the function, the line, the value and the arguments it depends
    on: `arrays` are the traced ones that fill `rest`, the structure of `(fn, args, kwargs)`."""
    origins = _origins(fn, rest, arrays)
    cause = _first_cause(error)
    value = _VALUE.search(str(cause))
    got = f"a traced {value.group(1)}" if value else "a traced value"
    if origins:
        got += ", computed from the argument" + ("s " if len(origins) > 1 else " ")
        got += ", ".join(f"`{name}`" for name in origins)
    # If one of Vernal's functions refused the value, the frames of JAX's error end in that function.
    line = _user_line(cause) or _user_line(error)
    return TracedShapeError(
        message(
            f"`{callable_name(fn)}`: a traced value was used as a shape or another Python integer",
            where=line,
            expected="a Python int, known while tracing",
            got=got,
            instead="compute sizes with Python's `min`, `max` and `int` instead of `jnp.minimum` and the "
            "like, from `x.shape` and Python numbers; or pass the size as a Python int, which is static",
        ),
        origins,
    )
