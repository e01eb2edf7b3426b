"""`NoGradient`: the placeholder in a tree of gradients for leaves that were not differentiated.

Zeros would not work: weight decay and averages change a parameter whose gradient is zero. None would
not work either: combining such a tree with a whole model raises JAX's own error, which does not say
what to do. So this is a class of ours, a pytree without leaves. Two trees that hold it in the same
places add, scale, clip and average like any others. If only one of them holds it, JAX prints this
class in its error, or passes it to an operator; both say what to write instead.
"""

from typing import Any, NoReturn

import jax.tree_util as jtu

from ..show import type_error

_INSTEAD = (
    "make zeros, averages and optimiser states from `vernal.params(model)` instead of `model`, "
    "and update a model with `vernal.apply_updates(model, updates)`"
)


class _Told(type):
    """Makes JAX's errors about mismatched trees, which show their classes, say what to do."""

    def __repr__(cls) -> str:
        return (
            "<class 'vernal.NoGradient'> (it stands where nothing was differentiated: a buffer, a frozen array, "
            f"what is not a floating-point array; {_INSTEAD})"
        )


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuses arithmetic."""
    raise type_error(
        "NoGradient is not a number: nothing was differentiated here",
        where="a tree of gradients, combined with a tree that has a value there",
        expected="trees that hold NoGradient in the same places, as gradients and vernal.params(model) do",
        got="NoGradient() as a number",
        instead=_INSTEAD,
    )


class NoGradient(metaclass=_Told):
    """The placeholder for a leaf that is not differentiated: in the gradients of `filter_grad` and its
    siblings, and in `vernal.params(model)`.

    It is a pytree without leaves, so `jax.tree.map` over gradients skips it. It is not a number: if it
    could be added to an array, it would be a zero gradient, and weight decay changes a parameter that
    has one. `apply_updates` and an `Optimizer` leave the leaf it stands for unchanged, and `combine`
    fills it in. There is only one instance.

    Raises:
        TypeError: for arithmetic, for example of a tree of gradients with a whole model.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> grads = vernal.filter_grad(lambda p: p["w"] * p["n"])({"w": jnp.float32(2.0), "n": 3})
        >>> jax.tree.map(jnp.add, grads, grads)
        {'n': NoGradient(), 'w': Array(6., dtype=float32)}
        >>> isinstance(grads["n"], vernal.NoGradient)
        True
    """

    # Immutable, so it may be structure.
    _vernal_unchanging = True
    __slots__ = ()
    _only: "NoGradient | None" = None

    def __new__(cls) -> "NoGradient":
        if cls._only is None:
            cls._only = super().__new__(cls)
        return cls._only

    def __repr__(self) -> str:
        return "NoGradient()"

    def __reduce__(self) -> Any:
        return NoGradient, ()

    # Makes NumPy's arrays and scalars defer to our operators.
    __array_ufunc__ = None
    __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _refuse
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        """Refuses use as an array, which means that a model was called with some leaves missing."""
        text = f"NoGradient has no attribute `{name}`"
        if name[:2] != "__":
            text += (
                "; to call `vernal.params(model)` or a tree of gradients, fill in what is not trained: "
                "`vernal.combine(params, model)`"
            )
        raise AttributeError(text)


jtu.register_pytree_node(NoGradient, lambda _: ((), None), lambda _aux, _children: NoGradient())


def is_missing(x: Any) -> bool:
    """Whether `x` is a placeholder for a missing value: None or `NoGradient`.

    Args:
        x: any Python object.

    Example:
        >>> import jax
        >>> from vernal.trees import NoGradient, is_missing
        >>> jax.tree.leaves([1.0, None, NoGradient()], is_leaf=is_missing)
        [1.0, None, NoGradient()]
    """
    return x is None or type(x) is NoGradient
