# %% [markdown]
# # A U-Net that segments images
#
# Discs and squares lie over each other under noise; each pixel is to be called background, disc or square. The network
# halves the image twice and doubles it again, and at each size it sees what was there on the way down. (Ronneberger,
# Fischer, Brox, "U-Net", 2015, arXiv:1505.04597.)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import vernal
from vernal import nn

SIZE = 32


def scene(key):
    """An image (1, SIZE, SIZE) with noise, and the kind of each of its pixels."""
    place, radius, noise = jax.random.split(key, 3)
    rows, columns = jnp.meshgrid(jnp.arange(SIZE), jnp.arange(SIZE), indexing="ij")
    centres = jax.random.uniform(place, (4, 2), minval=4, maxval=SIZE - 4)
    radii = jax.random.uniform(radius, (4,), minval=3, maxval=7)
    kinds = jnp.zeros((SIZE, SIZE), jnp.int32)
    for i in range(4):
        away = jnp.abs(jnp.stack([rows - centres[i, 0], columns - centres[i, 1]]))
        disc, square = jnp.hypot(*away) < radii[i], away.max(0) < 0.85 * radii[i]
        kinds = jnp.where(disc, 1, kinds) if i % 2 else jnp.where(square, 2, kinds)
    return (kinds > 0) + 0.4 * jax.random.normal(noise, (1, SIZE, SIZE)), kinds


class Block(vernal.Module):
    layers: nn.Sequential

    def __init__(self, channels, out_channels, key):
        first, second = jax.random.split(key)
        self.layers = nn.Sequential(
            [
                nn.Conv2d(channels, out_channels, 3, padding=1, key=first),
                nn.GroupNorm(4, out_channels, num_spatial_dims=2),
                jax.nn.silu,
                nn.Conv2d(out_channels, out_channels, 3, padding=1, key=second),
                jax.nn.silu,
            ]
        )

    def __call__(self, x):
        return self.layers(x)


class UNet(vernal.Module):
    down: list
    up: list
    halve: nn.MaxPool2d
    double: nn.Upsample
    head: nn.Conv2d

    def __init__(self, key, widths=(12, 24, 48)):
        head, *keys = jax.random.split(key, 2 * len(widths))
        self.down = [
            Block(a, b, key=k)
            for a, b, k in zip((1, *widths), widths, keys[: len(widths)], strict=False)
        ]
        self.up = [
            Block(a + b, a, key=k)
            for a, b, k in zip(widths, widths[1:], keys[len(widths) :], strict=False)
        ]
        self.halve, self.double = nn.MaxPool2d(2, 2), nn.Upsample(scale=(2, 2))
        self.head = nn.Conv2d(widths[0], 3, 1, key=head)

    def __call__(self, x):
        seen = []
        for block in self.down[:-1]:
            x = block(x)
            seen.append(x)
            x = self.halve(x)
        x = self.down[-1](x)
        for block, y in zip(reversed(self.up), reversed(seen), strict=True):
            x = block(jnp.concatenate([y, self.double(x)], axis=-3))
        return self.head(x)


@vernal.filter_jit
def step(model, optimiser, state, key):
    images, kinds = jax.vmap(scene)(jax.random.split(key, 12))

    @vernal.filter_value_and_grad
    def loss(model):
        logits = jnp.moveaxis(model(images), -3, -1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, kinds).mean()

    value, gradients = loss(model)
    model, state = optimiser.update(model, gradients, state)
    return model, state, value


model = UNet(jax.random.key(0))
optimiser = vernal.Optimizer(optax.adam, 3e-3)
state = optimiser.init(model)
for i in range(1, 401):
    model, state, value = step(model, optimiser, state, jax.random.key(i))
    if i % 100 == 0:
        print(f"step {i}: loss {value:.3f}", flush=True)

# %%
images, kinds = jax.vmap(scene)(jax.random.split(jax.random.key(10_000), 64))
said = model(images).argmax(-3)
overlap = [
    float(((said == k) & (kinds == k)).sum() / ((said == k) | (kinds == k)).sum()) for k in range(3)
]
print("intersection over union: background {:.1%}, discs {:.1%}, squares {:.1%}".format(*overlap))
assert min(overlap) > 0.7

# %%
figure, axes = plt.subplots(3, 6, figsize=(8, 4.2), layout="constrained")
for row, (name, pictures) in zip(
    axes, {"seen": images[:, 0], "said": said, "truth": kinds}.items(), strict=True
):
    for axis, picture in zip(row, pictures, strict=False):
        axis.imshow(picture, cmap="gray" if name == "seen" else "viridis")
        axis.set(xticks=[], yticks=[])
    row[0].set_ylabel(name)
figure.savefig("unet.png", dpi=110)
