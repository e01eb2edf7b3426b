"""Pools against PyTorch's, over a grid of settings: which windows there are, and what each is divided by."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vernal import nn

# Equal settings on all axes in one dimension; different ones, so that no two axes are exchanged, in two and three.
KERNELS = {
    1: [(1,), (2,), (3,), (4,)],
    2: [(2, 3), (3, 3), (4, 2)],
    3: [(2, 3, 2), (3, 2, 4)],
}
STRIDES = {1: [(1,), (2,), (3,)], 2: [(1, 2), (3, 2), (2, 5)], 3: [(2, 3, 1), (3, 2, 2)]}
SIZES = {1: [(5,), (6,), (8,)], 2: [(5, 7), (6, 6)], 3: [(4, 5, 6)]}


def grid(n):
    for kernel, stride, size in itertools.product(KERNELS[n], STRIDES[n], SIZES[n]):
        for padding in {(0,) * n, tuple(k // 2 for k in kernel)}:
            yield size, kernel, stride, padding


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("use_ceil", [False, True])
@pytest.mark.parametrize("kind", ["AvgPool", "MaxPool"])
@pytest.mark.sample(6)
def test_pools_are_pytorchs(kind, use_ceil, n):
    rng = np.random.default_rng(0)
    ours, theirs = getattr(nn, f"{kind}{n}d"), getattr(torch.nn, f"{kind}{n}d")
    differ = 0
    for size, kernel, stride, padding in grid(n):
        x = rng.normal(size=(2, 3, *size)).astype(np.float32)
        wanted = theirs(kernel, stride, padding, ceil_mode=use_ceil)(torch.tensor(x)).numpy()
        layer = ours(kernel, stride, padding, use_ceil)
        found = layer(x)
        message = f"{size}, {kernel}, {stride}, {padding}"
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=message)
        differ += found.shape != ours(kernel, stride, padding)(x).shape
    # There are windows that reach beyond the padding.
    assert (differ > 0) == use_ceil


@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_of_means_over_partial_windows_are_pytorchs(n):
    x = np.random.default_rng(0).normal(size=(2, 3, *(7, 6, 8)[:n])).astype(np.float32)
    settings = (3, 2, 3)[:n], (2, 3, 5)[:n], (1, 1, 1)[:n], True
    given = torch.tensor(x, requires_grad=True)
    theirs = getattr(torch.nn, f"AvgPool{n}d")(*settings)
    (theirs(given) ** 2).sum().backward()
    layer = getattr(nn, f"AvgPool{n}d")(*settings)
    found = jax.jit(jax.grad(lambda x: (layer(x) ** 2).sum()))(jnp.asarray(x))
    np.testing.assert_allclose(found, given.grad.numpy(), rtol=1e-5, atol=1e-6)
