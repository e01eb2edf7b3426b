"""`ring_attention`: attention over a sequence that is sharded over devices.

Every query may see every key, and no device has room for all keys. So each device keeps its queries, and the keys and
values are passed round a ring of the devices; at each of n steps a device sees one part of them. The softmax is
accumulated part by part: for each query, the largest score so far, the sum of the exponentials and the weighted sum of
the values are kept, and rescaled when a larger score comes (H. Liu et al., arXiv:2310.01889; the sums are those of
M. Rabe and C. Staats, arXiv:2112.05682).

Automatic differentiation would keep the keys of every step, which is the whole sequence on every device. A custom rule
instead passes keys and values round once more, together with the sums of their gradients, which are back on their own
device after n steps. From the forward pass it keeps the results, and the logarithm of each query's sum of exponentials.

Here `rows` are those of a block of queries, as in `_blockwise_attention.py`: only the scores of one block with one part
of the keys are in memory at a time. The layout is that of `_dense_attention.py`. All sums are in at least float32.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ..modules import Module, field
from ..show import value_error
from ..transforms import filter_custom_vjp, varying_axes, varying_over
from ._attention import check_sizes
from ._blockwise_attention import block_rows
from ._layer_arguments import as_flag, as_number
from ._precision import widen


@jax.named_scope("vernal.nn.ring_attention")
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: str,
    causal: bool = False,
    scale: float | None = None,
) -> Array:
    """`attention` inside `vernal.filter_shard_map`, over sequences that are sharded over an axis of the mesh.

    Each of n devices has one of n equal parts of the queries, keys and values, in the order of the devices. It receives
    the keys and values of the others one after another, and again for the gradient, and never holds more than two parts
    of them. The results are those of `attention` on the whole sequences.

    H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context",
    arXiv:2310.01889.

    Args:
        query: shape `(..., T / n, heads, size)`, the part on this device.
        key: shape `(..., S / n, key_value_heads, size)`; heads are grouped as in `attention`.
        value: shape `(..., S / n, key_value_heads, value_size)`.
        axis_name: the axis of the mesh.
        causal: whether a query sees only keys at its own position and before.
        scale: the factor of the products; by default `1 / sqrt(size)`.

    Returns:
        Shape `(..., T / n, heads, value_size)`, of the dtype of `query`: the part on this device. Only reverse-mode
        derivatives are supported.

    Raises:
        ValueError: if shapes or dtypes do not fit each other, or an argument does not vary over the axis: it is then
            the same on all devices, not a part of a sequence.

    Example:
        >>> import functools
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal import nn
        >>> mesh = vernal.sharding.make_mesh(sequence=-1)
        >>> x = jax.random.normal(jax.random.key(0), (16, 2, 4))
        >>> ring = functools.partial(nn.ring_attention, axis_name="sequence", causal=True)
        >>> spec = jax.P("sequence")
        >>> mapped = vernal.filter_shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec)
        >>> spread = jax.device_put(x, jax.NamedSharding(mesh, spec))
        >>> y = mapped(spread, spread, spread)
        >>> bool(jnp.allclose(y, nn.attention(x, x, x, causal=True), atol=1e-6))
        True
    """
    causal = as_flag("ring_attention", "causal", causal)
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    sizes = check_sizes(query, key, value)
    # With `check_vma=False` JAX does not track what varies, and nothing is refused here.
    for name, x in (("query", query), ("key", key), ("value", value)):
        missing = varying_axes(lax.axis_index(axis_name)) - varying_axes(x)
        if missing:
            raise value_error(
                "ring attention needs a different part of the sequence on each device",
                where=f"argument `{name}` of ring_attention",
                expected=f"an array that varies over {axis_name!r}",
                got=jax.typeof(x).str_short(),
                instead=f"in_specs with {axis_name!r} in the place of the sequence axis",
            )
    if scale is None:
        scale = 1 / math.sqrt(max(query.shape[-1], 1))
    factor = as_number("ring_attention", "scale", scale, "one real number")
    devices = lax.axis_size(axis_name)
    rows = block_rows(sizes, None) // devices
    least = -(-sizes.queries // max(rows, 64))
    fitting = (n for n in range(max(least, 1), sizes.queries + 1) if sizes.queries % n == 0)
    blocks = next(fitting, 1)
    ring = _Ring(axis_name, devices, causal, factor, blocks)
    heads = (sizes.key_value_heads, sizes.group)
    grouped = jnp.moveaxis(query.reshape((*query.shape[:-2], *heads, query.shape[-1])), -4, -2)
    out = _attend((grouped, jnp.moveaxis(key, -3, -2), jnp.moveaxis(value, -3, -2)), ring)
    return jnp.moveaxis(out, -2, -4).reshape((*query.shape[:-1], value.shape[-1]))


class _Ring(Module):
    """The settings of one call."""

    axis_name: str = field(static=True)
    devices: int = field(static=True)
    causal: bool = field(static=True)
    scale: float = field(static=True)
    blocks: int = field(static=True)

    def next(self, tree: Any) -> Any:
        """The parts that the device before this one holds."""
        steps = [(i, (i + 1) % self.devices) for i in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, steps), tree)

    def scores(self, query: Array, keys: Array, block: Array, step: Array) -> Array:
        """The scores of a block of queries with the keys received at a step."""
        wide = widen(jnp.zeros((), query.dtype)).dtype
        scores = jnp.einsum("...kgth,...ksh->...kgts", query, keys, preferred_element_type=wide)
        scores = scores * jnp.asarray(self.scale, wide)
        if not self.causal:
            return scores
        here = lax.axis_index(self.axis_name)
        rows, length = query.shape[-2], keys.shape[-2]
        at = jnp.arange(rows, dtype=jnp.int32)[:, None] + (here * self.blocks + block) * rows
        of_keys = (here - step) % self.devices * length + jnp.arange(length, dtype=jnp.int32)
        visible = at >= of_keys[None]
        return jnp.where(lax.expand_dims(visible, range(scores.ndim - 2)), scores, -jnp.inf)

    def over_blocks(self, body: Any, carry: Any, arrays: Any) -> tuple[Any, Any]:
        """A scan over the blocks of rows of `arrays`."""

        def cut(x: Array) -> Array:
            rows = x.shape[-2] // self.blocks
            x = x.reshape((*x.shape[:-2], self.blocks, rows, x.shape[-1]))
            return jnp.moveaxis(x, -3, 0)

        def join(x: Array) -> Array:
            x = jnp.moveaxis(x, 0, -3)
            return x.reshape((*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]))

        numbers = jnp.arange(self.blocks, dtype=jnp.int32)
        carry, out = lax.scan(body, carry, (numbers, jax.tree.map(cut, arrays)))
        return carry, jax.tree.map(join, out)


def _forward(ring: _Ring, query: Array, keys: Array, values: Array) -> tuple[Array, Array]:
    """The results in at least float32, and the logarithms of the sums of exponentials."""
    axes = varying_axes(query, keys, values)
    wide = widen(jnp.zeros((), query.dtype)).dtype

    def start(size: int, fill: float) -> Array:
        return varying_over(jnp.full((*query.shape[:-1], size), fill, wide), axes)

    def see(step: Array, keys: Array, values: Array, sums: Any) -> Any:
        def block(_: None, x: Any) -> tuple[None, Any]:
            number, (query, out, total, top) = x
            scores = ring.scores(query, keys, number, step)
            higher = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True, initial=-math.inf))
            # A query may see none of the keys received so far.
            finite = jnp.where(higher == -jnp.inf, 0, higher)
            powers, shrink = jnp.exp(scores - finite), jnp.exp(top - finite)
            more = jnp.einsum(
                "...kgts,...ksv->...kgtv",
                powers.astype(values.dtype),
                values,
                preferred_element_type=wide,
            )
            total = total * shrink + jnp.sum(powers, axis=-1, keepdims=True)
            return None, (out * shrink + more, total, higher)

        return ring.over_blocks(block, None, (query, *sums))[1]

    def turn(carry: Any, step: Array) -> tuple[Any, None]:
        parts, sums = carry
        keys, values = parts = ring.next(parts)
        return (parts, see(step, keys, values, sums)), None

    sums = start(values.shape[-1], 0.0), start(1, 0.0), start(1, -math.inf)
    sums = see(jnp.zeros((), jnp.int32), keys, values, sums)
    steps = jnp.arange(1, ring.devices, dtype=jnp.int32)
    (_, (out, total, top)), _ = lax.scan(turn, ((keys, values), sums), steps)
    # Of no keys, the result is zero.
    total = jnp.where(total == 0, 1, total)
    return out / total, top + jnp.log(total)


@filter_custom_vjp
def _attend(arrays: tuple[Array, Array, Array], ring: _Ring) -> Array:
    return _forward(ring, *arrays)[0].astype(arrays[0].dtype)


@_attend.def_fwd
def _attend_fwd(_: Any, arrays: tuple[Array, Array, Array], ring: _Ring) -> tuple[Array, Any]:
    out, log_total = _forward(ring, *arrays)
    out = out.astype(arrays[0].dtype)
    return out, (out, log_total)


@_attend.def_bwd
def _attend_bwd(
    residuals: Any, ct: Array, _: Any, arrays: tuple[Array, Array, Array], ring: _Ring
) -> tuple[Array, Array, Array]:
    query, keys, values = arrays
    out, log_total = residuals
    axes = varying_axes(query, keys, values, ct)
    wide = log_total.dtype
    # For each query, the mean of the cotangents of its weights, weighted by them.
    mean = jnp.sum(ct.astype(wide) * out.astype(wide), axis=-1, keepdims=True)

    def start(x: Array) -> Array:
        return varying_over(jnp.zeros(x.shape, wide), axes)

    def product(text: str, a: Array, b: Array) -> Array:
        return jnp.einsum(text, a, b, preferred_element_type=wide)

    def turn(carry: Any, step: Array) -> tuple[Any, None]:
        (keys, values), of_parts, of_query = carry

        def block(sums: Any, x: Any) -> tuple[Any, Array]:
            number, (query, ct, log_total, mean, of_query) = x
            weights = jnp.exp(ring.scores(query, keys, number, step) - log_total)
            slope = product("...kgtv,...ksv->...kgts", ct, values) - mean
            slope = (weights * slope * jnp.asarray(ring.scale, wide)).astype(query.dtype)
            of_keys, of_values = sums
            weights = weights.astype(ct.dtype)
            of_values = of_values + product("...kgts,...kgtv->...ksv", weights, ct)
            of_keys = of_keys + product("...kgts,...kgth->...ksh", slope, query)
            of_query = of_query + product("...kgts,...ksh->...kgth", slope, keys)
            return (of_keys, of_values), of_query

        given = query, ct, log_total, mean, of_query
        of_parts, of_query = ring.over_blocks(block, of_parts, given)
        return (*ring.next(((keys, values), of_parts)), of_query), None

    steps = jnp.arange(ring.devices, dtype=jnp.int32)
    first = (keys, values), (start(keys), start(values)), start(query)
    (_, (of_keys, of_values), of_query), _ = lax.scan(turn, first, steps)
    return of_query.astype(query.dtype), of_keys.astype(keys.dtype), of_values.astype(values.dtype)
