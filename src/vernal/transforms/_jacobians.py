"""`filter_jacfwd`, `filter_jacrev`, `filter_hessian`: all derivatives of all outputs."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import callable_name
from ..show import path_text, short, type_error
from ..trees import Rest, is_array_like, is_inexact_array_like, split
from ._derivatives import Call, Derivative, assemble, decorator, flatten_call, value_and_aux
from ._summed_losses import refuse_sum_over_devices
from ._wrt import Wrt, is_several

P = ParamSpec("P")
T = TypeVar("T")

_IN_JAX = {
    "filter_jacfwd": jax.jacfwd,
    "filter_jacrev": jax.jacrev,
    "filter_hessian": jax.hessian,
}


def _is_complex(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.complexfloating)


def _check_inputs(call: Call, transform: str) -> None:
    for target in call.targets:
        paths = [path for path, _ in jtu.tree_flatten_with_path(target.tree)[0]]
        for path, slot in zip(paths, target.slots, strict=True):
            if slot is not None and _is_complex(call.arrays[slot]):
                raise type_error(
                    f"{transform} of `{callable_name(call.fn)}`: a differentiated argument is complex",
                    where=f"argument `{path_text(path, target.name)}`",
                    expected="real floating-point arrays",
                    got=short(call.arrays[slot]),
                    instead="pass real and imaginary parts as two arrays, or leave it out of wrt; filter_jacrev "
                    "takes complex inputs where the outputs are real",
                )


def _is_integer(x: Any) -> bool:
    return is_array_like(x) and jnp.issubdtype(jnp.asarray(x).dtype, jnp.integer)


def _outputs(fn: Any, value: Any, transform: str, *, integers: bool) -> tuple[list[Any], Rest]:
    """The leaves of the output as arrays, and the rest of the output."""
    found, treedef = jtu.tree_flatten_with_path(value)
    for path, leaf in found or [((), value)]:
        if not is_inexact_array_like(leaf) and not (integers and _is_integer(leaf)):
            raise type_error(
                f"{transform}: an output of `{callable_name(fn)}` has no derivative",
                where=path_text(path, "output"),
                expected="floating-point arrays only",
                got=short(leaf),
                instead="return it as the second part of a pair, and use has_aux=True",
            )
        if transform != "filter_jacfwd" and _is_complex(leaf):
            raise type_error(
                f"{transform}: an output of `{callable_name(fn)}` is complex",
                where=path_text(path, "output"),
                expected="real floating-point arrays",
                got=short(leaf),
                instead="return jnp.real(y) and jnp.imag(y), or use filter_jacfwd",
            )
    return split(treedef.unflatten([jnp.asarray(leaf) for _, leaf in found]))


class _Jacobian(Derivative[P, T]):
    """What `filter_jacfwd`, `filter_jacrev` and `filter_hessian` return."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        fn, has_aux, transform = self.fn, self.has_aux, self.transform
        call = flatten_call(fn, args, kwargs, self.wrt.value, transform)
        if transform != "filter_jacrev":
            _check_inputs(call, transform)

        def run(chosen: list[Any]) -> Any:
            value, aux = value_and_aux(fn, call.run(chosen), has_aux, transform)
            # In Equinox, integers change by zeros in forward mode.
            integers = self.missing is None and transform == "filter_jacfwd"
            arrays, rest = _outputs(fn, value, transform, integers=integers)
            if transform != "filter_jacfwd" and self.missing is not None:
                refuse_sum_over_devices(fn, arrays, chosen, transform)
            return arrays, (rest, split(aux))

        run.__name__ = run.__qualname__ = callable_name(fn)
        rows, (rest, (aux, aux_rest)) = _IN_JAX[transform](run, has_aux=True)(call.chosen())
        outline = call.outline()

        def gather(values: list[Any]) -> Any:
            trees = assemble(outline, values, self.missing)
            return trees if is_several(self.wrt.value) else trees[0]

        if transform == "filter_hessian":
            rows = [[gather(second) for second in first] for first in rows]
        found = rest.fill([gather(row) for row in rows])
        result: Any = (found, aux_rest.fill(aux)) if has_aux else found
        return result


@overload
def filter_jacfwd(
    fn: Callable[P, Any], *, has_aux: bool = False, wrt: Wrt | None = None
) -> _Jacobian[P, Any]: ...
@overload
def filter_jacfwd(
    *, has_aux: bool = False, wrt: Wrt | None = None
) -> Callable[[Callable[P, Any]], _Jacobian[P, Any]]: ...
def filter_jacfwd(fn: Any = None, *, has_aux: bool = False, wrt: Any = None, **refused: Any) -> Any:
    """The Jacobian by forward mode: one pass for each input number.

    Use it for few inputs, and `filter_jacrev` for few outputs: as `filter_jacfwd(f)`, as a decorator
    (also of methods), or with options.

    Args:
        fn: the function. It returns a tree of floating-point arrays.
        has_aux: whether it returns a pair `(output, aux)` instead. `aux` may be any Python object.
        wrt: what to differentiate, as for `filter_grad`: by default the first argument. Real
            numbers only.

    Returns:
        A function of the same arguments that returns the Jacobian, or `(jacobian, aux)`. The
        Jacobian is the output with every array replaced by a tree with the structure of the
        differentiated argument (a tuple of trees for a tuple). That tree has arrays of shape
        `output.shape + input.shape`, and `vernal.NoGradient` at every leaf that is not
        differentiated.

    Raises:
        TypeError: if `fn` is not callable, for options of `jax.jacfwd` that do not apply here, or for
            an invalid `wrt`; at a call, if what is to be differentiated has no floating-point array
            or is complex, or if `fn` does not return what it should.
        ValueError: at a call, if `wrt` names an argument that does not exist, or the same one twice.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> def f(x, power):
        ...     return {"y": jnp.stack([x**power, 2 * x])}
        >>> vernal.filter_jacfwd(f)(jnp.float32(3.0), 2)
        {'y': Array([6., 2.], dtype=float32)}
    """
    return decorator(_Jacobian, "filter_jacfwd", fn, has_aux, wrt, refused)


@overload
def filter_jacrev(
    fn: Callable[P, Any], *, has_aux: bool = False, wrt: Wrt | None = None
) -> _Jacobian[P, Any]: ...
@overload
def filter_jacrev(
    *, has_aux: bool = False, wrt: Wrt | None = None
) -> Callable[[Callable[P, Any]], _Jacobian[P, Any]]: ...
def filter_jacrev(fn: Any = None, *, has_aux: bool = False, wrt: Any = None, **refused: Any) -> Any:
    """The Jacobian by reverse mode: one pass for each output number.

    Use it for few outputs, and `filter_jacfwd` for few inputs.

    Args:
        fn: as for `filter_jacfwd`. Its outputs are real; inputs may be complex.
        has_aux: as for `filter_jacfwd`.
        wrt: as for `filter_jacfwd`.

    Returns:
        As for `filter_jacfwd`.

    Raises:
        TypeError: as for `filter_jacfwd`.
        ValueError: as for `filter_jacfwd`; inside `shard_map`, if an output differs between devices but one of the
            differentiated arrays does not.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> @vernal.filter_jacrev(wrt=(0, "y"))
        ... def multiply(x, y):
        ...     return x * y
        >>> multiply(jnp.float32(3.0), y=jnp.float32(4.0))
        (Array(4., dtype=float32), Array(3., dtype=float32))
    """
    return decorator(_Jacobian, "filter_jacrev", fn, has_aux, wrt, refused)


@overload
def filter_hessian(
    fn: Callable[P, Any], *, has_aux: bool = False, wrt: Wrt | None = None
) -> _Jacobian[P, Any]: ...
@overload
def filter_hessian(
    *, has_aux: bool = False, wrt: Wrt | None = None
) -> Callable[[Callable[P, Any]], _Jacobian[P, Any]]: ...
def filter_hessian(
    fn: Any = None, *, has_aux: bool = False, wrt: Any = None, **refused: Any
) -> Any:
    """The second derivatives, by forward mode over reverse mode.

    Args:
        fn: as for `filter_jacfwd`, with real inputs and outputs.
        has_aux: as for `filter_jacfwd`.
        wrt: as for `filter_jacfwd`.

    Returns:
        As for `filter_jacfwd`, with a second tree of the same kind in place of every array: for
        arrays `x` and `y` in a dictionary, `hessian["x"]["y"]` has shape
        `output.shape + x.shape + y.shape`.

    Raises:
        TypeError: as for `filter_jacfwd`.
        ValueError: as for `filter_jacrev`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> hessian = vernal.filter_hessian(lambda p: p["x"] ** 3 * p["y"])
        >>> hessian({"x": jnp.float32(1.0), "y": jnp.float32(2.0)})["x"]
        {'x': Array(12., dtype=float32), 'y': Array(3., dtype=float32)}
    """
    return decorator(_Jacobian, "filter_hessian", fn, has_aux, wrt, refused)
