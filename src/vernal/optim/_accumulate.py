"""`accumulate_gradients`: the gradient over a large batch, computed from parts that fit into memory.

A part is every n-th row, not a run of rows: if the batch is sharded over devices along its first axis, each device then
has an equal share of every part, and no row moves.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import callable_name
from ..loops import scan
from ..modules import params
from ..show import path_text, short, type_error, value_error
from ..transforms import check_callable, explicit_mesh, filter_value_and_grad, zeros_like
from ..trees import is_array


def accumulate_gradients(
    loss: Callable[..., Any], microbatches: int, *, weighted: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """The value and the gradient of a loss over a whole batch, computed one micro-batch at a time.

    Only one micro-batch at a time takes memory, and the results are those of the whole batch. It is one `scan` in the
    program. (`optax.MultiSteps` instead takes one step of the optimiser for several calls.)

    A micro-batch is every n-th row, so a batch that is sharded over devices stays where it is, on explicit and on
    automatic axes, and every device works on every micro-batch.

    Args:
        loss: `loss(model, batch, *args, **kwargs)`, which returns a real scalar: the mean over the rows of the batch
            that it is given.
        microbatches: the number of micro-batches. It must divide the number of rows of the batch.
        weighted: whether the loss returns `(total, weight)` instead: a sum, and the number to divide it by (such as the
            number of tokens that are not padding). The value is the sum of all totals over the sum of all weights,
            which equals the mean of means only if the weights are equal. The weights are not differentiated.

    Returns:
        A function of the same arguments that returns `(value, gradient)`; the gradient is with respect to the first
        argument, as in `filter_grad`. Sums are in at least float32. All arrays of `batch` are split along their first
        axis; other arguments are passed to every micro-batch as they are, except the keyword argument `key`, from which
        each micro-batch is given its own key.

    Raises:
        TypeError: if `loss` cannot be called; at a call, if it does not return a scalar (two, if `weighted`).
        ValueError: if `microbatches` is not at least 1; at a call, if the arrays of the batch differ in their number of
            rows, or `microbatches` does not divide it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal.optim import accumulate_gradients
        >>> def loss(model, batch):
        ...     return jnp.mean((model(batch) - 1) ** 2)
        >>> model = vernal.nn.Linear(3, 2, key=jax.random.key(0))
        >>> batch = jax.random.normal(jax.random.key(1), (12, 3))
        >>> value, gradient = vernal.filter_jit(accumulate_gradients(loss, 4))(model, batch)
        >>> whole, whole_gradient = vernal.filter_value_and_grad(loss)(model, batch)
        >>> bool(jnp.allclose(value, whole)), bool(jnp.allclose(gradient.weight, whole_gradient.weight))
        (True, True)
    """
    check_callable(loss, "accumulate_gradients")
    if microbatches < 1:
        raise value_error(
            "`microbatches` must be at least 1",
            where="argument `microbatches` of accumulate_gradients",
            expected="1 or more",
            got=str(microbatches),
        )
    where = f"accumulate_gradients({callable_name(loss)}, {microbatches})"
    one = jnp.ones((), jnp.float32)

    def value_and_gradient(
        model: Any, batch: Any, *args: Any, key: Any = None, **kwargs: Any
    ) -> Any:
        @filter_value_and_grad(has_aux=True)
        def of_part(model: Any, part: Any, number: Any) -> tuple[Any, Any]:
            drawn = {} if key is None else {"key": jax.random.fold_in(key, number)}
            out = loss(model, part, *args, **kwargs, **drawn)
            return _total_and_weight(out, where) if weighted else (_mean(out, where), one)

        def step(sums: Any, x: Any) -> tuple[Any, Any]:
            (total, weight), gradient = of_part(model, *x)
            return jtu.tree_map(lambda s, g: s + g.astype(s.dtype), sums, gradient), (total, weight)

        zeros = jtu.tree_map(_wide_zeros, params(model))
        numbers = jnp.arange(microbatches, dtype=jnp.int32)
        sums, (totals, weights) = scan(step, zeros, (_parts(batch, microbatches, where), numbers))
        weight = jnp.sum(weights)
        gradient = jtu.tree_map(
            lambda s, p: (s / weight.astype(s.dtype)).astype(p.dtype), sums, params(model)
        )
        return jnp.sum(totals) / weight.astype(totals.dtype), gradient

    return value_and_gradient


def _wide_zeros(x: Any) -> Any:
    narrow = jnp.finfo(x.dtype).bits < 32
    return zeros_like(x, jnp.float32 if narrow else x.dtype)


def _are_scalars(values: Any) -> bool:
    return jtu.all_leaves(values) and all(jnp.ndim(x) == 0 for x in values)


def _mean(out: Any, where: str) -> Any:
    if not _are_scalars([out]):
        raise type_error(
            "the loss must return one number",
            where=where,
            expected="a real scalar",
            got=short(out),
            instead="return jnp.mean(losses) and nothing else",
        )
    return out


def _total_and_weight(out: Any, where: str) -> tuple[Any, Any]:
    if not (isinstance(out, (tuple, list)) and len(out) == 2 and _are_scalars(out)):
        raise type_error(
            "a weighted loss must return a sum and its weight",
            where=where,
            expected="(total, weight), two real scalars",
            got=short(out),
            instead="return jnp.sum(mask * losses), jnp.sum(mask); or leave weighted out for a mean",
        )
    return out[0], jax.lax.stop_gradient(jnp.asarray(out[1], jnp.float32))


def _parts(batch: Any, n: int, where: str) -> Any:
    """The batch with its micro-batches along a new first axis."""
    leaves = [(p, jnp.asarray(x)) for p, x in jtu.tree_leaves_with_path(batch) if is_array(x)]
    rows = leaves[0][1].shape[0] if leaves and leaves[0][1].ndim else 0
    for path, x in leaves:
        spread = explicit_mesh(x)
        size = 1 if spread is None else _devices(x)
        if not x.ndim or x.shape[0] != rows or rows % (n * size):
            raise value_error(
                "the rows of the batch cannot be divided into equal micro-batches",
                where=f"{where}, {path_text(path, root='batch')}",
                expected=f"arrays with {rows} rows, a multiple of {n} micro-batches"
                + (f" times {size} devices" if size > 1 else ""),
                got=short(x),
                instead="a padded batch with a mask and weighted=True, or another number of micro-batches; pass arrays "
                "that are not split as further arguments",
            )
    if not leaves:
        raise value_error(
            "the batch has no arrays to split into micro-batches",
            where=f"{where}, the second argument",
            expected="arrays with one example per row",
            got=short(batch),
        )

    def cut(x: Any) -> Any:
        if not is_array(x):
            return x
        x = jnp.asarray(x)
        shape = (rows // n, n, *x.shape[1:])
        mesh = explicit_mesh(x)
        if mesh is None:
            return jnp.moveaxis(jnp.reshape(x, shape), 1, 0)
        spec = jax.typeof(x).sharding.spec
        out = jax.NamedSharding(mesh, jax.P(spec[0], None, *spec[1:]))
        return jnp.moveaxis(jnp.reshape(x, shape, out_sharding=out), 1, 0)

    return jtu.tree_map(cut, batch)


def _devices(x: Any) -> int:
    """The number of shards along the first axis of an array."""
    return (
        x.shape[0] // jax.typeof(x).sharding.shard_shape(x.shape)[0] if x.ndim and x.shape[0] else 1
    )
