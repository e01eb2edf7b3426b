"""`Optimizer`: an Optax factory and its settings as one value.

Optax makes closures: two `optax.adam(1e-3)` are different functions, and a step compiled for one
is compiled again for the other. An `Optimizer` remembers what to call instead, with the numbers as
leaves and the rest as structure, and builds the Optax object inside the step, while it is traced.
Nothing here imports Optax: whoever has a factory has imported it.
"""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._ground import callable_name, strong
from ..show import short, type_error
from ._call import FactoryCall, optax_promotes
from ._step import (
    extra_arguments,
    fill_missing,
    is_suspect,
    keep_types,
    leave_missing,
    nones,
    parameters,
    refuse_numbers,
    refuse_other_state,
)
from ._trials import run_alike
from ._updates import apply_updates


def _build(opt: Any) -> Any:
    made = opt.build()
    if not (hasattr(made, "init") and hasattr(made, "update")):
        name = callable_name(opt.factory)
        raise type_error(
            "the factory of an Optimizer returns a transformation of gradients",
            where=f"Optimizer({name}, ...)",
            expected="a function such as `optax.adam`",
            got=f"{name}, which returns {short(made)}",
            instead="Schedule(...) for a function of the count of steps",
        )
    return made


def _init(opt: Any, params: Any) -> Any:
    with optax_promotes():
        return _build(opt).init(params)


def _update(opt: Any, model: Any, params: Any, grads: Any, state: Any, extra: Any) -> Any:
    update = _build(opt).update
    if extra:
        where = f"Optimizer({callable_name(opt.factory)})"
        extra = extra_arguments(extra, update, model, params, where)
    with optax_promotes():
        return update(grads, state, params, **extra)


class Optimizer(FactoryCall):
    """An Optax optimiser as a value: a module whose leaves are its numbers.

    It can be an argument of a compiled step, and a new one with other numbers runs the same
    program. Floats, of Python or NumPy, and arrays are leaves, in lists, tuples and dicts too; ints,
    bools, strings, functions and what is left to the factory are structure. Of Optax's factories a
    few settings are structure all the same:

    * those close to one (`b1`, `b2`, `decay`, ...), because Optax computes `1 - b2`, which loses
      most of its digits in float32; and the `learning_rate` of `fromage`, which it adds to one;
    * a weight decay of zero, for which Optax leaves the term out;
    * those that Optax compares or converts, such as the `factor` of `reduce_on_plateau`.

    An integer for one of its real numbers is a leaf (`learning_rate=1`). The caller has the last
    word: an array makes a leaf of a setting, `b2=jnp.asarray(0.99)`, and `vernal.Static` makes
    structure of one, `strength=vernal.Static(0.1)`. A weight decay that is a leaf is computed with,
    also when it is zero.

    Nested transformations are given as optimisers too:
    `Optimizer(optax.chain, Optimizer(optax.clip, 1.0), Optimizer(optax.adam, 1e-3))`; schedules
    with leaves as `Schedule`, or as any callable module. Arrays that a function closes over are
    leaves too.

    Args:
        factory: a function that returns an Optax transformation, such as `optax.adamw`.
        *args: its first settings.
        **settings: the others.

    Attributes:
        factory: as given.
        settings: the settings that are leaves, or trees that may hold some, by name.
        structure: the other ones, as pairs of name and value.

    Raises:
        TypeError: for an optimiser in the place of its factory; for a setting that the factory does not have, or
            one that is missing; for a string as the learning rate; for
            `optax.inject_hyperparams`, which keeps its numbers in the state; in `init` and `update`,
            if the factory returns no transformation, or looks at a leaf (compares or converts
            it): give that as a `Static`.

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
        super().__init__(factory, *args, **settings)

    def init(self, model: Any) -> Any:
        """The state before the first step.

        Args:
            model: any pytree. Its floating-point (and complex) arrays that are not frozen (see
                `vernal.freeze`) are what is optimised; the rest is left out.

        Returns:
            Optax's state for those arrays: a pytree of arrays.
        """
        return jtu.tree_map(strong, run_alike(self, _init, parameters(model)))

    def update(self, model: Any, grads: Any, state: Any, **extra: Any) -> tuple[Any, Any]:
        """One step.

        Args:
            model: the model that `grads` are the gradients of.
            grads: a tree like the model. Where it holds `vernal.NoGradient` or None, for an array or
                a whole part, nothing was differentiated: that part stays as it is (no weight decay
                either), and counts as zero in norms.
            state: what `init`, or the step before, returned.
            **extra: what some transformations ask for, such as `value=loss`; passed on to Optax.
                A function, such as the `value_fn` of a line search, is called with models.

        Returns:
            `(model, state)`: the updated ones, with the dtypes of the old.

        Raises:
            ValueError: if `grads` does not have the structure of `model`, or `state` is that of another model, or of
                another optimiser, or of this one before something was frozen.
            TypeError: for `extra` arguments, if the transformation takes none; for a gradient of a
                Python number; for a setting that the transformation looks at (compares or
                converts), as `init` does too.
        """
        grads = nones(grads)
        refuse_numbers(model, grads)
        params = parameters(model)
        known = fill_missing(params, grads)

        def init() -> Any:
            return _init(self, params)

        def step(state: Any) -> Any:
            return _update(self, model, params, known, state, extra)[1]

        try:
            updates, new_state = run_alike(self, _update, model, params, known, state, extra)
        except Exception as error:
            refuse_other_state(init, step, state, error)
            raise
        if is_suspect(new_state, state):
            refuse_other_state(init, step, state)
        model = apply_updates(model, leave_missing(grads, updates))
        return model, keep_types(new_state, state)
