"""`init_sharded`: makes a model directly on its devices."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax import P
from jax.sharding import Mesh

from ..transforms import filter_eval_shape, filter_jit
from ._rules import Rules, shardings

T = TypeVar("T")


def init_sharded(
    make_model: Callable[[Any], T],
    key: Any,
    mesh: Mesh,
    rules: Rules,
    *,
    like: Any = None,
    default: P | None = None,
) -> T:
    """Makes a model that is sharded over a mesh, without ever holding it whole in one place.

    The constructor is compiled into one program, in which every device draws its own part of the random numbers. The
    result is the same model as `make_model(key)`. (An initialiser that is an algorithm on a whole matrix, such as an
    orthogonal one, holds this one matrix in memory.)

    Args:
        make_model: a function of one argument that can be compiled, such as `lambda key: nn.MLP(2, 2, 8, 3, key=key)`.
        key: its argument: a random key, or whatever else the model is made from.
        mesh: see `make_mesh`.
        rules: see `shardings`. May be a function of the model, which it gets with shapes in place of arrays:
            `lambda model: fsdp(model, mesh, "data")`.
        like: see `shardings`. To make the state of an optimiser, call
            `init_sharded(optimizer.init, model, mesh, rules, like=model)`.
        default: see `shardings`.

    Returns:
        What `make_model(key)` returns, placed on the mesh.

    Raises:
        TypeError: for a rule that is not a `jax.P`.
        ValueError: if the rules do not fit.

    Example:
        >>> import jax
        >>> from vernal import nn
        >>> from vernal.sharding import fsdp, init_sharded, make_mesh
        >>> mesh = make_mesh(data=-1)
        >>> model = init_sharded(
        ...     lambda key: nn.Linear(512, 512, key=key),
        ...     jax.random.key(0),
        ...     mesh,
        ...     lambda model: fsdp(model, mesh, "data"),
        ... )
        >>> model.weight.sharding.spec, model.bias.sharding.spec
        (P('data', None), P())
    """
    # Within an explicit mesh, a new array is replicated by its type. Outside of any mesh, the compiler propagates the
    # shardings back from the results.
    with jax.set_mesh(Mesh(np.empty((), dtype=object), ())):
        abstract = filter_eval_shape(make_model, key)
        placed = shardings(abstract, mesh, rules, like=like, default=default)
        return filter_jit(make_model, out_shardings=placed)(key)
