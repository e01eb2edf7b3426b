"""Fifty steps of training of every layer that PyTorch has, with equal losses, and then the same in evaluation.

The rows are those of `test_torch.py` and `test_sequences_torch.py`, the first of each layer. The inputs are trained
along with the weights, so that layers without weights are trained too.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from tests.nn import test_sequences_torch, test_torch
from tests.nn._torch_parity import Row
from tests.nn.test_table import public_layers
from vernal import nn
from vernal.saving import from_torch, spectral_norm_rules

STEPS, RATE, MOMENTUM = 50, 0.05, 0.9


def _batch_norm(theirs, shape):
    # Cumulative averages, in which PyTorch's first values do not count either.
    return Row(
        lambda k: nn.BatchNorm(shape[0], momentum=None, num_spatial_dims=len(shape) - 1),
        lambda: theirs(shape[0], momentum=None),
        (shape,),
        call_ours=lambda layer, x: layer(x),
    )


MORE = {
    "BatchNorm1d": _batch_norm(torch.nn.BatchNorm1d, (3,)),
    "BatchNorm2d": _batch_norm(torch.nn.BatchNorm2d, (3, 3, 3)),
    "BatchNorm3d": _batch_norm(torch.nn.BatchNorm3d, (2, 3, 3, 3)),
    "SpectralNorm": Row(
        lambda k: nn.SpectralNorm(nn.Linear(4, 3, key=k), key=k),
        lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 3)),
        ((4,),),
        spectral_norm_rules(),
        call_ours=lambda layer, x: layer(x),
    ),
    "Upsample": Row(
        lambda k: nn.Upsample(scale=(2, 2), method="linear"),
        lambda: torch.nn.Upsample(scale_factor=2, mode="bilinear"),
        ((2, 3, 3),),
    ),
    # While training, they are random.
    "Dropout": Row(
        lambda k: nn.Dropout(0.3, inference=True), lambda: torch.nn.Dropout(0.3).eval(), ((4,),)
    ),
    "Identity": Row(lambda k: nn.Identity(), torch.nn.Identity, ((4,),)),
}


def first_of_each(rows):
    found = {}
    for name, row in rows.items():
        found.setdefault(name.split(",")[0].split()[0], row)
    return found


ROWS = first_of_each(test_torch.ROWS | test_sequences_torch.ROWS | MORE)
# Ours have one name for any number of axes, or are functions there.
ALSO_THERE = {"BatchNorm", "InstanceNorm", "SpectralNorm", "WeightNorm"}


def test_every_layer_that_pytorch_has_is_trained():
    names = {layer.__name__ for layer in public_layers()}
    theirs = {name for name, value in vars(torch.nn).items() if inspect.isclass(value)}
    wanted = names & (theirs | ALSO_THERE)
    assert len(wanted) > 30
    assert {name for name in wanted if not any(row.startswith(name) for row in ROWS)} == set()


def _one_trained_bias(module):
    """Of two biases that are only added, trains one: their sum, which is our bias, would move twice as fast."""
    for name, parameter in module.named_parameters():
        if "bias_hh" in name:
            added = torch.ones_like(parameter)
            if isinstance(module, torch.nn.GRU | torch.nn.GRUCell):
                added[2 * len(added) // 3 :] = 0
            parameter.register_hook(lambda slope, added=added: slope * (1 - added))


def _outputs(call, layer, inputs):
    return jax.tree.leaves(call(layer, *inputs))


def trained_there(row, module, inputs, targets):
    """The losses, the outputs in evaluation after them, and the inputs that were trained along."""
    xs = [torch.tensor(x, requires_grad=not row.integers) for x in inputs]
    _one_trained_bias(module)
    parameters = [*module.parameters(), *([] if row.integers else xs)]
    optimizer = torch.optim.SGD(parameters, RATE, MOMENTUM)
    losses = []
    for _ in range(STEPS):
        outputs = _outputs(row.call_theirs, module, xs)
        loss = sum(
            ((y - torch.tensor(t)) ** 2).mean() for y, t in zip(outputs, targets, strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        outputs = _outputs(row.call_theirs, module.eval(), xs)
    return losses, [y.detach().numpy() for y in outputs], [x.detach().numpy() for x in xs]


def trained_here(row, layer, inputs, targets):
    """Likewise."""
    optimizer = optax.sgd(RATE, MOMENTUM)
    fixed = inputs if row.integers else None

    @jax.jit
    def run(layer, inputs, targets):
        def loss(trained):
            layer, given = trained
            outputs, layer = nn.apply(
                layer,
                *(fixed or given),
                method=lambda layer, *x: _outputs(row.call_ours, layer, x),
            )
            pairs = zip(outputs, targets, strict=True)
            return sum(((y - t) ** 2).mean() for y, t in pairs), layer

        def step(carry, _):
            (layer, given), state = carry
            (value, layer), grads = jax.value_and_grad(loss, has_aux=True)((layer, given))
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates((layer, given), updates), state), value

        start = layer, () if row.integers else inputs
        ((layer, given), _), losses = jax.lax.scan(
            step, (start, optimizer.init(start)), length=STEPS
        )
        xs = fixed or given
        return losses, _outputs(row.call_ours, nn.inference_mode(layer), xs), xs

    return run(layer, inputs, targets)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.sample(3)
def test_fifty_steps_of_sgd_with_momentum_have_pytorchs_losses(row):
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        torch.manual_seed(0)
        module = row.theirs().double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape) / 10)
        layer = from_torch(
            jax.eval_shape(row.ours, jax.random.key(0)), module.state_dict(), row.rules
        )
        if row.integers:
            inputs = [random.integers(0, row.integers, (2, *row.shapes[0]))]
        else:
            inputs = [random.normal(size=(2, *shape)) for shape in row.shapes]
        shapes = jax.eval_shape(lambda: _outputs(row.call_ours, nn.inference_mode(layer), inputs))
        targets = [random.normal(size=y.shape) for y in shapes]
        theirs = trained_there(row, module, inputs, targets)
        ours = trained_here(row, layer, [jnp.asarray(x) for x in inputs], targets)
        # An input that is trained too lets every layer learn something.
        assert row.integers or theirs[0][-1] < theirs[0][0]
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-8)
        for mine, wanted in zip([*ours[1], *ours[2]], [*theirs[1], *theirs[2]], strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-6, atol=1e-8)
