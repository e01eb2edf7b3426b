"""The interface between models and Optax: parameters, complete gradients, states that keep their types.

Optax expects a tree of parameters, and updates of the same structure. But a model has parts that are not optimised,
some of its gradients are missing, and a compiled step must return the same types that it was given.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import is_none, signature_of, strong
from ..modules import trainable
from ..show import diff_text, path_text, short, type_error, value_error
from ..trees import NoGradient, combine, filter, is_array, is_missing


def parameters(model: Any) -> Any:
    """The model's parts that are optimised, with None for the rest."""
    return filter(model, trainable(model))


def nones(grads: Any) -> Any:
    """Gradients with None in place of every `NoGradient`."""
    return jtu.tree_map(lambda g: None if is_missing(g) else g, grads, is_leaf=is_missing)


def _is_pair(params: Any) -> bool:
    """Whether these are the two sets of parameters of `optax.lookahead`, whose gradients belong to the fast ones."""
    return getattr(params, "_fields", None) == ("fast", "slow")


def fill_missing(params: Any, grads: Any) -> Any:
    """Gradients for all parameters, with zeros where none was computed, because Optax needs one for each."""
    params = params.fast if _is_pair(params) else params

    misshapen: list[Any] = []

    def fill(path: Any, grad: Any, part: Any) -> Any:
        if grad is None:
            return jtu.tree_map(jnp.zeros_like, part)
        # Transformations for differential privacy take a gradient for each example.
        if is_array(part) and part.shape not in (jnp.shape(grad), jnp.shape(grad)[1:]):
            misshapen.append((path, grad, part))
        return None if part is None else grad

    try:
        filled = jtu.tree_map_with_path(fill, grads, params, is_leaf=is_none)
    except (ValueError, TypeError, KeyError) as error:
        raise value_error(
            "the gradients do not have the structure of the model",
            where="Optimizer.update(model, grads, state)",
            expected="a tree like the model, with NoGradient or None where nothing was differentiated",
            got=f"{diff_text(params, grads, leaves='ignore')}\n({error})",
            instead="pass the model that they were computed for, and the arguments in this order",
        ) from None
    for path, grad, part in misshapen:
        raise value_error(
            "a gradient does not have the shape of its array",
            where=f"Optimizer.update: {path_text(path, 'grads')}",
            expected=f"shape {part.shape}",
            got=short(grad),
            instead="pass the gradients that were computed for this model",
        )
    return filled


def refuse_numbers(model: Any, grads: Any) -> None:
    """Refuses a gradient for a Python number, which is not optimised."""
    leaves = jtu.tree_leaves_with_path(model, is_leaf=is_none)
    given = jtu.tree_leaves(grads, is_leaf=is_none)
    # If the numbers of leaves differ, so do the structures: `fill_missing` reports that.
    for (path, leaf), grad in zip(leaves, given, strict=False) if len(leaves) == len(given) else ():
        if isinstance(leaf, (float, complex)) and not is_array(leaf) and grad is not None:
            raise type_error(
                "a gradient was given for a Python number, which is not optimised",
                where=f"Optimizer.update: {path_text(path, 'model')}",
                expected="an array, or NoGradient for its gradient",
                got=short(leaf),
                instead="jnp.asarray(number) in the model",
            )


def leave_missing(grads: Any, updates: Any) -> Any:
    """Updates with None where the gradients have None, so that parts that were not differentiated stay as they are."""
    if _is_pair(updates):
        return type(updates)(*(leave_missing(grads, part) for part in updates))
    return jtu.tree_map(lambda g, u: None if g is None else u, grads, updates, is_leaf=is_none)


def extra_arguments(
    extra: dict[str, Any], update: Any, model: Any, params: Any, where: str
) -> dict[str, Any]:
    """The extra arguments of a step as Optax needs them: functions, which Optax calls with the parameters, get the
    whole model, and missing gradients are filled in."""
    signature = signature_of(update)
    known = {} if signature is None else signature.parameters
    if signature is not None and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for name in extra.keys() - known:
            raise type_error(
                f"the transformation takes no extra argument `{name}`",
                where=f"{where}.update(model, grads, state, ...)",
                expected="model, grads and state",
                got=", ".join(extra),
                instead="leave it out; optax.with_extra_args_support makes a transformation that ignores it",
            )
    structure = jtu.tree_structure(params)

    def of_model(fn: Any) -> Any:
        def of_parameters(params: Any, *args: Any, **kwargs: Any) -> Any:
            whole = jtu.tree_structure(params) == structure
            return fn(combine(params, model) if whole else params, *args, **kwargs)

        return of_parameters

    # A gradient may be a module that can be called.
    prepared = {n: of_model(x) if callable(x) and n != "grad" else x for n, x in extra.items()}
    if "grad" in prepared:
        prepared["grad"] = fill_missing(params, nones(prepared["grad"]))
    return prepared


def refuse_exchanged(model: Any, error: Exception) -> None:
    """Refuses gradients in the place of the model: only they have a `NoGradient` in them."""
    nodes = jtu.tree_leaves(model, is_leaf=lambda x: isinstance(x, NoGradient))
    if any(isinstance(node, NoGradient) for node in nodes):
        raise type_error(
            "the model has gradients in place of arrays",
            where="Optimizer.update(model, grads, state)",
            expected="the model first, then its gradients",
            got=short(model),
            instead="optimiser.update(model, grads, state), in this order",
        ) from error


def refuse_state_second(init: Callable[[Any], Any], second: Any, third: Any) -> None:
    """Refuses a state in the place of the gradients, as in Optax's `update(grads, state, params)`: it has the form of
    what `init` makes of the third argument. Returns if the second one is something else."""
    try:
        exchanged = _form(second) == _form(jax.eval_shape(init, third))
    except Exception:
        return
    if exchanged:
        raise value_error(
            "the optimiser state is in the place of the gradients",
            where="Optimizer.update(model, grads, state)",
            expected="the model, its gradients, and the state: not the order of Optax",
            got=f"{short(second)} as the second argument",
            instead="model, state = optimiser.update(model, grads, state)",
        ) from None


def refuse_other_state(
    init: Callable[[], Any], step: Callable[[Any], Any], state: Any, error: Exception | None = None
) -> None:
    """Refuses a state of another form than `init` returns, or a `step` after it, which may add to the state. `error` is
    what a step with the state has raised. Returns if `init` or `step` fail too: the error has another cause."""
    try:
        expected = jax.eval_shape(init)
        if _form(state) == _form(expected) or _form(state) == _form(
            jax.eval_shape(lambda: step(init()))
        ):
            return
    except Exception:
        return
    raise value_error(
        "the optimiser state does not fit the model",
        where="Optimizer.update(model, grads, state)",
        expected="what `init` or `update` returned for a model of this structure, with the same parts frozen",
        got=diff_text(expected, state, weak_type=False, root="state"),
        instead="state = optimiser.init(model), for each optimiser, and after `freeze`, `unfreeze` or `tree_at`; "
        "a number of the model that changes while it trains, such as a counter, belongs in an array",
    ) from error


def is_suspect(new: Any, old: Any) -> bool:
    """Whether a step that raised nothing may have been given the state of another optimiser or model: with other shapes
    that broadcast, with the same fields under another name, or with leaves that the step does not use."""
    kept = {id(leaf) for leaf in jtu.tree_leaves(old)}
    return _form(new) != _form(old) or any(id(leaf) in kept for leaf in jtu.tree_leaves(new))


def _form(state: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jtu.tree_flatten(state)
    return structure, list(map(jnp.shape, leaves))


def _like(new: Any, old: Any) -> Any:
    new = strong(new)
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def keep_types(new: Any, old: Any) -> Any:
    """The state after a step with the dtypes of the one before. (The structure may differ: `optax.monitor` adds to its
    state at the first step.)"""
    if jtu.tree_structure(new) != jtu.tree_structure(old):
        return jtu.tree_map(strong, new)
    return jtu.tree_map(_like, new, old)
