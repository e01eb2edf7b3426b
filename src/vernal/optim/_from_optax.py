"""`from_optax`: an existing Optax object as an `Optimizer`."""

from typing import Any

from ..show import short, type_error
from ._optimizer import Optimizer
from ._whole import Whole, is_transformation


def from_optax(transformation: Any) -> Optimizer:
    """Makes an `Optimizer` from an existing Optax object.

    Use it for an object that other code has made, or that has no factory; for numbers that change, write
    `Optimizer(optax.adam, 1e-3)`. The object is kept whole: it has no settings, and `replace` changes nothing in it. It
    is part of the optimiser's structure, and compared as functions are: another object with the same code and numbers
    is equal, and one with another learning rate is compiled again. Arrays that the object holds are leaves, which can
    be updated and mapped over.

    Args:
        transformation: the result of an Optax factory, or any object with the methods `init` and `update` of one.

    Returns:
        The optimiser.

    Raises:
        TypeError: for any other object.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import vernal
        >>> opt = vernal.optim.from_optax(optax.chain(optax.clip(2.0), optax.sgd(0.5)))
        >>> opt.settings
        {}
        >>> model = jnp.ones(2)
        >>> model, state = opt.update(model, jnp.array([1.0, 9.0]), opt.init(model))
        >>> model
        Array([0.5, 0. ], dtype=float32)
    """
    if isinstance(transformation, Optimizer) or not is_transformation(transformation):
        raise type_error(
            "from_optax takes an Optax transformation",
            where="from_optax(transformation)",
            expected="an object with the methods `init` and `update`",
            got=short(transformation),
            instead="call a factory first: from_optax(optax.adam(1e-3)); use an Optimizer as it is",
        )
    return Optimizer(Whole(transformation))
