# %% [markdown]
# # A variational autoencoder
#
# An encoder gives a Gaussian over two numbers for each image, a decoder paints an image from two numbers, and both are
# trained on a bound of the likelihood. (Kingma, Welling, "Auto-encoding variational Bayes", 2014, arXiv:1312.6114.)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from sklearn.datasets import load_digits

import vernal
from vernal import nn

LATENT = 2
digits = load_digits()
images = jnp.asarray(digits.images.reshape(-1, 64) / 16, dtype=jnp.float32)


class VAE(vernal.Module):
    encoder: nn.MLP
    decoder: nn.MLP

    def __init__(self, key):
        encoder, decoder = jax.random.split(key)
        self.encoder = nn.MLP(64, 2 * LATENT, 128, 2, activation=jax.nn.silu, key=encoder)
        self.decoder = nn.MLP(LATENT, 64, 128, 2, activation=jax.nn.silu, key=decoder)

    def encode(self, x):
        """Mean and logarithm of the variance of what is hidden."""
        return jnp.split(self.encoder(x), 2, axis=-1)

    def bound(self, x, key):
        """A lower bound of the log likelihood of each image, with pixels as probabilities."""
        mean, log_variance = self.encode(x)
        latent = mean + jnp.exp(log_variance / 2) * jax.random.normal(key, mean.shape)
        painted = -optax.sigmoid_binary_cross_entropy(self.decoder(latent), x).sum(-1)
        divergence = 0.5 * (mean**2 + jnp.exp(log_variance) - 1 - log_variance).sum(-1)
        return painted - divergence


# %% [markdown]
# The whole epoch is one `lax.scan` over batches: the model and the optimiser's state are its carry, as they are.


# %%
@vernal.filter_jit
def epoch(model, optimiser, state, key):
    order_key, key = jax.random.split(key)
    batches = jax.random.permutation(order_key, len(images))[: 28 * 64].reshape(28, 64)

    def step(carry, inputs):
        model, state = carry
        batch, key = inputs
        loss, gradients = vernal.filter_value_and_grad(
            lambda model: -model.bound(images[batch], key).mean()
        )(model)
        return optimiser.update(model, gradients, state), loss

    (model, state), losses = jax.lax.scan(
        step, (model, state), (batches, jax.random.split(key, 28))
    )
    return model, state, losses.mean()


model = VAE(jax.random.key(0))
optimiser = vernal.Optimizer(optax.adam, 2e-3)
state = optimiser.init(model)
for i in range(1, 101):
    model, state, loss = epoch(model, optimiser, state, jax.random.key(i))
    if i % 20 == 0:
        print(f"epoch {i}: minus the bound {loss:.2f}", flush=True)
assert loss < 27

# %% [markdown]
# Where the digits lie in the plane that the encoder found, and what the decoder paints on a grid of it.

# %%
means, _ = model.encode(images)
spread = jax.scipy.special.ndtri(jnp.linspace(0.03, 0.97, 12))
grid = jnp.stack(jnp.meshgrid(spread, -spread), axis=-1)
painted = jax.nn.sigmoid(model.decoder(grid)).reshape(12, 12, 8, 8)
figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 4), layout="constrained")
points = left.scatter(*means.T, c=digits.target, cmap="tab10", s=4)
figure.colorbar(points, ax=left)
left.set_title("where the encoder puts the digits")
right.imshow(painted.swapaxes(1, 2).reshape(96, 96), cmap="gray_r")
right.set_title("what the decoder paints")
right.axis("off")
figure.savefig("vae.png", dpi=110)
