"""`Optimizer`: an Optax factory and its settings as one value.

Optax makes closures: two `optax.adam(1e-3)` are different functions, and a step compiled for one
is compiled again for the other. An `Optimizer` remembers what to call instead, with the numbers as
leaves and the rest as structure, and builds the Optax object inside the step, while it is traced.
Nothing here imports Optax: whoever has a factory has imported it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._ground import callable_name
from ..trees import is_array
from ._call import FactoryCall
from ._factory import factory_of
from ._settings import as_leaves, is_leaf_setting, untraceable
from ._step import (
    extra_arguments,
    fill_missing,
    keep_types,
    leave_missing,
    optax_promotes,
    parameters,
    strong,
)
from ._updates import apply_updates


def _is_optimizer(x: Any) -> bool:
    return isinstance(x, Optimizer)


def _call(factory: Any, values: dict[str, Any]) -> Any:
    """Calls the factory, with the Optax objects in place of nested optimisers."""
    args, kwargs = factory_of(factory).arguments(values)
    args, kwargs = jtu.tree_map(
        lambda x: x.build() if _is_optimizer(x) else x, (args, kwargs), is_leaf=_is_optimizer
    )
    with optax_promotes():
        return factory(*args, **kwargs)


def _holds_leaves(value: Any) -> bool:
    if isinstance(value, (bool, int, float, str, type(None))):
        return False
    leaves = jtu.tree_leaves(value, is_leaf=_is_optimizer)
    return any(_is_optimizer(x) or (is_array(x) and not isinstance(x, np.bool_)) for x in leaves)


class Optimizer(FactoryCall):
    """An Optax optimiser as a value: a module whose leaves are its numbers.

    It can be an argument of a compiled step, and a new one with other numbers runs the same
    program. Floating-point settings (learning rate, weight decay, clipping norm) are leaves,
    however they are given: as a Python, NumPy or JAX number. Flags, counts, schedules and other
    functions are structure, and so are

    * settings close to one (`b1`, `b2`, `decay`, ...), because `1 - b2` loses most of its digits
      in float32. Give an array, `b2=jnp.asarray(0.99)`, to make one a leaf all the same;
    * a weight decay of zero, for which Optax leaves the term out;
    * numbers that the factory looks at, or adds to others, while it builds;
    * everything that is not given and so left to the factory.

    An array is always a leaf. A weight decay that is a leaf is computed with, also when it is zero.

    Nested transformations are given as optimisers too:
    `Optimizer(optax.chain, Optimizer(optax.clip, 1.0), Optimizer(optax.adam, 1e-3))`; schedules
    with leaves as `Schedule`, or as any callable module.

    Args:
        factory: a function that returns an Optax transformation, such as `optax.adamw`.
        *args: its first settings.
        **settings: the others.

    Attributes:
        factory: as given.
        settings: the settings that are, or contain, leaves, by name.
        structure: the other ones, as pairs of name and value.

    Raises:
        TypeError: for a setting that the factory does not have, or one that is missing.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> import vernal
        >>> opt = vernal.Optimizer(optax.sgd, 0.5)
        >>> model = {"w": jnp.array([1.0, 2.0])}
        >>> state = opt.init(model)
        >>> step = jax.jit(lambda opt, model, state: opt.update(model, jax.tree.map(jnp.ones_like, model), state))
        >>> model, state = step(opt, model, state)
        >>> model, state = step(opt.replace(learning_rate=0.25), model, state)
        >>> model["w"]
        Array([0.25, 1.25], dtype=float32)
        >>> step._cache_size()
        1
    """

    def __init__(self, factory: Callable[..., Any], /, *args: Any, **settings: Any):
        known = factory_of(factory)
        values = known.by_name(args, settings)
        get = known.parameters.get
        numbers = {n: v for n, v in values.items() if is_leaf_setting(n, v, get(n))}
        tried = {n: v for n, v in numbers.items() if not isinstance(v, jax.Array)}
        fixed = untraceable(known, tried, lambda given: _call(factory, {**values, **given}))
        leaves = as_leaves({n: v for n, v in numbers.items() if n not in fixed})
        nested = {n: v for n, v in values.items() if n not in numbers and _holds_leaves(v)}
        self.factory = factory
        self.settings = {n: {**leaves, **nested}[n] for n in values if n in leaves or n in nested}
        self.structure = tuple((n, v) for n, v in values.items() if n not in self.settings)

    def build(self) -> Any:
        """The Optax transformation.

        Returns:
            What the factory returns for the settings: a pair of functions `init` and `update`.
        """
        return _call(self.factory, self.given())

    def init(self, model: Any) -> Any:
        """The state before the first step.

        Args:
            model: any pytree. Its floating-point (and complex) arrays that are not frozen (see
                `vernal.freeze`) are what is optimised; the rest is left out.

        Returns:
            Optax's state for those arrays: a pytree of arrays.
        """
        with optax_promotes():
            state = self.build().init(parameters(model))
        return jtu.tree_map(strong, state)

    def update(self, model: Any, grads: Any, state: Any, **extra: Any) -> tuple[Any, Any]:
        """One step.

        Args:
            model: the model that `grads` are the gradients of.
            grads: a tree like the model. Where it holds None, for an array or a whole part,
                nothing was differentiated: that part stays as it is (no weight decay either), and
                counts as zero in norms.
            state: what `init`, or the step before, returned.
            **extra: what some transformations ask for, such as `value=loss`; passed on to Optax.
                A function, such as the `value_fn` of a line search, is called with models.

        Returns:
            `(model, state)`: the updated ones, with the dtypes of the old.

        Raises:
            ValueError: if `grads` does not have the structure of `model`.
            TypeError: for `extra` arguments, if the transformation takes none.
        """
        params = parameters(model)
        known = fill_missing(params, grads)
        update = self.build().update
        if extra:
            where = f"Optimizer({callable_name(self.factory)})"
            extra = extra_arguments(extra, update, model, params, where)
        with optax_promotes():
            updates, new_state = update(known, state, params, **extra)
        model = apply_updates(model, leave_missing(grads, updates))
        return model, keep_types(new_state, state)
