"""Convolutions, pools, and norms."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .of_layers import of_parts, of_subclass
from .registry import calls

KEY = jax.random.key(0)


def image(dims, channels=2, size=5):
    shape = (channels, *(size for _ in range(dims)))
    return jnp.sin(jnp.arange(float(channels * size**dims))).reshape(shape)


def wide(weight):
    return np.asarray(weight, np.float64)


def dims_of(name):
    return int(name.__name__[-2])


def leaves(tree):
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


@calls("nn.Conv1d", "nn.Conv2d")
def convolutions(name, eqx):
    x = image(dims_of(name))
    yield lambda: name(2, 3, 3, key=KEY)(x)
    yield lambda: leaves(name(2, 4, 3, groups=2, key=KEY))
    yield lambda: name(2, 3, 3, 2, 1, 1, 1, False, "ZEROS", None, key=KEY)(x)
    yield lambda: name(2, 4, 3, groups=2, dilation=2, key=KEY)(x)
    for padding in ("SAME", "SAME_LOWER", "VALID", 1, "wrong", -1):
        yield lambda padding=padding: name(2, 3, 2, padding=padding, key=KEY)(x)
    for mode in ("REFLECT", "REPLICATE", "CIRCULAR", "wrong", "zeros"):
        yield lambda mode=mode: name(2, 3, 3, padding=1, padding_mode=mode, key=KEY)(x)
    yield lambda: name(2, 3, 3, padding=[(1, 2)] * dims_of(name), key=KEY)(x)
    yield lambda: name(2, 3, 3, dtype="bfloat16", key=KEY)(x)
    for field in (
        "num_spatial_dims",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "use_bias",
        "padding_mode",
    ):
        yield lambda field=field: getattr(name(2, 3, 3, key=KEY), field)
    yield lambda: name(2, 3, 3, key=KEY)(x[0])
    yield lambda: name(2, 3, 3, key=KEY)(x[:1])
    yield lambda: name(2, 3, 9, key=KEY)(x)
    yield lambda: name(3, 3, 3, groups=2, key=KEY)
    yield lambda: name(2, 3, 3, groups=2, key=KEY)
    yield lambda: name(2, 3, 3)
    yield lambda: name(2, 3, (3, 3, 3, 3), key=KEY)
    yield lambda: name(in_channels=2, out_channels=3, kernel_size=2, key=KEY)(x=x, key=KEY)
    yield lambda: eqx.tree_at(lambda c: c.weight, name(2, 3, 3, key=KEY), replace_fn=np.asarray)(x)
    yield lambda: eqx.tree_at(lambda c: c.weight, name(2, 3, 3, key=KEY), replace_fn=wide)(x)
    yield lambda: eqx.tree_at(
        lambda c: c.weight, name(3, 2, 3, key=KEY), replace_fn=lambda w: w[:, :2]
    )(x)
    yield lambda: of_subclass(eqx, name, 2, 3, 3, key=KEY)
    yield lambda: isinstance(name(2, 3, 3, key=KEY), eqx.nn.Conv)


@calls("nn.Conv3d")
def convolution_in_three(name, eqx):
    yield lambda: name(2, 3, 2, padding="SAME", key=KEY)(image(3, size=3))
    yield lambda: name(2, 3, (1, 2, 3), key=KEY)(image(3, size=3))
    yield lambda: name(2, 3, 2, key=KEY).stride
    yield lambda: name(2, 3, 2, key=KEY)(image(2))


@calls("nn.Conv")
def convolution_in_general(name, eqx):
    yield lambda: name(1, 2, 3, 3, key=KEY)(image(1))
    yield lambda: name(2, 2, 3, (2, 3), (1, 2), key=KEY)(image(2))
    yield lambda: name(num_spatial_dims=2, in_channels=2, out_channels=3, kernel_size=2, key=KEY)(
        image(2)
    )
    yield lambda: leaves(name(2, 2, 3, 1, use_bias=False, key=KEY))
    yield lambda: name(2, 2, 3, (2, 3, 4), key=KEY)
    yield lambda: name(2, 2, 3, 2, key=KEY)(image(1))


@calls("nn.ConvTranspose1d", "nn.ConvTranspose2d")
def transposed_convolutions(name, eqx):
    x = image(dims_of(name), size=4)
    yield lambda: name(2, 3, 3, key=KEY)(x)
    yield lambda: leaves(name(2, 4, 3, groups=2, key=KEY))
    yield lambda: name(2, 3, 3, 2, 1, key=KEY)(x)
    yield lambda: name(2, 3, 3, 2, 1, 1, key=KEY)(x)
    yield lambda: name(2, 4, 3, dilation=2, groups=2, key=KEY)(x)
    for padding in ("SAME", "SAME_LOWER", "VALID", "wrong"):
        yield lambda padding=padding: name(2, 3, 3, stride=2, padding=padding, key=KEY)(x)
    for mode in ("CIRCULAR", "REFLECT", "wrong"):
        yield lambda mode=mode: name(2, 3, 3, padding="SAME", padding_mode=mode, key=KEY)(x)
    for field in (
        "num_spatial_dims",
        "kernel_size",
        "stride",
        "padding",
        "output_padding",
        "dilation",
        "groups",
    ):
        yield lambda field=field: getattr(name(2, 3, 3, key=KEY), field)
    yield lambda: name(2, 3, 3, stride=1, output_padding=1, key=KEY)
    yield lambda: name(2, 3, 3, key=KEY)(x[0])
    yield lambda: name(3, 3, 3, groups=2, key=KEY)
    yield lambda: name(2, 3, 3)


@calls("nn.ConvTranspose3d")
def transposed_convolution_in_three(name, eqx):
    yield lambda: name(2, 3, 2, 2, key=KEY)(image(3, size=2))
    yield lambda: name(2, 3, 2, key=KEY).output_padding
    yield lambda: name(2, 3, 2, key=KEY)(image(2))


@calls("nn.ConvTranspose")
def transposed_convolution_in_general(name, eqx):
    yield lambda: name(1, 2, 3, 3, key=KEY)(image(1))
    yield lambda: name(2, 2, 3, (2, 3), 2, 1, 1, key=KEY)(image(2))
    yield lambda: name(num_spatial_dims=1, in_channels=2, out_channels=3, kernel_size=2, key=KEY)(
        image(1)
    )
    yield lambda: name(2, 2, 3, 2, key=KEY)(image(1))


@calls(*(f"nn.{kind}Pool{n}d" for kind in ("Avg", "Max") for n in (1, 2, 3)))
def pools(name, eqx):
    dims = dims_of(name)
    x = image(dims, size=4 if dims < 3 else 2)
    yield lambda: name(2)(x)
    yield lambda: name(2, 2)(x)
    yield lambda: name(3, 2, 1)(x)
    yield lambda: name(2, stride=2, use_ceil=True)(x)
    yield lambda: name(3, 2, 1, True)(x)
    yield lambda: name(kernel_size=2, padding=((0, 1),) * dims)(x, key=KEY)
    yield lambda: name((2,) * dims, (1,) * dims)(x)
    yield lambda: name(2)(x[0])
    yield lambda: name(2)(x[None])
    yield lambda: name((2,) * (dims + 1))
    yield lambda: name(2, padding=5)(x)
    yield lambda: name(9)(x)
    yield lambda: name(2)(jnp.ones(x.shape, int))
    yield lambda: name()
    for field in ("init", "num_spatial_dims", "kernel_size", "stride", "padding", "use_ceil"):
        yield lambda field=field: getattr(name(2), field)
    yield lambda: of_subclass(eqx, name, 2)
    yield lambda: isinstance(name(2), eqx.nn.Pool)


@calls("nn.Pool")
def pool(name, eqx):
    yield lambda: name(0, lax.add, 1, 2)(image(1))
    yield lambda: name(-jnp.inf, lax.max, 2, (2, 3), (1, 2), 1)(image(2))
    yield lambda: name(init=1, operation=lax.mul, num_spatial_dims=1, kernel_size=2)(image(1))
    yield lambda: name(0, lax.add, 1, 2)(image(2))
    yield lambda: name(0, lax.add, 1, (2, 2))
    yield lambda: jax.grad(lambda x: name(0.0, lax.add, 1, 2)(x).sum())(image(1))


@calls(*(f"nn.Adaptive{kind}Pool{n}d" for kind in ("Avg", "Max") for n in (1, 2, 3)))
def adaptive_pools(name, eqx):
    dims = dims_of(name)
    x = image(dims, size=5 if dims < 3 else 2)
    yield lambda: name(1)(x)
    yield lambda: name(2)(x)
    yield lambda: name((3,) * dims)(x)
    yield lambda: name(target_shape=2)(x, key=KEY)
    yield lambda: name(9)(x)
    yield lambda: name(0)
    yield lambda: name((2,) * (dims + 1))
    yield lambda: name(2)(x[0])
    yield lambda: name(2).target_shape
    yield lambda: name("text")


@calls("nn.AdaptivePool")
def adaptive_pool(name, eqx):
    yield lambda: name(2, 1, jnp.min)(image(1))
    yield lambda: of_parts(eqx, name, 2, 1, jnp.min)(image(1))
    yield lambda: name((2, 3), 2, jnp.median)(image(2))
    yield lambda: name(target_shape=2, num_spatial_dims=1, operation=jnp.max)(image(1))
    yield lambda: name((2, 3), 1, jnp.max)


@calls("nn.LayerNorm", "nn.RMSNorm")
def norms(name, eqx):
    x = jnp.arange(3.0)
    yield lambda: name(3)(x)
    yield lambda: name((2, 3))(image(1, size=3))
    yield lambda: name(3, 1e-1, False, False)(x)
    yield lambda: name(3, use_bias=False)(x)
    yield lambda: name(3, use_weight=False)
    yield lambda: name(3, dtype="bfloat16")(x)
    yield lambda: name(3)(x.astype("bfloat16"))
    yield lambda: name(3)(x.astype("float16"))
    yield lambda: name(3)(jnp.arange(3))
    yield lambda: name(3)
    yield lambda: leaves(name(3))
    yield lambda: name(3)(jnp.ones(4))
    yield lambda: name(3)(jnp.ones((2, 3)))
    yield lambda: name(3)(jnp.ones(()))
    yield lambda: name(3)(x, "state")
    yield lambda: name(3)(x, state="state", key=KEY)
    yield lambda: name(3, elementwise_affine=False)(x)
    yield lambda: name(None)(x)
    yield lambda: name("text")
    yield lambda: name(shape=3, eps=1e-3)(x=x).dtype
    yield lambda: jax.grad(lambda x: name(3)(x)[0])(jnp.zeros(3))
    yield lambda: name(3)(jnp.array([4e19, 1.0, 2.0]))
    yield lambda: of_subclass(eqx, name, 3)


@calls("nn.GroupNorm")
def group_norm(name, eqx):
    x = image(2, channels=4, size=3)
    yield lambda: name(2, 4)(x)
    yield lambda: name(2, 4)(x[:, 0, 0])
    yield lambda: of_parts(eqx, name, 2, 4)(x[:, 0, 0])
    yield lambda: name(2, channelwise_affine=False)(x)
    yield lambda: name(2, 4, 1e-1, False)(x)
    yield lambda: name(2, 4, dtype="bfloat16")(x.astype("bfloat16"))
    yield lambda: name(2, 4)
    yield lambda: leaves(name(2, 4))
    yield lambda: name(3, 4)
    yield lambda: name(2)
    yield lambda: name(2, 4)(x[:2])
    yield lambda: name(2, 4)(jnp.ones((4, 4, 4)))
    yield lambda: name(3, channelwise_affine=False)(x)
    yield lambda: name(2, 4)(x, "state")
    yield lambda: name(2, 4)(jnp.ones(()))
    yield lambda: name(1, 3)(jnp.array([4e19, 1.0, 2.0]))
    yield lambda: name(groups=2, channels=4)(x=x, key=KEY)
