"""`Optimizer`: an Optax factory and its settings as one value.

Optax makes closures: two `optax.adam(1e-3)` are different functions, and a step compiled for one
is compiled again for the other. An `Optimizer` stores the factory and its arguments instead, with the numbers as
leaves and the rest as structure, and builds the Optax object inside the step, while it is traced.
Nothing here imports Optax: a caller that has a factory has imported it.
"""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._ground import callable_name, strong
from ..show import short, type_error
from ._call import FactoryCall
from ._refusals import refuse_explicit_axes
from ._step import (
    extra_arguments,
    fill_missing,
    is_suspect,
    keep_types,
    leave_missing,
    nones,
    parameters,
    refuse_exchanged,
    refuse_numbers,
    refuse_other_state,
    refuse_state_second,
)
from ._trials import run_alike
from ._updates import apply_updates
from ._whole import optax_promotes


def _build(opt: Any) -> Any:
    made = opt.build()
    if not (hasattr(made, "init") and hasattr(made, "update")):
        name = callable_name(opt.factory)
        raise type_error(
            "the factory of an Optimizer must return a gradient transformation",
            where=f"Optimizer({name}, ...)",
            expected="a function such as `optax.adam`",
            got=f"{name}, which returns {short(made)}",
            instead="Schedule(...) for a function of the step count",
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

    Pass it to a compiled step as an argument: another one with other numbers runs the same program. Floats, of Python
    or NumPy, and arrays are leaves, also inside lists, tuples and dicts; ints, bools, strings, functions and defaults
    of the factory are structure. These settings of Optax's factories are structure too:

    * those close to one (`b1`, `b2`, `decay`, ...), because Optax computes `1 - b2`, which loses
      most of its digits in float32; and the `learning_rate` of `fromage`, which it adds to one;
    * a weight decay of zero, for which Optax leaves the term out;
    * those that Optax compares or converts, such as the `factor` of `reduce_on_plateau`.

    An integer for a real-valued setting of Optax's is a leaf (`learning_rate=1`). Override these rules for any setting:
    an array makes it a leaf, `b2=jnp.asarray(0.99)`, and `vernal.Static` makes it structure,
    `strength=vernal.Static(0.1)`. A weight decay that is a leaf is applied even when it is zero.

    Pass nested transformations as optimisers too:
    `Optimizer(optax.chain, Optimizer(optax.clip, 1.0), Optimizer(optax.adam, 1e-3))`; and schedules with leaves as a
    `Schedule`, or as any callable module. Arrays that a function closes over are leaves too.

    Args:
        factory: a function that returns an Optax transformation, such as `optax.adamw`.
        *args: the positional arguments of the factory.
        **settings: its keyword arguments.

    Attributes:
        factory: as given.
        settings: by name, the settings that are leaves, or trees that may hold leaves.
        structure: the other settings, as pairs of name and value.

    Raises:
        TypeError: for a model or an optimiser in place of the factory; for a setting that the factory does not
            have, or one that is missing; for a learning rate that is neither a number nor a schedule; for a factory
            of Optax's among the settings of another; for `optax.inject_hyperparams`, which keeps its numbers in the
            state; for a leaf that the factory or, in `init` and `update`, its transformation looks at (compares or
            converts): pass it as a `Static`; in `init` and `update`, if the factory does not return a
            transformation.

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
                `vernal.freeze`) are optimised; the rest is left out.

        Returns:
            Optax's state for those arrays: a pytree of arrays.

        Raises:
            ValueError: if a mask or labels do not have the structure of the model; if the factory cannot compute with
                arrays that lie on explicit axes of a mesh.
        """
        params = parameters(model)
        try:
            state = run_alike(self, _init, params)
        except Exception as error:
            self._explain(params, error, "Optimizer.init(model)")
            raise
        return jtu.tree_map(strong, state)

    def _explain(self, params: Any, error: Exception, where: str) -> None:
        self._refuse_trees(params, error)
        refuse_explicit_axes(self.factory, jtu.tree_leaves(params), error, where)

    def update(self, model: Any, grads: Any, state: Any, **extra: Any) -> tuple[Any, Any]:
        """Takes one step.

        Args:
            model: the model that `grads` belongs to.
            grads: a tree like the model. A `vernal.NoGradient` or None, for an array or a whole part, means that
                nothing was differentiated there: that part stays as it is (no weight decay either), and counts as zero
                in norms.
            state: what `init`, or the step before, returned.
            **extra: arguments that some transformations require, such as `value=loss`; passed on to Optax. A function,
                such as the `value_fn` of a line search, is called with models.

        Returns:
            `(model, state)` after the step, with the dtypes of the old ones.

        Raises:
            ValueError: if `grads` does not have the structure of `model`, or is the state; if `state` belongs to
                another model or optimiser, or was made before something was frozen; if a setting that Optax takes as a
                number has an axis, outside of the `vmap` that takes it away; as for `init`.
            TypeError: for `extra` arguments, if the transformation takes none; for a gradient of a Python number; as in
                `init`, for a setting that the transformation looks at (compares or converts).
        """
        self._refuse_axes()
        grads = nones(grads)
        refuse_numbers(model, grads)
        params = parameters(model)
        try:
            known = fill_missing(params, grads)
        except ValueError:
            refuse_state_second(lambda model: _init(self, parameters(model)), grads, nones(state))
            raise

        def init() -> Any:
            return _init(self, params)

        def step(state: Any) -> Any:
            return _update(self, model, params, known, state, extra)[1]

        try:
            updates, new_state = run_alike(self, _update, model, params, known, state, extra)
        except Exception as error:
            refuse_exchanged(model, error)
            refuse_other_state(init, step, state, error)
            self._explain(params, error, "Optimizer.update(model, grads, state)")
            raise
        if is_suspect(new_state, state):
            refuse_other_state(init, step, state)
        model = apply_updates(model, leave_missing(grads, updates))
        return model, keep_types(new_state, state)
