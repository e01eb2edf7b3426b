"""`interpolate` against PyTorch's: values, and gradients, which here are a rule of our own."""

import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vernal import nn

# Up and down, by sizes that divide each other and that do not; one of 1; two axes of one length.
SHAPES = [(2, 5, 7), (3, 1, 4), (6, 6, 6), (2, 8, 3)]
SIZES = [(3, 5), (1, 1), (10, 14), (13, 2), (6, 6)]
SCALES = [(2, 2), (1.3, 0.7), (0.5, 3.7), (1.0, 1.0), (1.05, 1.9)]
MODES = {"nearest": "nearest", "nearest-exact": "nearest-exact", "linear": "bilinear"}
SETTINGS = {
    "nearest": {},
    "nearest-exact": {},
    "linear": {},
    "linear, corners": {"align_corners": True},
    "linear, antialias": {"antialias": True},
    "cubic": {},
    "cubic, corners": {"align_corners": True},
    "cubic, antialias": {"antialias": True},
}


def of_theirs(x, weights, mode, size, scale, settings):
    given = torch.tensor(x[None], requires_grad=True)
    if not mode.startswith("nearest"):
        settings = {"align_corners": False} | settings
    scale = None if scale is None else tuple(map(float, scale))
    y = torch.nn.functional.interpolate(given, size, scale, mode, **settings)[0]
    (y * torch.tensor(weights[: y.numel()].reshape(y.shape))).sum().backward()
    return y.detach().numpy(), given.grad[0].numpy()


def check(shape, mode, method, size, scale, settings):
    with jax.enable_x64(True):
        rng = np.random.default_rng(zlib.crc32(repr((shape, size, scale)).encode()))
        x, weights = rng.normal(size=shape), rng.normal(size=4000)
        expected, slope = of_theirs(x, weights, mode, size, scale, settings)

        def loss(x):
            y = nn.interpolate(x, size, scale, method=method, **settings)
            return (y * weights[: y.size].reshape(y.shape)).sum(), y

        gradient, y = jax.jit(jax.grad(loss, has_aux=True))(jnp.asarray(x))
        assert y.shape == expected.shape and y.dtype == jnp.float64
        np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-10)
        # PyTorch leaves an axis alone whose size stays, and forgets that in this gradient.
        if not (settings.get("antialias") and scale == (1.05, 1.9)):
            np.testing.assert_allclose(gradient, slope, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("name", "settings"), SETTINGS.items(), ids=SETTINGS)
@pytest.mark.parametrize("by", ["size", "scale"])
@pytest.mark.sample(6)
def test_images_are_those_of_pytorch(name, settings, by):
    method = name.split(",")[0]
    mode = MODES.get(method, "bicubic")
    for shape, target in itertools.product(SHAPES, SIZES if by == "size" else SCALES):
        size, scale = (target, None) if by == "size" else (None, target)
        if scale is None or all(n * s >= 1 for n, s in zip(shape[1:], scale, strict=True)):
            check(shape, mode, method, size, scale, settings)


@pytest.mark.parametrize(
    ("shape", "size", "mode"),
    [((2, 5), (8,), "linear"), ((2, 3, 4, 5), (6, 2, 7), "trilinear"), ((2, 5), (3,), "nearest")],
)
@pytest.mark.parametrize("corners", [False, True])
def test_signals_and_volumes_are_those_of_pytorch(shape, size, mode, corners):
    method = "nearest" if mode == "nearest" else "linear"
    check(
        shape,
        mode,
        method,
        size,
        None,
        {"align_corners": True} if corners and method == "linear" else {},
    )


def test_single_precision_is_that_of_pytorch(getkey):
    x = np.asarray(jax.random.normal(getkey(), (3, 17, 17)))
    for method, mode in [*MODES.items(), ("cubic", "bicubic")]:
        expected = torch.nn.functional.interpolate(torch.tensor(x[None]), (23, 9), mode=mode)[0]
        found = nn.interpolate(x, (23, 9), method=method)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_the_layer_is_pytorchs(scale, getkey):
    x = np.asarray(jax.random.normal(getkey(), (2, 3, 6, 5)))
    theirs = torch.nn.Upsample(scale_factor=scale, mode="bilinear")(torch.tensor(x)).numpy()
    ours = nn.Upsample(scale=(scale, scale), method="linear")(x)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


SEVERAL_SCALES = [1.3, 0.7, 1.1, 1.05, 1.9, 0.3, 2.3, 2.05, 2.0, 0.5, 1 / 3, 2 / 3, 1.0]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear"])
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.sample(10)
def test_positions_by_scale_are_those_of_pytorch(dims, mode):
    compared = 0
    with jax.enable_x64(True):
        for n, scale in itertools.product([1, 2, 3, 4, 7, 10, 23], SEVERAL_SCALES):
            new = int(n * scale)
            if new == 0:
                continue
            # Other axes are larger by a scale that leaves no whole number.
            shape, scales = (2, *(3,) * (dims - 1), n), (*(1.7,) * (dims - 1), scale)
            x = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
            settings = {"align_corners": False} if mode == "linear" else {}
            name = ("linear", "bilinear", "trilinear")[dims - 1] if mode == "linear" else mode
            given = torch.tensor(x)[None]
            wanted = torch.nn.functional.interpolate(
                given, scale_factor=scales, mode=name, **settings
            )
            with jax.disable_jit():
                found = nn.interpolate(x, scale=scales, method=mode)
            # PyTorch computes places in single precision, in which some that are whole numbers are not.
            at = (np.arange(new) + (0.5 if mode == "nearest-exact" else 0)) / scale
            is_exact = np.log2(scale).is_integer() or mode == "linear"
            told = (np.abs(at - np.round(at)) > 1e-5) | (at == 0) | is_exact
            compared += told.sum()
            np.testing.assert_allclose(
                found[..., told], wanted[0].numpy()[..., told], rtol=1e-9, err_msg=f"{n} {scale}"
            )
    assert compared > 500


def test_sizes_computed_from_a_scale_are_recompute_scale_factor():
    x = np.random.default_rng(0).normal(size=(2, 3, 7, 5)).astype(np.float32)
    theirs = torch.nn.functional.interpolate(
        torch.tensor(x), scale_factor=1.3, mode="bilinear", recompute_scale_factor=True
    )
    ours = nn.interpolate(x, size=(int(7 * 1.3), int(5 * 1.3)), method="linear")
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-6)
