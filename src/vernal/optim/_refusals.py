"""What an optimiser or a schedule refuses, because Optax would fail later, or not at all."""

from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import callable_name
from ..modules import Module
from ..show import diff_text, short, type_error, value_error
from ..transforms import explicit_mesh
from ._optax_table import is_optaxs
from ._whole import is_transformation


def refuse_a_model_first(kind: str, factory: Any, args: tuple[Any, ...]) -> None:
    """Refuses a model, or a number, in the place of the factory, where a factory or an optimiser comes next."""
    if not args or (callable(factory) and not isinstance(factory, Module)):
        return
    if is_optaxs(args[0]) or is_transformation(args[0]):
        name = callable_name(args[0]) if is_optaxs(args[0]) else "optax.adam"
        raise type_error(
            "the factory must come first",
            where=f"argument `factory` of {kind}",
            expected="a factory such as `optax.adam`, followed by its settings",
            got=short(factory),
            instead=f"optimiser = {kind}({name}, ...), and then state = optimiser.init(model)",
        )


def refuse_settings(kind: str, factory: Any, given: dict[str, Any]) -> None:
    """Refuses settings that Optax would fail with only at the first step, or misunderstand."""
    name = callable_name(factory)
    if "learning_rate" in given:
        _refuse_rate(f"{kind}({name}, learning_rate)", given["learning_rate"])
    for setting, value in given.items():
        if isinstance(value, str) and (setting == "mask" or setting.endswith("_mask")):
            # Optax would take it for one mask that is true of everything.
            raise type_error(
                "a mask is a string",
                where=f"{kind}({name}, {setting}=...)",
                expected="a tree of bools, or a function from the parameters to one",
                got=repr(value),
                instead=f"{setting}=vernal.trainable(model, {value!r})",
            )
    for inner in jtu.tree_leaves(given) if is_optaxs(factory) else ():
        if is_optaxs(inner):
            raise type_error(
                "a factory was given without its settings",
                where=f"{kind}({name}, ...)",
                expected="the result of a factory",
                got=f"the function `{callable_name(inner)}`",
                instead=f"{kind}({callable_name(inner)}, ...) in its place, with its settings",
            )


def refuse_axes(factory: Any, numbers: dict[str, Any], leaves: dict[str, Any]) -> None:
    """Refuses, when a step is taken, an array in the place of a number: it would be broadcast against the parameters.

    Args:
        factory: the factory.
        numbers: the names of its settings that are numbers, as keys.
        leaves: its settings that are leaves, by name.
    """
    for name, value in leaves.items():
        # A schedule may have arrays of any shape in it.
        parts = jtu.tree_leaves(value, is_leaf=callable) if name in numbers else ()
        wrong = [x for x in parts if not callable(x) and jnp.ndim(x) > 0]
        if wrong:
            raise value_error(
                "a setting of an optimiser must be one number where a step is taken",
                where=f"Optimizer({callable_name(factory)}, {name}=...)",
                expected="an array of shape ()",
                got=short(wrong[0]),
                instead="one step for each of them: jax.vmap of `init` and `update` over the optimiser, the model and "
                "the state",
            )


def refuse_other_trees(factory: Any, values: dict[str, Any], params: Any, error: Exception) -> None:
    """Refuses a mask, or labels, that do not have the structure of the parameters: why Optax raised `error`."""
    for name, value in values.items():
        is_tree = name == "param_labels" or name == "mask" or name.endswith("_mask")
        if not is_tree or value is None or (callable(value) and not isinstance(value, Module)):
            continue
        try:
            jtu.tree_map(lambda *_: None, value, params)
        except Exception as why:
            raise value_error(
                "a tree of masks or labels does not have the structure of the model",
                where=f"setting `{name}` of {callable_name(factory)}",
                expected="a tree like the part of the model that is trained, or a function that makes it",
                got=diff_text(params, value, leaves="ignore") or str(why),
                instead="make it from this model, and after `freeze`: "
                "vernal.trainable(model, '**.weight') is a mask of the weights",
            ) from error


def refuse_explicit_axes(factory: Any, arrays: list[Any], error: Exception, where: str) -> None:
    """Explains an error of JAX's about explicit axes of a mesh: what an Optax factory computes may not say where its
    results lie."""
    undecided = type(error).__name__ == "ShardingTypeError"
    if not (undecided or "Length of device assignment" in str(error)):
        return
    if explicit_mesh(*arrays) is None:
        return
    raise value_error(
        f"`{callable_name(factory)}` does not say where its arrays lie on explicit axes of a mesh",
        where=where,
        expected="a factory that works on each element alone, such as `optax.adamw`, or automatic axes",
        got=str(error).partition("\n")[0],
        instead="make_mesh(..., automatic=True): XLA then decides where they lie"
        if undecided
        else "state = vernal.sharding.init_sharded(optimiser.init, model, ...), or `init` under `jax.jit` and "
        "`jax.set_mesh(mesh)`; or make_mesh(..., automatic=True)",
    ) from error


def _refuse_rate(where: str, rate: Any) -> None:
    if isinstance(rate, str):
        raise type_error(
            "the learning rate is a string",
            where=where,
            expected="a number, or a function from the step count to a number",
            got=repr(rate),
            instead=f"float({rate!r})",
        )
    # A model that can be called fails at the first step, as a schedule: its error names the learning rate.
    if isinstance(rate, (dict, list)) or (isinstance(rate, Module) and not callable(rate)):
        raise type_error(
            "the learning rate must be a number or a schedule",
            where=where,
            expected="a number, or a function from the step count to a number",
            got=short(rate),
            instead="Optimizer(optax.adam, 1e-3), and then state = optimiser.init(model)",
        )
