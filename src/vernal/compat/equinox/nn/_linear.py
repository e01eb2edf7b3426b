"""`Linear` and `MLP` by Equinox's formula, whatever replaces a weight."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from .... import nn
from ....modules import field
from ....show import short, value_error
from ....transforms import filter_vmap
from ._layer import LayerMeta


class Linear(nn.Linear, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Linear` of one vector: exactly `weight @ x + bias`.

    So the columns of a matrix are vectors; use `jax.vmap` for a batch.

    Args:
        in_features: as in `vernal.nn.Linear`, like all other arguments.
        out_features: likewise.
        use_bias: likewise.
        dtype: likewise.
        key: likewise.
    """

    @jax.named_scope("eqx.nn.Linear")
    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Any:
        """Applies the map.

        Args:
            x: shape `(in_features,)`, or `()` for a scalar.
            key: not used.

        Returns:
            Shape `(out_features,)`, or `()`.

        Raises:
            ValueError: if `x` must be a scalar, and is not.
        """
        if self.in_features == "scalar":
            if jnp.shape(x) != ():
                raise value_error(
                    "`Linear` was given an input of the wrong shape",
                    where="argument `x`",
                    expected="a scalar",
                    got=short(x),
                )
            x = jnp.broadcast_to(x, (1,))
        y = self.weight @ x
        if self.bias is not None:
            y = y + self.bias
        return lax.squeeze(y, (0,)) if self.out_features == "scalar" else y


class MLP(nn.MLP, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.MLP` of one vector, made of `Linear`. Its functions are leaves.

    Args:
        in_size: as in `vernal.nn.MLP`, like all other arguments.
        out_size: likewise.
        width_size: likewise.
        depth: likewise.
        activation: likewise.
        final_activation: likewise.
        use_bias: likewise.
        use_final_bias: likewise.
        dtype: likewise.
        scan: likewise.
        key: likewise.
    """

    # Not a field in Equinox.
    scan: bool = field(static=True, init=False, default=False)

    _linear = Linear

    @jax.named_scope("eqx.nn.MLP")
    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Array:
        """Applies the layers. An activation gets one unit at a time; with `depth=0` there is none.

        Args:
            x: shape `(in_size,)`, or `()` for a scalar.
            key: not used.

        Returns:
            Shape `(out_size,)`, or `()`.
        """
        if self.scan:
            return self._one(x)
        for i, layer in enumerate(self.layers[:-1]):
            activation = jtu.tree_map(partial(_one_of, i), self.activation)
            x = _of_each(activation, layer(x))
        x = self.layers[-1](x)
        if len(self.layers) == 1:
            return x
        if self.out_size == "scalar":
            return self.final_activation(x)
        return _of_each(self.final_activation, x)


def _one_of(i: int, leaf: Any) -> Any:
    """The leaf of an activation in one layer."""
    return leaf[i] if isinstance(leaf, Array) else leaf


def _of_each(activation: Any, x: Array) -> Array:
    """What each unit gives; arrays of the activation have an axis over them."""
    if not any(isinstance(leaf, Array) for leaf in jtu.tree_leaves(activation)):
        return jax.vmap(activation)(x)
    return filter_vmap(lambda activation, x: activation(x))(activation, x)
