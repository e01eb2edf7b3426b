"""`GRUCell` and `LSTMCell` of one vector, by Equinox's formulas, whatever replaces a bias."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from .... import nn
from ._layer import LayerMeta


class GRUCell(nn.GRUCell, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.GRUCell` of one vector; use `jax.vmap` for a batch.

    Args:
        input_size: as in `vernal.nn.GRUCell`, like all other arguments.
        hidden_size: likewise.
        use_bias: likewise.
        dtype: likewise.
        key: likewise.
    """

    @jax.named_scope("eqx.nn.GRUCell")
    def __call__(self, input: Any, hidden: Any, *, key: PRNGKeyArray | None = None) -> Array:
        """One step.

        Args:
            input: shape `(input_size,)`.
            hidden: shape `(hidden_size,)`.
            key: not used.

        Returns:
            Shape `(hidden_size,)`.
        """
        of_input, of_hidden = self.weight_ih @ input, self.weight_hh @ hidden
        if self.bias is not None:
            of_input = of_input + self.bias
        (r_x, z_x, n_x), (r_h, z_h, n_h) = jnp.split(of_input, 3), jnp.split(of_hidden, 3)
        if self.bias_n is not None:
            n_h = n_h + self.bias_n
        r, z = jax.nn.sigmoid(r_x + r_h), jax.nn.sigmoid(z_x + z_h)
        n = jnp.tanh(n_x + r * n_h)
        return n + z * (hidden - n)


class LSTMCell(nn.LSTMCell, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.LSTMCell` of one vector; use `jax.vmap` for a batch.

    Args:
        input_size: as in `vernal.nn.LSTMCell`, like all other arguments.
        hidden_size: likewise.
        use_bias: likewise.
        dtype: likewise.
        key: likewise.
    """

    @jax.named_scope("eqx.nn.LSTMCell")
    def __call__(
        self, input: Any, hidden: tuple[Any, Any], *, key: PRNGKeyArray | None = None
    ) -> tuple[Array, Array]:
        """One step.

        Args:
            input: shape `(input_size,)`.
            hidden: hidden state and memory, each of shape `(hidden_size,)`.
            key: not used.

        Returns:
            The next hidden state and memory.
        """
        state, memory = hidden
        gates = self.weight_ih @ input + self.weight_hh @ state
        if self.bias is not None:
            gates = gates + self.bias
        i, f, g, o = jnp.split(gates, 4)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(memory), memory
