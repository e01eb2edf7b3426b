"""An Optax object kept whole: the result of a factory, without its settings.

The values that its functions close over stay where they are. Only arrays become leaves, because they would otherwise be
constants of a compiled program.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from ..modules import Module
from ..transforms import closure_to_pytree
from ..trees import is_array


class _Pair(NamedTuple):
    init: Any
    update: Any


@contextlib.contextmanager
def optax_promotes() -> Iterator[None]:
    """Allows what Optax needs, even if the user has forbidden it for their own code: mixed dtypes (Adam computes
    `b1**count`) and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def is_transformation(x: Any) -> bool:
    """Whether an object is an Optax transformation, or has the methods of one."""
    return (
        not isinstance(x, type)
        and callable(getattr(x, "init", None))
        and callable(getattr(x, "update", None))
    )


def hoisted(x: Any) -> Any:
    """A callable, or a tuple of callables, with its arrays as leaves; the same object if it holds none."""
    made = closure_to_pytree(x)
    return made if any(map(is_array, jtu.tree_leaves(made))) else x


class Whole(Module):
    """A transformation, wrapped as a factory that returns it."""

    transformation: Any

    def __init__(self, transformation: Any):
        whole = jtu.is_tree_node(type(transformation))
        given = transformation if whole else _Pair(transformation.init, transformation.update)
        opened = hoisted(given)
        self.transformation = transformation if opened is given else opened

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] (of an instance)
        return "from_optax"

    def __call__(self) -> Any:
        return self.transformation

    def __deepcopy__(self, memo: Any) -> Any:
        # Immutable, and functions are not copied either.
        return self
