"""`NoGradient`: what stands in a tree of gradients where nothing was differentiated.

Zeros would not do: weight decay and averages move what has them. None would not either: where a
tree that holds it meets a whole model, the error is JAX's, and tells nobody what to do. So this is
a class of ours, a pytree without leaves. Two trees that hold it in the same places add, scale, clip
and average like any others. Where only one of them does, JAX prints this class in its error, or
hands it to an operator; both say what to write instead.
"""

from typing import Any, NoReturn

import jax.tree_util as jtu

from ..show import type_error

_INSTEAD = (
    "make zeros, averages and states of optimisers from `vernal.params(model)` in place of `model`, "
    "and change a model by `vernal.apply_updates(model, updates)`"
)


class _Told(type):
    """JAX's errors about trees that do not fit show the classes in them: this one says what to do."""

    def __repr__(cls) -> str:
        return (
            "<class 'vernal.NoGradient'> (it stands where nothing was differentiated: a buffer, a frozen array, "
            f"what is not a floating-point array; {_INSTEAD})"
        )


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuses to be computed with."""
    raise type_error(
        "there is no gradient here to compute with: nothing was differentiated",
        where="a tree of gradients, beside a tree that has a value there",
        expected="trees that hold NoGradient in the same places, as gradients and vernal.params(model) do",
        got="NoGradient() as a number",
        instead=_INSTEAD,
    )


class NoGradient(metaclass=_Told):
    """What stands where nothing was differentiated: in the gradients of `filter_grad` and its
    siblings, and in `vernal.params(model)`.

    It is a pytree without leaves, so `jax.tree.map` over gradients never meets it. It is not a number: a
    sum with an array would be a zero gradient, and weight decay moves what has one. `apply_updates`
    and an `Optimizer` leave alone what it stands for, and `combine` fills it in. There is one
    instance.

    Raises:
        TypeError: for arithmetic, which happens where a tree of gradients meets a whole model.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> grads = vernal.filter_grad(lambda p: p["w"] * p["n"])({"w": jnp.float32(2.0), "n": 3})
        >>> jax.tree.map(jnp.add, grads, grads)
        {'n': NoGradient(), 'w': Array(6., dtype=float32)}
        >>> isinstance(grads["n"], vernal.NoGradient)
        True
    """

    # Nothing in it can be exchanged: it may be structure.
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

    # NumPy's arrays and scalars leave their operators to us.
    __array_ufunc__ = None
    __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _refuse
    __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __bool__ = __float__ = __int__ = __len__ = __iter__ = __getitem__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        """Whoever takes it for an array has called what is not a whole model."""
        text = f"NoGradient has no attribute `{name}`"
        if name[:2] != "__":
            text += (
                "; gradients and `vernal.params(model)` are called as `vernal.combine(params, model)`, "
                "which fills in what is not trained"
            )
        raise AttributeError(text)


jtu.register_pytree_node(NoGradient, lambda _: ((), None), lambda _aux, _children: NoGradient())


def is_missing(x: Any) -> bool:
    """Whether something stands for a value that a tree does not have: None or `NoGradient`.

    Args:
        x: any Python object.

    Example:
        >>> import jax
        >>> from vernal.trees import NoGradient, is_missing
        >>> jax.tree.leaves([1.0, None, NoGradient()], is_leaf=is_missing)
        [1.0, None, NoGradient()]
    """
    return x is None or type(x) is NoGradient
