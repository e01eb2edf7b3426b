"""The comparison of a layer with PyTorch's: the same weights, the same values and gradients.

Both sides compute in double precision, and weights and gradients cross by the rules of `saving.from_torch`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from vernal.saving import from_torch
from vernal.trees import named_leaves

BATCH = 2


def call_theirs(module, *inputs):
    return module(*inputs)


def call_ours(layer, *inputs):
    return jax.vmap(layer)(*inputs)


@dataclasses.dataclass(frozen=True)
class Row:
    """A layer of both, and what it is called with.

    Attributes:
        ours: makes our layer from a random key.
        theirs: makes PyTorch's.
        shapes: of the inputs, without the batch.
        rules: for the weights.
        gradient_rules: for the gradients, where they have other rules than the weights.
        integers: if given, the input is drawn from the integers below this.
        call_ours: from our layer and a batch of inputs to arrays.
        call_theirs: likewise, of PyTorch.
    """

    ours: Callable[[Any], Any]
    theirs: Callable[[], torch.nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    rules: Any = None
    gradient_rules: Any = None
    integers: int | None = None
    call_ours: Callable[..., Any] = call_ours
    call_theirs: Callable[..., Any] = call_theirs


def _inputs(row):
    random = np.random.default_rng(0)
    if row.integers:
        return [random.integers(0, row.integers, (BATCH, *row.shapes[0]))]
    return [random.normal(size=(BATCH, *shape)) for shape in row.shapes]


def _weights_of_the_loss(output):
    return np.cos(np.arange(np.prod(output.shape, dtype=int))).reshape(output.shape)


def of_theirs(row, module, inputs):
    """Outputs, gradients of the inputs, and gradients of the weights by name, of PyTorch."""
    tensors = [torch.tensor(x, requires_grad=not row.integers) for x in inputs]
    outputs = jax.tree.leaves(row.call_theirs(module, *tensors))
    loss = sum((y * torch.tensor(_weights_of_the_loss(y))).sum() for y in outputs)
    loss.backward()
    weights = {name: p.grad for name, p in module.named_parameters()}
    slopes = [x.grad for x in tensors if not row.integers]
    return [y.detach().numpy() for y in outputs], slopes, weights


def of_ours(row, layer, inputs):
    """Outputs, gradients of the inputs, and a layer of gradients."""

    def loss(layer, given):
        outputs = jax.tree.leaves(row.call_ours(layer, *(inputs if row.integers else given)))
        return sum((y * _weights_of_the_loss(y)).sum() for y in outputs), outputs

    given = [] if row.integers else inputs
    derivatives = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, outputs), (weights, slopes) = derivatives(layer, given)
    return outputs, slopes, weights


def check(row):
    """Outputs, and gradients of inputs and weights, are those of PyTorch."""
    with jax.enable_x64(True):
        torch.manual_seed(0)
        module = row.theirs().double()
        # No weight is what another layer has: ones, zeros.
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape) / 10)
        skeleton = jax.eval_shape(row.ours, jax.random.key(0))
        layer = from_torch(skeleton, module.state_dict(), row.rules)
        inputs = _inputs(row)
        theirs = of_theirs(row, module, inputs)
        ours = of_ours(row, layer, inputs)
        rules = row.rules if row.gradient_rules is None else row.gradient_rules
        gradients = from_torch(skeleton, theirs[2], rules, ignore=["bias_hh*"])
        for mine, wanted in [
            *zip(ours[0], theirs[0], strict=True),
            *zip(ours[1], theirs[1], strict=True),
            *zip(named_leaves(ours[2]).values(), jax.tree.leaves(gradients), strict=True),
        ]:
            np.testing.assert_allclose(mine, wanted, rtol=1e-9, atol=1e-10)
