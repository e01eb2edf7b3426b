"""Layers against PyTorch's. One row for each setting; adding one is adding a row.

Recurrence and attention are in `test_sequences_torch.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.nn._torch_parity import Row, check
from vernal import nn
from vernal.saving import conv_transpose_rules, weight_norm_rules

# --- convolutions

SIGNAL, IMAGE, VOLUME = (4, 9), (4, 7, 6), (2, 5, 4, 6)
SHAPES = {1: SIGNAL, 2: IMAGE, 3: VOLUME}
CONVS = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
TRANSPOSES = {1: torch.nn.ConvTranspose1d, 2: torch.nn.ConvTranspose2d, 3: torch.nn.ConvTranspose3d}


def _theirs(ours):
    """The settings of ours under PyTorch's names."""
    named = {"use_bias": "bias", "use_ceil": "ceil_mode"}
    lower = {k: v.lower() if isinstance(v, str) else v for k, v in ours.items()}
    return {named.get(name, name): value for name, value in lower.items()}


def conv(dims, out=2, size=3, **settings):
    shape = SHAPES[dims]
    ours = settings | ({} if dims < 3 else {"padding_mode": settings.get("padding_mode", "ZEROS")})
    return Row(
        lambda k: nn.Conv(dims, shape[0], out, size, **ours, key=k),
        lambda: CONVS[dims](shape[0], out, size, **_theirs(settings)),
        (shape,),
    )


def padded_conv(dims, pads, **settings):
    """A convolution with other padding before than after, which PyTorch makes of two layers."""
    shape, pad = (
        SHAPES[dims],
        {1: torch.nn.ConstantPad1d, 2: torch.nn.ConstantPad2d}[dims],
    )
    flat = [n for pair in reversed(pads) for n in pair]
    return Row(
        lambda k: nn.Conv(dims, shape[0], 3, 3, padding=pads, **settings, key=k),
        lambda: torch.nn.Sequential(
            pad(tuple(flat), 0.0), CONVS[dims](shape[0], 3, 3, **_theirs(settings))
        ),
        (shape,),
        {"*": "1.*"},
    )


def transpose(dims, out=2, size=3, **settings):
    shape = SHAPES[dims]
    rules = conv_transpose_rules(
        groups=settings.get("groups", 1), use_bias=settings.get("use_bias", True)
    )
    return Row(
        lambda k: nn.ConvTranspose(dims, shape[0], out, size, **settings, key=k),
        lambda: TRANSPOSES[dims](shape[0], out, size, **_theirs(settings)),
        (shape,),
        rules,
    )


ROWS = {
    "Conv1d": conv(1),
    "Conv1d, strides and padding": conv(1, stride=2, padding=1),
    "Conv1d, dilation": conv(1, dilation=3, padding=2),
    "Conv1d, depthwise": conv(1, out=8, groups=4, use_bias=False),
    "Conv1d, reflected": conv(1, padding=2, padding_mode="REFLECT"),
    "Conv1d, circular, strides, dilation": conv(
        1, padding=3, padding_mode="CIRCULAR", stride=2, dilation=2
    ),
    "Conv1d, other padding after": padded_conv(1, [(2, 1)], stride=2),
    "Conv2d, one output": conv(2, out=1),
    "Conv2d, everything": conv(
        2, size=(3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2), groups=2
    ),
    "Conv2d, same": conv(2, size=3, padding="SAME", dilation=2),
    "Conv2d, same of an even kernel": conv(2, size=(2, 4), padding="SAME"),
    "Conv2d, valid": conv(2, padding="VALID", stride=3),
    "Conv2d, reflected": conv(2, padding=(2, 1), padding_mode="REFLECT", groups=2),
    "Conv2d, replicated": conv(2, padding=(1, 2), padding_mode="REPLICATE", stride=2),
    "Conv2d, circular": conv(2, padding=2, padding_mode="CIRCULAR", dilation=2),
    "Conv2d, reflected to the same": conv(2, padding="SAME", padding_mode="REFLECT"),
    "Conv2d, other padding after": padded_conv(2, [(0, 2), (1, 0)], dilation=(2, 1)),
    "Conv3d": conv(3, stride=2, padding=1, dilation=1),
    "Conv3d, groups": conv(3, out=4, size=(2, 1, 3), groups=2, dilation=(2, 1, 1)),
    "Conv3d, replicated": conv(3, padding=1, padding_mode="REPLICATE"),
    "ConvTranspose1d": transpose(1),
    "ConvTranspose1d, strides": transpose(1, stride=3, padding=1, output_padding=2),
    "ConvTranspose1d, dilation": transpose(1, dilation=2, padding=1),
    "ConvTranspose1d, groups": transpose(1, out=6, groups=2, stride=2, use_bias=False),
    "ConvTranspose2d, everything": transpose(
        2,
        size=(3, 2),
        stride=(2, 3),
        padding=(1, 0),
        output_padding=(1, 2),
        dilation=(1, 2),
        groups=2,
    ),
    "ConvTranspose3d": transpose(3, size=2, stride=2, padding=1, output_padding=1),
}

# --- pools

POOLS = {
    (nn.AvgPool1d, torch.nn.AvgPool1d): SIGNAL,
    (nn.AvgPool2d, torch.nn.AvgPool2d): IMAGE,
    (nn.AvgPool3d, torch.nn.AvgPool3d): VOLUME,
    (nn.MaxPool1d, torch.nn.MaxPool1d): SIGNAL,
    (nn.MaxPool2d, torch.nn.MaxPool2d): IMAGE,
    (nn.MaxPool3d, torch.nn.MaxPool3d): VOLUME,
}
POOL_SETTINGS = {
    "": {"kernel_size": 2, "stride": 1},
    ", strides and padding": {"kernel_size": 3, "stride": 2, "padding": 1},
    ", ceil": {"kernel_size": 2, "stride": 2, "use_ceil": True},
    ", ceil and padding": {"kernel_size": 3, "stride": 4, "padding": 1, "use_ceil": True},
}


def pool(ours, theirs, shape, settings):
    return Row(lambda k: ours(**settings), lambda: theirs(**_theirs(settings)), (shape,))


ROWS |= {
    f"{ours.__name__}{name}": pool(ours, theirs, shape, settings)
    for (ours, theirs), shape in POOLS.items()
    for name, settings in POOL_SETTINGS.items()
}
ROWS |= {
    "AdaptiveAvgPool1d": Row(
        lambda k: nn.AdaptiveAvgPool1d(3), lambda: torch.nn.AdaptiveAvgPool1d(3), (SIGNAL,)
    ),
    "AdaptiveAvgPool2d": Row(
        lambda k: nn.AdaptiveAvgPool2d((7, 2)),
        lambda: torch.nn.AdaptiveAvgPool2d((7, 2)),
        (IMAGE,),
    ),
    "AdaptiveAvgPool1d, parts that overlap": Row(
        lambda k: nn.AdaptiveAvgPool1d(5), lambda: torch.nn.AdaptiveAvgPool1d(5), (SIGNAL,)
    ),
    "AdaptiveAvgPool2d, parts that overlap, and more than entries": Row(
        lambda k: nn.AdaptiveAvgPool2d((5, 8)),
        lambda: torch.nn.AdaptiveAvgPool2d((5, 8)),
        ((2, 7, 7),),
    ),
    "AdaptiveAvgPool3d, parts that overlap": Row(
        lambda k: nn.AdaptiveAvgPool3d((2, 3, 4)),
        lambda: torch.nn.AdaptiveAvgPool3d((2, 3, 4)),
        (VOLUME,),
    ),
    "AdaptiveMaxPool1d, parts that overlap": Row(
        lambda k: nn.AdaptiveMaxPool1d(4), lambda: torch.nn.AdaptiveMaxPool1d(4), (SIGNAL,)
    ),
    "AdaptiveMaxPool2d": Row(
        lambda k: nn.AdaptiveMaxPool2d((1, 3)),
        lambda: torch.nn.AdaptiveMaxPool2d((1, 3)),
        (IMAGE,),
    ),
    "AdaptiveMaxPool3d": Row(
        lambda k: nn.AdaptiveMaxPool3d((1, 2, 3)),
        lambda: torch.nn.AdaptiveMaxPool3d((1, 2, 3)),
        (VOLUME,),
    ),
}

# --- layers without windows

ROWS |= {
    "Linear": Row(lambda k: nn.Linear(4, 3, key=k), lambda: torch.nn.Linear(4, 3), ((4,),)),
    "Linear without bias": Row(
        lambda k: nn.Linear(4, 3, use_bias=False, key=k),
        lambda: torch.nn.Linear(4, 3, bias=False),
        ((4,),),
    ),
    "Embedding": Row(
        lambda k: nn.Embedding(5, 3, key=k), lambda: torch.nn.Embedding(5, 3), ((),), integers=5
    ),
    "LayerNorm": Row(lambda k: nn.LayerNorm(4), lambda: torch.nn.LayerNorm(4), ((4,),)),
    "LayerNorm of an image without bias": Row(
        lambda k: nn.LayerNorm(IMAGE, eps=0.1, use_bias=False),
        lambda: torch.nn.LayerNorm(IMAGE, eps=0.1, bias=False),
        (IMAGE,),
    ),
    "RMSNorm": Row(
        lambda k: nn.RMSNorm(4, eps=1e-3, use_bias=False),
        lambda: torch.nn.RMSNorm(4, eps=1e-3),
        ((4,),),
    ),
    "GroupNorm": Row(lambda k: nn.GroupNorm(2, 4), lambda: torch.nn.GroupNorm(2, 4), (IMAGE,)),
    "GroupNorm without weights": Row(
        lambda k: nn.GroupNorm(4, channelwise_affine=False, eps=0.1, num_spatial_dims=1),
        lambda: torch.nn.GroupNorm(4, 4, affine=False, eps=0.1),
        (SIGNAL,),
    ),
    "InstanceNorm1d": Row(
        lambda k: nn.InstanceNorm(4, eps=0.1, num_spatial_dims=1),
        lambda: torch.nn.InstanceNorm1d(4, eps=0.1, affine=True),
        (SIGNAL,),
    ),
    "InstanceNorm2d without weights": Row(
        lambda k: nn.InstanceNorm(4, channelwise_affine=False),
        lambda: torch.nn.InstanceNorm2d(4),
        (IMAGE,),
    ),
    "InstanceNorm2d, as many rows as channels": Row(
        lambda k: nn.InstanceNorm(4, num_spatial_dims=2),
        lambda: torch.nn.InstanceNorm2d(4, affine=True),
        ((4, 4, 4),),
    ),
    "InstanceNorm3d": Row(
        lambda k: nn.InstanceNorm(2), lambda: torch.nn.InstanceNorm3d(2, affine=True), (VOLUME,)
    ),
    "PixelShuffle": Row(
        lambda k: nn.PixelShuffle(2), lambda: torch.nn.PixelShuffle(2), ((8, 2, 3),)
    ),
    "PixelUnshuffle": Row(
        lambda k: nn.PixelUnshuffle(3), lambda: torch.nn.PixelUnshuffle(3), ((2, 6, 9),)
    ),
    "PReLU": Row(
        lambda k: nn.PReLU(), lambda: torch.nn.PReLU(), (IMAGE,), {"negative_slope": "weight"}
    ),
    "PReLU of channels": Row(
        lambda k: nn.PReLU(jnp.full((4, 1, 1), 0.1)),
        lambda: torch.nn.PReLU(4, 0.1),
        (IMAGE,),
        {"negative_slope": "weight"},
    ),
}
ROWS |= {
    "WeightNorm": Row(
        lambda k: nn.WeightNorm(nn.Linear(4, 3, key=k)),
        lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 3)),
        ((4,),),
        weight_norm_rules(),
    ),
    "WeightNorm of a convolution": Row(
        lambda k: nn.WeightNorm(nn.Conv2d(4, 3, 3, key=k), axis=1),
        lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv2d(4, 3, 3), dim=1),
        (IMAGE,),
        weight_norm_rules(),
    ),
    "Sequential": Row(
        lambda k: nn.Sequential(
            [
                nn.Conv2d(4, 3, 3, key=k),
                jax.nn.relu,
                nn.MaxPool2d(2, 2),
                jnp.ravel,
                nn.Linear(12, 2, key=k),
            ]
        ),
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(4, 3, 3),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(12, 2),
        ),
        (IMAGE,),
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
# What PyTorch says of one row, which is about its speed.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.sample(6)
def test_values_and_gradients_are_pytorchs(row):
    check(row)


def test_dropout_drops_as_many_and_scales_the_rest_as_pytorch_does():
    torch.manual_seed(0)
    n, p = 10_000, 0.3
    theirs = torch.nn.Dropout(p)(torch.ones(n)).numpy()
    ours = np.asarray(nn.Dropout(p)(jnp.ones(n), key=jax.random.key(0)))
    np.testing.assert_allclose(np.unique(ours), np.unique(theirs), rtol=1e-6)
    # Five standard deviations of the number of zeros.
    for dropped in (ours == 0, theirs == 0):
        assert abs(dropped.mean() - p) < 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_channels_are_dropped_as_pytorchs_dropout1d_to_3d_drop_them(dims):
    torch.manual_seed(0)
    channels, p = 2_000, 0.3
    ones = torch.ones((1, channels, *[2] * dims))
    theirs = getattr(torch.nn, f"Dropout{dims}d")(p)(ones).numpy()
    layer = nn.Dropout(p, together=dims)
    ours = np.asarray(layer(jnp.ones(ones.shape), key=jax.random.key(0)))
    for found in (ours, theirs):
        rows = found.reshape(channels, -1)
        assert (rows == rows[:, :1]).all()
        assert abs((rows[:, 0] == 0).mean() - p) < 5 * (p * (1 - p) / channels) ** 0.5
    np.testing.assert_allclose(np.unique(ours), np.unique(theirs), rtol=1e-6)
