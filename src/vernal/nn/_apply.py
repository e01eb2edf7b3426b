"""`apply`: calls a model, and returns it with its state updated."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PRNGKeyArray

from ..harvest import reap
from ..show import path_text, short, type_error, value_error
from ..trees import check_key, set_attributes
from ._captures import by_name, hooks_for, with_hooks
from ._inference import inference_mode
from ._keys import keys_for, with_keys
from ._parametrised import resolve
from ._variable import Variable, is_variable, variables_in

T = TypeVar("T")


@overload
def apply(
    model: T,
    *args: Any,
    key: PRNGKeyArray | None = None,
    train: bool | None = None,
    method: str | Callable[..., Any] | None = None,
    capture: None = None,
    **kwargs: Any,
) -> tuple[Any, T]: ...


@overload
def apply(
    model: T,
    *args: Any,
    key: PRNGKeyArray | None = None,
    train: bool | None = None,
    method: str | Callable[..., Any] | None = None,
    capture: str | Sequence[str],
    **kwargs: Any,
) -> tuple[Any, T, dict[str, Any]]: ...


def apply(
    model: Any,
    *args: Any,
    key: PRNGKeyArray | None = None,
    train: bool | None = None,
    method: str | Callable[..., Any] | None = None,
    capture: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a model, and returns the result and the model with its state updated.

    Use it to train a model with `BatchNorm`, `SpectralNorm`, or any other layer with a `Variable`. The layers are
    simply called (`x = self.norm(x)`), and `apply` collects their updates, also from inside `jax.jit`, `jax.vmap`,
    `jax.lax.scan`, `jax.lax.cond`, `jax.checkpoint` and `jax.grad`. The second call of a layer sees the state that the
    first one left; in a loop, each step sees the state of the step before.

    A training step:

        @vernal.filter_jit
        def step(model, opt_state, x, labels, key):
            def loss(model):
                logits, model = nn.apply(model, x, key=key)
                return cross_entropy(logits, labels), model

            grads, model = vernal.filter_grad(loss, has_aux=True)(model)
            model, opt_state = optimiser.update(model, grads, opt_state)
            return model, opt_state

    For inference, call `nn.inference_mode(model)(x)`, or `nn.apply(model, x, train=False)[0]`.

    A layer trains unless its own flag says otherwise (`BatchNorm(..., inference=True)`, or
    `nn.inference_mode(model.backbone)` for a part), or its state is frozen (`vernal.freeze(model, "backbone")`). A
    layer that does not train keeps its statistics and normalises by them: use this to fine-tune a model.

    `vernal.nn.Parametrised` arrays are resolved.

    The gradient is that of the plain call: state is a buffer, and no derivative passes through it. The returned model
    has the structure of the one given, so it can be the carry of a `jax.lax.scan`. `apply` traces the model, as
    `jax.jit` does: compile the code around it, and do not branch on values of arrays in Python.

    Args:
        model: the model to call.
        *args: its arguments, any Python objects.
        key: a random key, from which every layer that needs randomness gets its own (see `vernal.nn.keys`). A layer
            that is used several times, or at every step of a loop, draws anew each time. The key is not passed on: for
            a model whose own call takes a `key`, write `nn.apply(model, x, method=lambda model, x: model(x, key=key))`.
        train: False puts every layer in inference for this call. With True or None each layer follows its own setting:
            only `nn.inference_mode(model, False)` takes layers out of inference.
        method: what to call instead of the model itself: the name of one of its methods, or a function that takes
            the model first.
        capture: paths of layers (see `vernal.trees.Pattern`), such as `"layers.0"` or `["**.norm"]`, whose results are
            returned as well. A layer that is called several times gives its last result. In a `Stack`, or any
            `jax.lax.scan`, it gives the results of all steps, along a leading axis; under a `jax.vmap` inside the
            model, those of all elements (axes of loops come first). Derivatives pass through.
        **kwargs: its keyword arguments.

    Returns:
        `(result, model)`, where the model is the one given with new values of its variables. With `capture`,
        `(result, model, captured)`, where `captured` maps the names of the layers to their results.

    Raises:
        ValueError: if one `Variable` appears twice in the model; if the elements of a `jax.vmap` inside the model
            disagree about a state that they share; if a path in `capture` matches no layer, or only layers that are not
            called.
        TypeError: if the model cannot be called or has no method of this name, `train` is not a bool, or `key` is not a
            random key.
        RuntimeError: if the state of the model is in a `State`.
        NotImplementedError: if the model changes its state, or a result is captured, where that is not supported: see
            `vernal.harvest.reap`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal import nn
        >>> class Average(vernal.Module):
        ...     mean: nn.Variable
        ...     def __init__(self):
        ...         self.mean = nn.Variable(jnp.array(0.0))
        ...     def __call__(self, x):
        ...         new = 0.5 * self.mean.value + 0.5 * x.mean()
        ...         return self.mean.update(new, x - new)
        >>> model = nn.Sequential([jnp.sin, Average()])
        >>> y, model = nn.apply(model, jnp.array([0.0, jnp.pi / 2]))
        >>> print(y, model[1].mean.value)
        [-0.25  0.75] 0.25
        >>> y, model, captured = nn.apply(model, jnp.array([0.0, jnp.pi / 2]), capture="layers.*")
        >>> print(captured)
        {'layers.1': Array([-0.375,  0.625], dtype=float32)}
    """
    if not (train is None or isinstance(train, bool | np.bool_)):
        raise type_error(
            "`train` must be a Python bool, known while tracing",
            where="apply(model, ..., train=...)",
            expected="True, False or None",
            got=short(train),
            instead="filter_cond(train, lambda: apply(model, x), lambda: apply(model, x, train=False))",
        )
    _refuse_abstract(model)
    _refuse_twice(model)
    call = _to_call(model, method)
    hooks = None if capture is None else hooks_for(model, capture)

    def run(slots: Any, args: Any, kwargs: Any) -> Any:
        values, own = slots
        mine = _with_values(model, values)
        mine = mine if train is None or train else inference_mode(mine)
        mine = with_keys(mine, own) if own else mine
        mine = with_hooks(mine, hooks) if hooks else mine
        return call(resolve(mine, layers=False), *args, **kwargs)

    values = [variable.value for _, variable in variables_in(model)]
    own = [] if key is None else keys_for(model, check_key("apply", key))
    if not values and not own and hooks is None:
        return run((values, own), args, kwargs), model
    out, (values, _), caught = reap(run, (hooks or {}).values())((values, own), args, kwargs)
    model = _with_values(model, values)
    return (out, model) if hooks is None else (out, model, by_name(hooks, caught))


def _with_values(model: Any, values: list[Any]) -> Any:
    """The model with these values in its variables, in order."""
    if not values:
        return model
    rest = iter(values)

    def fill(node: Any) -> Any:
        if not isinstance(node, Variable):
            return node
        return set_attributes(node, "stored", next(rest))

    return jtu.tree_map(fill, model, is_leaf=is_variable)


def _to_call(model: Any, method: Any) -> Callable[..., Any]:
    """The function to call, with the model as its first argument."""
    if method is None:
        if not callable(model):
            raise type_error(
                "`nn.apply` needs a model that can be called",
                where="apply(model, ...)",
                expected="a module with `__call__`, or a function",
                got=short(model),
                instead="nn.Sequential(layers) for layers one after another; or method=lambda layers, x: ...",
            )
        return lambda model, *args, **kwargs: model(*args, **kwargs)
    if callable(method):
        return method
    if not isinstance(method, str):
        raise type_error(
            "`method` must be a name or a function",
            where="apply(model, ..., method=...)",
            expected="the name of a method, or a function that takes the model first",
            got=short(method),
        )
    if not callable(getattr(model, method, None)):
        raise type_error(
            f"the model has no method {method!r}",
            where="apply(model, ..., method=...)",
            expected="the name of a method, or a function that takes the model first",
            got=short(getattr(model, method, "no such attribute")),
            instead=f"method=lambda model, *args: model.part.{method}(*args), for a method of a part",
        )
    return lambda model, *args, **kwargs: getattr(model, method)(*args, **kwargs)


def _refuse_abstract(model: Any) -> None:
    for path, leaf in jtu.tree_leaves_with_path(model):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise type_error(
                "an array of the model has no value",
                where=path_text(path, "model"),
                expected="arrays, in a model that is called",
                got=short(leaf),
                instead="vernal.load(path, model), or nn.initialise(model, rules, key) with a rule for every array; "
                "vernal.filter_eval_shape(nn.apply, model, x) for shapes alone",
            )


def _refuse_twice(model: Any) -> None:
    seen: dict[int, Any] = {}
    for path, variable in variables_in(model):
        if id(variable) in seen:
            raise value_error(
                "a layer with state appears twice in the model",
                where=f"{path_text(seen[id(variable)], 'model')} and {path_text(path, 'model')}",
                expected="each layer once: stored twice, it would become two layers, each with its own state",
                instead="two layers; or one layer, called twice",
            )
        seen[id(variable)] = path
