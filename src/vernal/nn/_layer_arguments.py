"""Checks of the arguments of layers, whose errors say which one was wrong.

Layers take batch axes in front of an example; in an expected shape they are written `...`.
"""

from collections.abc import Mapping, Sequence, Set
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._ground import concrete_value
from ..show import is_traced, short, type_error, value_error

Axis = int | str | tuple[str, Any] | EllipsisType
"""One axis of an expected shape: an exact size, the name of an axis of any size, or a name and its
size. As the first of them, `...` stands for any number of batch axes."""
Shape = Sequence[Any]
"""Integers, or the symbolic sizes of a program for export."""


def _size(axis: Axis) -> int | None:
    if isinstance(axis, int):
        return axis
    return axis[1] if isinstance(axis, tuple) else None


def _axis_text(axis: Axis) -> str:
    if axis is ...:
        return "..."
    return f"{axis[0]}={axis[1]}" if isinstance(axis, tuple) else str(axis)


def _tuple_text(items: Sequence[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def fits(shape: Shape, expected: Sequence[Axis]) -> bool:
    """Whether a shape is the expected one."""
    if expected and expected[0] is ...:
        expected = expected[1:]
        shape = shape[max(0, len(shape) - len(expected)) :]
    return len(shape) == len(expected) and all(
        _size(axis) in (None, n) for n, axis in zip(shape, expected, strict=True)
    )


def wrong_shape(
    layer: str,
    shape: Shape,
    expected: Sequence[Axis],
    argument: str = "x",
    instead: str | None = None,
) -> ValueError:
    """The error of a layer that was given an array of the wrong shape. `expected` is the shape of one example,
    after `...` if there may be batch axes."""
    return value_error(
        f"`{layer}` was given an input of the wrong shape",
        where=f"argument `{argument}`",
        expected=_tuple_text([_axis_text(axis) for axis in expected]) if expected else "()",
        got=str(tuple(shape)),
        instead=instead,
    )


def as_array(layer: Any, x: Any) -> jax.Array:
    """The input of a layer as an array. Refuses several arrays that NumPy would combine into one, such as the pair that
    a recurrent layer returns."""
    refuse_no_array(type(layer).__name__, x, "x")
    return jnp.asarray(x)


def refuse_no_array(layer: str, x: Any, argument: str) -> None:
    """Refuses what is not an array: several of them, None, a string."""
    if x is None or isinstance(x, str | bytes | Mapping | Set):
        raise type_error(
            f"`{layer}` was not given an array",
            where=f"argument `{argument}`",
            expected="an array",
            got=short(x),
            instead="a function before it that returns its result" if x is None else None,
        )
    if isinstance(x, (tuple, list)):
        raise type_error(
            f"`{layer}` was given several values in place of one array",
            where=f"argument `{argument}`",
            expected="an array",
            got=short(x),
            instead="call it with one of them; a recurrent layer returns its outputs and its last state"
            if any(isinstance(part, jax.Array | np.ndarray) for part in jax.tree.leaves(x))
            else f"jnp.asarray({argument})",
        )


def check_shape(
    layer: str, x: Any, expected: Sequence[Axis], argument: str = "x"
) -> tuple[Any, ...]:
    """Refuses an input whose shape is not the expected one; the arguments are those of
    `wrong_shape`. Returns the batch axes, which `...` stands for."""
    refuse_no_array(layer, x, argument)
    shape = np.shape(x)
    if not fits(shape, expected):
        raise wrong_shape(layer, shape, expected, argument)
    return shape[: len(shape) - len(expected) + 1] if ... in expected else ()


def check_size(layer: str, argument: str, value: Any, minimum: int = 1, words: str = "") -> int:
    """A size given to a constructor, as a Python integer of at least `minimum`. `words` says what else the layer
    takes."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < minimum:
        raise value_error(
            f"`{layer}` was given a wrong size",
            where=f"argument `{argument}`",
            expected=f"an integer of at least {minimum}{words}",
            got=short(value),
        )
    return int(value)


def known_value(x: Any) -> np.ndarray | None:
    """The value of an array or a number; None if it is traced, or spread over several processes."""
    if isinstance(x, jax.Array):
        x = concrete_value(x)
        if x is None or not (x.is_fully_addressable or x.is_fully_replicated):
            return None
    return np.asarray(x)


def as_number(layer: str, argument: str, value: Any, expected: str) -> Any:
    """A setting that is one number, as a Python number: then it is structure, which optimisers do not see. A traced one
    stays an array, for a field that is declared `trainable=False`."""
    if isinstance(value, bool | int | float | complex | np.generic | np.ndarray | jax.Array):
        dtype = value.dtype if isinstance(value, jax.Array) else np.asarray(value).dtype
        number = jnp.issubdtype(dtype, np.number) or jnp.issubdtype(dtype, np.bool)
        if number and np.ndim(value) == 0:
            # The value of a tracer, where it has one, would be without its derivative.
            known = None if is_traced(value) else known_value(value)
            return value if known is None else known.item()
    raise value_error(
        f"`{layer}` was not given a number",
        where=f"argument `{argument}`",
        expected=expected,
        got=short(value),
    )


def check_eps(layer: str, eps: Any) -> Any:
    """The number that keeps a norm from dividing by zero."""
    eps = as_number(layer, "eps", eps, "a number of at least 0")
    if not isinstance(eps, jax.Array) and not (isinstance(eps, int | float) and eps >= 0):
        raise value_error(
            f"`{layer}` was given a wrong `eps`",
            where="argument `eps`",
            expected="a number of at least 0",
            got=short(eps),
        )
    return eps


def as_flag(layer: str, argument: str, value: Any, instead: str | None = None) -> bool:
    """A flag as a Python bool. Its two values make different programs, so it cannot be traced; a string is not one,
    because any would be true."""
    if isinstance(value, bool | int | np.generic | np.ndarray | jax.Array):
        try:
            return bool(value)
        except jax.errors.TracerBoolConversionError:
            pass
    raise type_error(
        f"`{argument}` of `{layer}` must be True or False, known while tracing",
        where=f"`{argument}` of {layer}",
        expected="True or False",
        got=short(value),
        instead=instead,
    )


def check_parameter(layer: str, name: str, value: Any, shape: Shape) -> None:
    """Refuses a parameter that does not fit the others, which `vernal.tree_at` may have put in: it would be
    broadcast."""
    if value.shape != tuple(shape):
        raise _wrong_parameter(layer, name, value, shape, str(tuple(shape)))


_KINDS = {
    jnp.floating: "floating-point numbers",
    jnp.complexfloating: "complex numbers",
    jnp.inexact: "floating-point or complex numbers",
}


def check_kind(layer: str, name: str, value: Any, kind: Any) -> None:
    """Refuses a parameter of another kind of numbers, such as integers, to which its next value would be rounded."""
    if not jnp.issubdtype(value.dtype, kind):
        raise value_error(
            f"a parameter of `{layer}` has the wrong dtype",
            where=f"`{name}` of {layer}",
            expected=_KINDS[kind],
            got=short(value),
        )


def check_real(layer: str, name: str, value: Any, x: Any) -> None:
    """Refuses a complex parameter for a real input, where the output has the dtype of the input."""
    if jnp.iscomplexobj(value) and not jnp.iscomplexobj(x):
        check_kind(layer, name, value, jnp.floating)


def check_count(layer: str, name: str, value: Any) -> None:
    """Refuses dtypes that cannot count: all but integers, and narrow ones, which overflow."""
    if not jnp.issubdtype(value.dtype, jnp.integer) or value.dtype.itemsize < 4:
        raise value_error(
            f"a number of `{layer}` would overflow, or be rounded, in its dtype",
            where=f"`{name}` of {layer}",
            expected="integers of at least 32 bits",
            got=short(value),
        )


def check_weight(layer: str, weight: Any, expected: Sequence[Axis]) -> None:
    """Refuses a weight with other axes than the layer has, such as the stacked weights of an ensemble."""
    if not fits(weight.shape, expected):
        text = _tuple_text([_axis_text(axis) for axis in expected])
        raise _wrong_parameter(layer, "weight", weight, expected, text)


def _wrong_parameter(
    layer: str, name: str, value: Any, expected: Sequence[Any], text: str
) -> ValueError:
    ensemble = value.ndim > len(expected) and fits(
        value.shape[value.ndim - len(expected) :], expected
    )
    return value_error(
        f"a parameter of `{layer}` has the wrong shape",
        where=f"`{name}` of {layer}",
        expected=text,
        got=str(value.shape),
        instead="for an ensemble, vernal.filter_vmap(lambda model, x: model(x), in_axes=(0, None))(models, x)"
        if ensemble
        else None,
    )


def per_dim(layer: str, argument: str, value: Any, n: int, minimum: int = 1) -> tuple[int, ...]:
    """One integer for each of `n` spatial dimensions, from one integer for all of them or a
    sequence of `n`."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * n
    if len(values) != n or not all(
        isinstance(v, int | np.integer) and v >= minimum for v in values
    ):
        raise value_error(
            f"`{layer}` was given wrong sizes for its {n} spatial dimensions",
            where=f"argument `{argument}`",
            expected=f"an integer of at least {minimum}, or a sequence of {n} of them",
            got=short(value),
        )
    return tuple(int(v) for v in values)


def padding_pairs(layer: str, value: Any, n: int, words: str = "") -> tuple[tuple[int, int], ...]:
    """`(before, after)` for each of `n` spatial dimensions, from one integer for all, `n` integers, or `n` pairs.
    Negative numbers crop. `words` says what else the layer takes."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * n
    pairs = [tuple(v) if isinstance(v, Sequence) else (v, v) for v in values]
    if len(pairs) != n or not all(
        len(pair) == 2 and all(isinstance(v, int | np.integer) for v in pair) for pair in pairs
    ):
        raise value_error(
            f"`{layer}` was given a padding that does not fit its {n} spatial dimensions",
            where="argument `padding`",
            expected=f"an integer, a sequence of {n} integers, or of {n} pairs (before, after){words}",
            got=short(value),
        )
    return tuple((int(before), int(after)) for before, after in pairs)


def image_shape(channels: Axis, n: int) -> tuple[Axis, ...]:
    """The expected shape `(..., channels, *spatial)` of the input of a layer over `n` spatial dimensions."""
    names = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
    return (..., channels, *names.get(n, tuple(f"dim_{i}" for i in range(n))))


def check_window_fits(
    layer: str,
    spatial: Sequence[int],
    padding: Sequence[tuple[int, int]],
    window: Sequence[int],
) -> None:
    """Refuses an input that is smaller than the window sliding over it: the output would be
    empty."""
    padded = [n + before + after for n, (before, after) in zip(spatial, padding, strict=True)]
    if any(n < w for n, w in zip(padded, window, strict=True)):
        raise value_error(
            f"`{layer}` was given an input smaller than its kernel, so that nothing would come out",
            where="argument `x`",
            expected=f"spatial sizes of at least {tuple(window)}, padding and dilation included",
            got=f"{tuple(padded)}",
            instead="a larger input, a smaller kernel, or padding",
        )
