"""`filter_checkpoint`: `jax.checkpoint` for functions of arbitrary Python objects."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax

from .._ground import as_arrays
from ..modules import field
from ..show import short, type_error
from ..trees import split
from ._transformed import Transformed, check_callable, inside, wrap

P = ParamSpec("P")
T = TypeVar("T")

Policy = Callable[..., bool]


class _Checkpoint(Transformed[P, T]):
    """What `filter_checkpoint` returns."""

    prevent_cse: bool = field(static=True)
    policy: Any = field(static=True)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        arrays, rest = split((self.fn, args, kwargs))
        run = jax.checkpoint(
            inside(self.fn, rest), prevent_cse=self.prevent_cse, policy=self.policy
        )
        out, out_rest = run(arrays)
        return out_rest.fill(as_arrays(out))


@overload
def filter_checkpoint(
    fun: Callable[P, T], *, prevent_cse: bool = True, policy: Policy | None = None
) -> _Checkpoint[P, T]: ...
@overload
def filter_checkpoint(
    *, prevent_cse: bool = True, policy: Policy | None = None
) -> Callable[[Callable[P, T]], _Checkpoint[P, T]]: ...
def filter_checkpoint(
    fun: Any = None, *, prevent_cse: bool = True, policy: Any = None, **refused: Any
) -> Any:
    """Saves memory in reverse mode by computing the function again when the gradient needs its
    intermediate results.

    Use it as `filter_checkpoint(f)`, as a decorator (also of methods), or with options. Arguments
    and results may be any Python objects.

    Args:
        fun: the function. If it is a module (or a method of one), its arrays are differentiated as
            usual.
        prevent_cse: whether to keep the compiler from merging the second computation with the
            first, which would save time but not memory. May be False inside `jax.lax.scan`, where
            that cannot happen.
        policy: which intermediate results to keep: one of `jax.checkpoint_policies`. By default
            none are kept.

    Returns:
        A function of the same arguments with the same results.

    Raises:
        TypeError: if `fun` or `policy` is not callable, or for options of `jax.checkpoint` that do not
            apply here.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> @vernal.filter_checkpoint(policy=jax.checkpoint_policies.dots_saveable)
        ... def layer(activation, x):
        ...     return activation(jnp.sin(x)), "any object"
        >>> y, text = layer(jax.nn.relu, jnp.array(0.0))
        >>> print(y, text)
        0.0 any object
    """
    if refused:
        name = next(iter(refused))
        raise type_error(
            f"filter_checkpoint has no option `{name}`",
            where=f"filter_checkpoint(fn, {name}=...)",
            expected="prevent_cse or policy",
            got=name,
            instead=f"leave `{name}` out: whatever is not an array is static already",
        )
    if policy is not None and not callable(policy):
        raise type_error(
            "the policy of filter_checkpoint must be a function",
            where="filter_checkpoint(fn, policy=...)",
            expected="one of jax.checkpoint_policies, or None",
            got=short(policy),
            instead="policy=jax.checkpoint_policies.dots_saveable",
        )

    def decorate(fn: Any) -> Any:
        check_callable(fn, "filter_checkpoint")
        return wrap(_Checkpoint(fn, prevent_cse, policy))

    return decorate if fun is None else decorate(fun)
