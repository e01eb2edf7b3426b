"""Layers with state against PyTorch's: results, gradients and what they remember, over many steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vernal import nn, tree_at
from vernal.saving import from_torch, spectral_norm_rules, to_torch

STEPS = 50


def close(a, b, tolerance=1e-5):
    a, b = (np.asarray(x.detach() if isinstance(x, torch.Tensor) else x) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@jax.jit
def our_step(layer, x, weights):
    """The result, the gradients with respect to the layer and `x`, and the layer with new state."""

    def loss(layer, x):
        y, layer = nn.apply(layer, x)
        return (weights * y).sum(), (y, layer)

    grads, (y, layer) = jax.grad(loss, (0, 1), has_aux=True)(layer, x)
    return y, *grads, layer


def their_step(module, x, weights):
    module.zero_grad()
    x = torch.tensor(x, requires_grad=True)
    y = module(x)
    (torch.tensor(weights) * y).sum().backward()
    return y, x.grad


BATCHES = {
    "vectors": (torch.nn.BatchNorm1d, 0, (4, 3)),
    "signals": (torch.nn.BatchNorm1d, 1, (2, 3, 5)),
    "images": (torch.nn.BatchNorm2d, 2, (3, 3, 2, 2)),
}


@pytest.mark.parametrize(("theirs", "spatial", "shape"), BATCHES.values(), ids=BATCHES)
def test_batch_norm_over_fifty_steps(theirs, spatial, shape):
    numbers = np.random.default_rng(0)
    with jax.enable_x64(True):
        theirs = theirs(3, momentum=0.1, dtype=torch.float64)
        for parameter in theirs.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
        # So many that what PyTorch starts from counts no more.
        for _ in range(200):
            theirs(torch.tensor(numbers.normal(size=shape)))
        ours = nn.BatchNorm(3, momentum=0.9, num_spatial_dims=spatial)
        ours = from_torch(ours, theirs.state_dict())
        assert ours.num_batches_tracked.value == 200
        for step in range(STEPS):
            x = numbers.normal(np.sin(step), 1 + step / 10, shape)
            weights = numbers.normal(size=shape)
            y, grads, dx, ours = our_step(ours, x, weights)
            expected, expected_dx = their_step(theirs, x, weights)
            close(y, expected)
            close(dx, expected_dx)
            close(grads.weight, theirs.weight.grad)
            close(grads.bias, theirs.bias.grad)
            close(ours.running_mean.value, theirs.running_mean)
            close(ours.running_var.value, theirs.running_var)
        close(nn.inference_mode(ours)(x), theirs.eval()(torch.tensor(x)))


def test_from_the_first_batch_on_statistics_are_pytorchs_without_the_start():
    numbers = np.random.default_rng(0)
    with jax.enable_x64(True):
        theirs = torch.nn.BatchNorm1d(3, momentum=0.1, dtype=torch.float64)
        average = torch.nn.BatchNorm1d(3, momentum=None, dtype=torch.float64)
        ours, cumulative = nn.BatchNorm(3, momentum=0.9), nn.BatchNorm(3, momentum=None)
        for n in range(1, 11):
            x = numbers.normal(size=(5, 3)) * n
            for module in (theirs, average):
                module(torch.tensor(x))
            ours, cumulative = (nn.apply(norm, x)[1] for norm in (ours, cumulative))
            start = 0.9**n
            close(ours.running_mean.value, theirs.running_mean / (1 - start))
            close(ours.running_var.value, (theirs.running_var - start) / (1 - start))
            close(cumulative.running_mean.value, average.running_mean)
            close(cumulative.running_var.value, average.running_var)


def test_statistics_without_their_count_go_on_by_pytorchs_rule():
    numbers = np.random.default_rng(0)
    with jax.enable_x64(True):
        theirs = torch.nn.BatchNorm1d(3, momentum=0.1, dtype=torch.float64)
        theirs.running_mean.add_(2.0), theirs.running_var.mul_(3.0)
        saved = {k: v for k, v in theirs.state_dict().items() if k != "num_batches_tracked"}
        ours = from_torch(nn.BatchNorm(3), saved, {"num_batches_tracked": None})
        ours = tree_at("num_batches_tracked", ours, jnp.array(np.inf))
        for _ in range(5):
            x = numbers.normal(size=(5, 3))
            theirs(torch.tensor(x))
            ours = nn.apply(ours, x)[1]
            close(ours.running_mean.value, theirs.running_mean, 1e-12)
            close(ours.running_var.value, theirs.running_var, 1e-12)


WEIGHTS = {
    "a matrix": (
        lambda key: nn.Linear(3, 4, key=key),
        lambda: torch.nn.Linear(3, 4, dtype=torch.float64),
        (2, 3),
        2,
    ),
    "a convolution": (
        lambda key: nn.Conv2d(2, 3, 2, key=key),
        lambda: torch.nn.Conv2d(2, 3, 2, dtype=torch.float64),
        (2, 2, 3, 4),
        1,
    ),
}


@pytest.mark.parametrize(("ours", "theirs", "shape", "times"), WEIGHTS.values(), ids=WEIGHTS)
def test_spectral_norm_over_training_steps(ours, theirs, shape, times):
    numbers = np.random.default_rng(0)
    with jax.enable_x64(True):
        layer = ours(jax.random.key(0))
        ours = nn.SpectralNorm(layer, num_power_iterations=times, key=jax.random.key(1))
        theirs = torch.nn.utils.parametrizations.spectral_norm(theirs(), n_power_iterations=times)
        theirs.load_state_dict(to_torch(ours, spectral_norm_rules(), like=theirs.state_dict()))
        optimizer = torch.optim.SGD(theirs.parameters(), lr=0.02)
        weights = numbers.normal(size=jax.eval_shape(layer, jnp.zeros(shape)).shape)
        for _ in range(5):
            x = numbers.normal(size=shape)
            y, grads, dx, ours = our_step(ours, x, weights)
            expected, expected_dx = their_step(theirs, x, weights)
            close(y, expected)
            close(dx, expected_dx)
            original = theirs.parametrizations.weight.original
            close(grads.layer.weight, original.grad)
            ours = tree_at(
                lambda m: m.layer,
                ours,
                jax.tree.map(lambda p, g: p - 0.02 * g, ours.layer, grads.layer),
            )
            optimizer.step()
            state = theirs.state_dict()
            close(ours.vectors.value[0], state["parametrizations.weight.0._u"])
            close(ours.vectors.value[1], state["parametrizations.weight.0._v"])
        close(nn.inference_mode(ours)(x), theirs.eval()(torch.tensor(x)))


def test_another_weight_of_weight_norm_means_what_it_does_there():
    v, weight = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    theirs = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4))
    layer = nn.Linear(3, 4, key=jax.random.key(0))
    ours = nn.WeightNorm(tree_at("weight", layer, jnp.asarray(theirs.weight.detach().numpy())))
    with torch.no_grad():
        theirs.parametrizations.weight.original1.copy_(torch.tensor(v))
        close(nn.resolve(tree_at("layer.weight", ours, jnp.asarray(v))).weight, theirs.weight)
        # Assigning the weight itself sets both, and so does drawing it anew.
        theirs.weight = torch.tensor(weight)
        drawn = nn.initialise(
            ours, {"layer.weight": lambda key, shape, dtype: weight.T}, jax.random.key(0)
        )
        close(drawn.g, theirs.parametrizations.weight.original0)
        close(nn.resolve(drawn).weight, theirs.weight)
