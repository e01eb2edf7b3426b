# %% [markdown]
# # A score-based diffusion model
#
# Digits are blurred by noise until nothing is left of them; a network learns the score of the blurred images, the
# gradient of their log density. Following it back from pure noise gives new digits. (Song et al., "Score-based
# generative modeling through stochastic differential equations", 2021, arXiv:2011.13456.)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from sklearn.datasets import load_digits

import vernal
from vernal import loops, nn

images = jnp.asarray(load_digits().images.reshape(-1, 64) / 8 - 1, dtype=jnp.float32)
# The noise at time 1 drowns the images, that at time 0 cannot be seen.
LEAST, MOST = 0.02, 10.0
SPREAD = 0.75


def noise_scale(t):
    return LEAST * (MOST / LEAST) ** t


# %% [markdown]
# The network is told the time through a few sines and cosines of it. What it predicts is the noise, in units of its
# standard deviation, which is minus the score times that standard deviation.


# %%
class Denoiser(vernal.Module):
    frequencies: tuple
    mlp: nn.MLP

    def __init__(self, key):
        self.frequencies = (0.25, 0.5, 1.0, 2.0)
        self.mlp = nn.MLP(64 + 8, 64, 256, 3, activation=jax.nn.silu, key=key)

    def __call__(self, x, t):
        angles = 2 * jnp.pi * t[..., None] * jnp.array(self.frequencies)
        scale = noise_scale(t)[..., None]
        size = jnp.sqrt(SPREAD**2 + scale**2)
        inputs = jnp.concatenate([x / size, jnp.sin(angles), jnp.cos(angles)], axis=-1)
        # Right by itself for images that are a Gaussian of this spread; the network adds what they are beyond that.
        return x * scale / size**2 + SPREAD / size * self.mlp(inputs)


@vernal.filter_jit
def step(model, optimiser, state, key):
    batch_key, time_key, noise_key = jax.random.split(key, 3)
    x = jax.random.choice(batch_key, images, (256,))
    t = jax.random.uniform(time_key, (256,))
    noise = jax.random.normal(noise_key, x.shape)

    @vernal.filter_value_and_grad
    def loss(model):
        return jnp.mean((model(x + noise_scale(t)[:, None] * noise, t) - noise) ** 2)

    value, gradients = loss(model)
    model, state = optimiser.update(model, gradients, state)
    return model, state, value


STEPS = 4000
model = Denoiser(jax.random.key(0))
optimiser = vernal.Optimizer(optax.adam, optax.cosine_decay_schedule(2e-3, STEPS))
state = optimiser.init(model)
for i in range(1, STEPS + 1):
    model, state, value = step(model, optimiser, state, jax.random.key(i))
    if i % 1000 == 0:
        print(f"step {i}: loss {value:.3f}", flush=True)

# %% [markdown]
# The way back is an ordinary differential equation whose velocity is the network, here by Euler's method in a loop of
# 200 steps of falling noise.


# %%
@vernal.filter_jit
def sample(model, key, count, steps=200):
    scales = noise_scale(jnp.linspace(1.0, 0.0, steps + 1))
    times = jnp.linspace(1.0, 0.0, steps + 1)

    def body(x, i):
        noise = model(x, jnp.full(count, times[i]))
        return x + (scales[i + 1] - scales[i]) * noise, None

    start = MOST * jax.random.normal(key, (count, 64))
    return loops.scan(body, start, jnp.arange(steps), kind="lax")[0]


new = sample(model, jax.random.key(7), 40)
nearest = jnp.sqrt(((new[:, None] - images) ** 2).mean(-1)).min(1)
print(f"distance per pixel of a new digit to the nearest one seen: {nearest.mean():.2f}")
typical = jnp.sqrt(((images[:40, None] - images[40:]) ** 2).mean(-1)).min(1)
print(f"and of one real digit to the nearest other: {typical.mean():.2f}")
assert nearest.mean() < 1.5 * typical.mean()

# %%
figure, axes = plt.subplots(4, 10, figsize=(7, 3), layout="constrained")
for image, axis in zip(new, axes.flat, strict=True):
    axis.imshow(image.reshape(8, 8), cmap="gray_r", vmin=-1, vmax=1)
    axis.axis("off")
figure.savefig("diffusion.png", dpi=110)
