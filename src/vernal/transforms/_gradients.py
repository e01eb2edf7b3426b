"""`filter_grad` and `filter_value_and_grad`: gradients with respect to trees of arbitrary Python
objects."""

from collections.abc import Callable
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from .._ground import callable_name
from ..show import short, type_error
from ..trees import Rest, is_array_like, split
from ._derivatives import Derivative, assemble, decorator, flatten_call, value_and_aux
from ._placement import advise_to_place
from ._summed_losses import refuse_sum_over_devices
from ._wrt import Wrt, is_several

P = ParamSpec("P")
T = TypeVar("T")
X = TypeVar("X")
V = TypeVar("V")
A = TypeVar("A")


def _check_loss(fn: Any, value: Any, has_aux: bool, transform: str) -> Any:
    """The loss as an array. Refuses anything but one real floating-point number."""
    array = jnp.asarray(value) if is_array_like(value) else None
    if array is not None and array.shape == () and jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if array is None:
        problem = "is not an array"
        instead = "return one number"
        if isinstance(value, (tuple, list)) and len(value) == 2 and not has_aux:
            instead = "to return more than the loss, use has_aux=True"
    elif array.shape != ():
        problem = f"has shape {array.shape}"
        instead = "reduce it with jnp.mean or jnp.sum; for the derivative of each element, use filter_jacrev"
    elif jnp.issubdtype(array.dtype, jnp.complexfloating):
        problem = "is complex"
        instead = "return a real number: jnp.real(loss), or jnp.abs(loss) ** 2"
    else:
        problem = f"has dtype {array.dtype}"
        instead = "compute it with floating-point arrays; counts and comparisons have no gradient"
    raise type_error(
        f"the loss `{callable_name(fn)}` {problem}, so it has no gradient",
        where=f"{transform}({callable_name(fn)})",
        expected="a real floating-point scalar",
        got=short(value),
        instead=instead,
    )


class _ValueAndGrad(Derivative[P, T]):
    """What `filter_value_and_grad` returns."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: Any = self._value_and_grad(args, kwargs)
        return result

    def _value_and_grad(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """`(value, gradient)`, or `((value, aux), gradient)`."""
        fn, has_aux, transform = self.fn, self.has_aux, self.transform
        call = flatten_call(
            fn, args, kwargs, self.wrt.value, transform, may_be_nothing=self.missing is None
        )

        def loss(chosen: list[Any]) -> tuple[Any, tuple[list[Any], Rest]]:
            value, aux = value_and_aux(fn, call.run(chosen), has_aux, transform)
            array = _check_loss(fn, value, has_aux, transform)
            # In `vernal.compat`, as in JAX, a number stays one, and sums over devices are differentiated.
            if self.missing is None:
                return value, split(aux)
            refuse_sum_over_devices(fn, [array], chosen, transform)
            return array, split(aux)

        loss.__name__ = loss.__qualname__ = callable_name(fn)
        differentiate = jax.value_and_grad(loss, has_aux=True)
        try:
            (value, (aux, aux_rest)), found = differentiate(call.chosen())
        except Exception as error:
            advise_to_place(error, call.chosen())
            raise
        trees = assemble(call.outline(), found, self.missing)
        gradient = trees if is_several(self.wrt.value) else trees[0]
        return ((value, aux_rest.fill(aux)) if has_aux else value), gradient


class _Grad(_ValueAndGrad[P, T]):
    """What `filter_grad` returns."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        value, gradient = self._value_and_grad(args, kwargs)
        result: Any = (gradient, value[1]) if self.has_aux else gradient
        return result


@overload
def filter_grad(
    fn: Callable[Concatenate[X, P], Any], *, has_aux: Literal[False] = False, wrt: None = None
) -> _Grad[Concatenate[X, P], X]: ...
@overload
def filter_grad(
    fn: Callable[Concatenate[X, P], tuple[Any, A]], *, has_aux: Literal[True], wrt: None = None
) -> _Grad[Concatenate[X, P], tuple[X, A]]: ...
@overload
def filter_grad(
    fn: Callable[P, Any], *, has_aux: bool = False, wrt: Wrt | None = None
) -> _Grad[P, Any]: ...
@overload
def filter_grad(
    *, has_aux: bool = False, wrt: Wrt | None = None
) -> Callable[[Callable[P, Any]], _Grad[P, Any]]: ...
def filter_grad(fn: Any = None, *, has_aux: bool = False, wrt: Any = None, **refused: Any) -> Any:
    """The gradient of a scalar function with respect to the floating-point arrays of an argument.

    Use it as `filter_grad(f)`, as a decorator (also of methods), or with options as
    `@filter_grad(wrt=...)`. The arguments may be any Python objects, passed by position or by
    keyword. Frozen arrays (see `vernal.freeze`) are not differentiated, whatever `wrt` is.

    Args:
        fn: the function. It returns a real floating-point scalar.
        has_aux: whether it returns a pair `(loss, aux)` instead. `aux` may be any Python object.
        wrt: what to differentiate. By default the first argument; else the number of a positional
            argument, the name of an argument, a tuple of numbers and names, a function that picks
            nodes of the first argument (`lambda model: model.layers[-1]`, or a tuple of nodes; like
            `where` of `tree_at` it cannot look at values), or a tree of bools for the first argument,
            such as `vernal.trainable` makes.

    Returns:
        A function of the same arguments that returns the gradient, or `(gradient, aux)`. The
        gradient has the structure of the argument, with `vernal.NoGradient` at every leaf that is not
        differentiated, as in `vernal.params(argument)`. For a tuple of arguments it is a tuple of
        gradients; for a function that picks nodes it has the structure of the first argument, with
        `NoGradient` outside the picked nodes. The gradient of a complex array follows JAX's
        convention: for gradient descent, take its conjugate.

    Raises:
        TypeError: if `fn` is not callable, for options of `jax.grad` that do not apply here, or for
            a `wrt` that is none of the above; at a call, if what is to be differentiated has no
            floating-point array, or all are frozen, or if `fn` does not return what it should.
        ValueError: at a call, if `wrt` names an argument that does not exist, or the same argument
            twice, or if a tree of bools does not fit; inside `shard_map`, if the loss differs between
            devices but one of the differentiated arrays does not: return `jax.lax.pmean(loss, axis)`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> def loss(params, x):
        ...     return jnp.sum(params["act"](params["w"] * x))
        >>> params = {"act": jnp.square, "w": jnp.array([1.0, 2.0]), "steps": 3}
        >>> vernal.filter_grad(loss)(params, jnp.array([1.0, 3.0]))
        {'act': NoGradient(), 'steps': NoGradient(), 'w': Array([ 2., 36.], dtype=float32)}
        >>> vernal.filter_grad(loss, wrt="x")(params, jnp.array([1.0, 3.0]))
        Array([ 2., 24.], dtype=float32)
    """
    return decorator(_Grad, "filter_grad", fn, has_aux, wrt, refused)


@overload
def filter_value_and_grad(
    fn: Callable[Concatenate[X, P], V], *, has_aux: Literal[False] = False, wrt: None = None
) -> _ValueAndGrad[Concatenate[X, P], tuple[V, X]]: ...
@overload
def filter_value_and_grad(
    fn: Callable[Concatenate[X, P], tuple[V, A]], *, has_aux: Literal[True], wrt: None = None
) -> _ValueAndGrad[Concatenate[X, P], tuple[tuple[V, A], X]]: ...
@overload
def filter_value_and_grad(
    fn: Callable[P, V], *, has_aux: bool = False, wrt: Wrt | None = None
) -> _ValueAndGrad[P, tuple[Any, Any]]: ...
@overload
def filter_value_and_grad(
    *, has_aux: bool = False, wrt: Wrt | None = None
) -> Callable[[Callable[P, Any]], _ValueAndGrad[P, tuple[Any, Any]]]: ...
def filter_value_and_grad(
    fn: Any = None, *, has_aux: bool = False, wrt: Any = None, **refused: Any
) -> Any:
    """The value and the gradient of a scalar function, computed together.

    Args:
        fn: as for `filter_grad`.
        has_aux: as for `filter_grad`.
        wrt: as for `filter_grad`.

    Returns:
        A function of the same arguments that returns `(value, gradient)`, or
        `((value, aux), gradient)`; the gradient is as for `filter_grad`.

    Raises:
        TypeError: as for `filter_grad`.
        ValueError: as for `filter_grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> @vernal.filter_value_and_grad(has_aux=True)
        ... def loss(x):
        ...     return x**2, "any object"
        >>> (value, aux), gradient = loss(jnp.array(3.0))
        >>> print(value, aux, gradient)
        9.0 any object 6.0
    """
    return decorator(_ValueAndGrad, "filter_value_and_grad", fn, has_aux, wrt, refused)
