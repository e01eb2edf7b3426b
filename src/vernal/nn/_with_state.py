"""Models whose state is kept outside of them: `make_with_state`, `delete_init_state`."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax.tree_util as jtu

from ._state import State
from ._variable import Elsewhere, Variable, is_variable

P = ParamSpec("P")
T = TypeVar("T")


def make_with_state(make_model: Callable[P, T]) -> Callable[P, tuple[T, State]]:
    """Makes a model whose state is kept outside of it.

    The value of every `Variable` of the model is moved to a `State`, under a marker: the path of the variable. Models
    made in the same way have the same markers, so the state of one fits the other.

    Args:
        make_model: a class of models, or a function that returns a model.

    Returns:
        A function of the same arguments that returns `(model, state)`. Under `jax.vmap` it returns an ensemble.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import nn
        >>> model, state = nn.make_with_state(lambda: [nn.Variable(jnp.zeros(3))])()
        >>> model, state
        ([Variable(marker='list[0]', stored=Elsewhere())], State({'list[0]': f32[3]}))
        >>> state.set(model[0], jnp.ones(3)).get(model[0])
        Array([1., 1., 1.], dtype=float32)
    """

    @functools.wraps(make_model)
    def make(*args: P.args, **kwargs: P.kwargs) -> tuple[T, State]:
        model = make_model(*args, **kwargs)
        root = type(model).__name__
        values: dict[str, Any] = {}

        def move(path: Any, node: Any) -> Any:
            if not isinstance(node, Variable):
                return node
            marker = root + jtu.keystr(path)
            values[marker] = node.value
            return type(node)(Elsewhere(), marker=marker)

        model = jtu.tree_map_with_path(move, model, is_leaf=is_variable)
        return model, State.of_values(values)

    return make


def delete_init_state(model: T) -> T:
    """Removes the value of every `Variable` of a model, to use the model with the `State` of another.

    Args:
        model: any tree.

    Returns:
        A copy with the same markers and no values. `make_with_state` does this already.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import nn
        >>> nn.delete_init_state([nn.Variable(jnp.zeros(3))])
        [Variable(marker=None, stored=Elsewhere())]
    """

    def delete(node: Any) -> Any:
        return type(node)(Elsewhere(), marker=node.marker) if is_variable(node) else node

    return jtu.tree_map(delete, model, is_leaf=is_variable)
