"""`Optimizer`: an Optax factory and its settings as one value.

Optax makes closures: two `optax.adam(1e-3)` are different functions, and a step compiled for one
is compiled again for the other. An `Optimizer` remembers what to call instead, with the numbers as
leaves and the rest as structure, and builds the Optax object inside the step, while it is traced.
Nothing here imports Optax: whoever has a factory has imported it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._ground import callable_name, signature_of
from ..modules import Module, field
from ..show import diff_text, message, short
from ..trees import filter, is_array, is_inexact_array
from ._settings import as_leaf, is_leaf_setting, is_number, looked_at
from ._updates import apply_updates


def _is_optimizer(x: Any) -> bool:
    return isinstance(x, Optimizer)


def _is_none(x: Any) -> bool:
    return x is None


def _optax_promotes() -> Any:
    """Optax mixes dtypes (Adam computes `b1**count`), also where its user has forbidden that to
    their own code."""
    return jax.numpy_dtype_promotion("standard")


def _signature(factory: Any) -> inspect.Signature:
    signature = signature_of(factory)
    if signature is None:
        raise TypeError(
            message(
                "the factory of an Optimizer needs a signature, for its settings to have names",
                where=f"Optimizer({short(factory)}, ...)",
                expected="a function such as `optax.adam`",
                got=short(factory),
                instead="wrap it in a function that names its parameters",
            )
        )
    return signature


def _unknown(factory: Any, problem: str) -> TypeError:
    parameters = [p.replace(annotation=p.empty) for p in _signature(factory).parameters.values()]
    name = callable_name(factory)
    return TypeError(
        message(
            f"`{name}` does not take these settings",
            where=f"Optimizer({name}, ...)",
            expected=f"{name}({', '.join(map(str, parameters))})",
            got=problem,
        )
    )


def _by_name(factory: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a call by the names of the factory's parameters."""
    signature = _signature(factory)
    try:
        values = dict(signature.bind(*args, **settings).arguments)
    except TypeError as error:
        raise _unknown(factory, str(error)) from None
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            values.update(values.pop(name, {}))
    return values


def _arguments(factory: Any, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Undoes `_by_name`."""
    signature = _signature(factory)
    bound = signature.bind_partial()
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            more = {n: v for n, v in values.items() if n not in signature.parameters}
            bound.arguments[name] = more
        elif name in values:
            bound.arguments[name] = values[name]
    return bound.args, bound.kwargs


def _call(factory: Any, values: dict[str, Any]) -> Any:
    """Calls the factory, with the Optax objects in place of nested optimisers."""
    args, kwargs = _arguments(factory, values)
    args, kwargs = jtu.tree_map(
        lambda x: x.build() if _is_optimizer(x) else x, (args, kwargs), is_leaf=_is_optimizer
    )
    return factory(*args, **kwargs)


def _holds_leaves(value: Any) -> bool:
    leaves = jtu.tree_leaves(value, is_leaf=_is_optimizer)
    return any(_is_optimizer(x) or (is_array(x) and not isinstance(x, np.bool_)) for x in leaves)


class Optimizer(Module):
    """An Optax optimiser as a value: a module whose leaves are its numbers.

    It can be an argument of a compiled step, and a new one with other numbers runs the same
    program. Floating-point settings (learning rate, weight decay, clipping norm) are leaves,
    however they are given: as a Python, NumPy or JAX number. Flags, counts, schedules and other
    functions are structure, and so are

    * settings close to one (`b1`, `b2`, `decay`, ...), because `1 - b2` loses most of its digits
      in float32. Give an array, `b2=jnp.asarray(0.99)`, to make one a leaf all the same;
    * a weight decay of zero, for which Optax leaves the term out;
    * numbers that the factory looks at while it builds;
    * everything that is not given and so left to the factory.

    Nested transformations are given as optimisers too:
    `Optimizer(optax.chain, Optimizer(optax.clip_by_global_norm, 1.0), Optimizer(optax.adam,
    1e-3))`.

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

    factory: Callable[..., Any] = field(static=True)
    settings: dict[str, Any]
    structure: tuple[tuple[str, Any], ...] = field(static=True)

    def __init__(self, factory: Callable[..., Any], /, *args: Any, **settings: Any):
        values = _by_name(factory, args, settings)
        parameters = _signature(factory).parameters
        numbers = {
            name: value
            for name, value in values.items()
            if is_leaf_setting(name, value, parameters.get(name))
        }
        tried = {n: as_leaf(v) for n, v in numbers.items() if not isinstance(v, jax.Array)}
        fixed = looked_at(factory, tried, lambda given: _call(factory, {**values, **given}))
        leaves = {name: as_leaf(v) for name, v in numbers.items() if name not in fixed}
        nested = {n: v for n, v in values.items() if n not in numbers and _holds_leaves(v)}
        self.factory = factory
        self.settings = {n: {**leaves, **nested}[n] for n in values if n in leaves or n in nested}
        self.structure = tuple((n, v) for n, v in values.items() if n not in self.settings)

    def build(self) -> Any:
        """The Optax transformation.

        Returns:
            What the factory returns for the settings: a pair of functions `init` and `update`.
        """
        return _call(self.factory, {**dict(self.structure), **self.settings})

    def replace(self, **settings: Any) -> "Optimizer":
        """The same optimiser with other settings.

        A leaf stays a leaf: nothing is compiled again for another number. A setting that this
        optimiser does not have is looked for in the nested ones, and must be found in exactly one.

        Args:
            **settings: the new values.

        Returns:
            The new optimiser.

        Raises:
            TypeError: for a setting that the factory does not have, or that several nested
                optimisers have.

        Example:
            >>> import optax
            >>> import vernal
            >>> clip = vernal.Optimizer(optax.clip, 1.0)
            >>> opt = vernal.Optimizer(optax.chain, clip, vernal.Optimizer(optax.sgd, 0.1))
            >>> opt.replace(learning_rate=0.2).settings["args"][1].settings["learning_rate"]
            Array(0.2, dtype=float32, weak_type=True)
        """
        optimizer = self
        for name, value in settings.items():
            optimizer = optimizer._replace_one(name, value)
        return optimizer

    def _has(self, name: str) -> bool:
        parameters = _signature(self.factory).parameters
        return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def _replace_one(self, name: str, value: Any) -> "Optimizer":
        values = {**dict(self.structure), **self.settings}
        if self._has(name):
            if name in self.settings and is_number(value):
                value = as_leaf(value)
            values[name] = value
        else:
            leaves, treedef = jtu.tree_flatten(self.settings, is_leaf=_is_optimizer)
            found = [i for i, x in enumerate(leaves) if _is_optimizer(x) and x._reaches(name)]
            if len(found) != 1:
                raise _unknown(self.factory, f"`{name}`, which {len(found)} nested optimisers have")
            leaves[found[0]] = leaves[found[0]]._replace_one(name, value)
            values.update(treedef.unflatten(leaves))
        args, kwargs = _arguments(self.factory, values)
        return Optimizer(self.factory, *args, **kwargs)

    def _reaches(self, name: str) -> bool:
        nested = jtu.tree_leaves(self.settings, is_leaf=_is_optimizer)
        return self._has(name) or any(_is_optimizer(x) and x._reaches(name) for x in nested)

    def init(self, model: Any) -> Any:
        """The state before the first step.

        Args:
            model: any pytree. Its floating-point (and complex) arrays are what is optimised; the
                rest is left out.

        Returns:
            Optax's state for those arrays: a pytree of arrays.
        """
        with _optax_promotes():
            state = self.build().init(filter(model, is_inexact_array))
        return jtu.tree_map(_strong, state)

    def update(self, model: Any, grads: Any, state: Any, **extra: Any) -> tuple[Any, Any]:
        """One step.

        Args:
            model: the model that `grads` are the gradients of.
            grads: a tree like the model. Where it holds None, for an array or a whole part,
                nothing was differentiated: that part stays as it is (no weight decay either), and
                counts as zero in norms.
            state: what `init`, or the step before, returned.
            **extra: what some transformations ask for, such as `value=loss`; passed on to Optax.

        Returns:
            `(model, state)`: the updated ones, with the dtypes of the old.

        Raises:
            ValueError: if `grads` does not have the structure of `model`.
            TypeError: for `extra` arguments, if the transformation takes none.
        """
        params = filter(model, is_inexact_array)
        known = _fill_missing(params, grads)
        transformation = self.build()
        if extra and not _takes_extra(transformation):
            raise TypeError(
                message(
                    f"the transformation takes no extra argument `{next(iter(extra))}`",
                    where=f"Optimizer({callable_name(self.factory)}).update(model, grads, state, ...)",
                    expected="model, grads and state",
                    got=", ".join(extra),
                    instead="leave it out; optax.with_extra_args_support makes one that ignores it",
                )
            )
        with _optax_promotes():
            updates, new_state = transformation.update(known, state, params, **extra)
        moved = jtu.tree_map(
            lambda g, u: None if g is None else u, grads, updates, is_leaf=_is_none
        )
        new_state = jtu.tree_map(_like, new_state, state)
        return apply_updates(model, moved), new_state


def _takes_extra(transformation: Any) -> bool:
    signature = _signature(transformation.update)
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _strong(x: Any) -> Any:
    """A leaf of the state with a dtype of its own: a weak one would be another type after the
    first step."""
    x = x if is_array(x) else jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def _like(new: Any, old: Any) -> Any:
    new = _strong(new)
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _fill_missing(params: Any, grads: Any) -> Any:
    """Gradients for all parameters: zeros where none was computed, for Optax knows no holes."""

    def fill(grad: Any, part: Any) -> Any:
        if grad is None:
            return jtu.tree_map(jnp.zeros_like, part)
        return None if part is None else grad

    try:
        return jtu.tree_map(fill, grads, params, is_leaf=_is_none)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            message(
                "the gradients do not have the structure of the model",
                where="Optimizer.update(model, grads, state)",
                expected="a tree like the model, with None where nothing was differentiated",
                got=f"{diff_text(params, grads, leaves='ignore')}\n({error})",
                instead="pass the model they were computed for, and the arguments in this order",
            )
        ) from None
