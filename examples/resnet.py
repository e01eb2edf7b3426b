# %% [markdown]
# # A residual network with batch normalisation
#
# Digits of 8 by 8 pixels, a small ResNet, and `BatchNorm` in its usual place. `nn.apply` calls the model and returns it
# with the new running statistics; nothing else has to be threaded through.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import vernal
from vernal import nn

digits = load_digits()
train_x, test_x, train_y, test_y = train_test_split(
    jnp.asarray(digits.images[:, None] / 16, dtype=jnp.float32),
    jnp.asarray(digits.target),
    test_size=0.25,
    random_state=0,
)


# %% [markdown]
# A block adds two convolutions to what it is given. Where it halves the image, a convolution of one pixel brings the
# input to the same shape. Layers take a batch as it is, so there is no `vmap`.


# %%
class Block(vernal.Module):
    first: nn.Conv2d
    second: nn.Conv2d
    norms: list
    shortcut: nn.Conv2d | nn.Identity

    def __init__(self, channels, out_channels, stride, key):
        first, second, shortcut = jax.random.split(key, 3)
        self.first = nn.Conv2d(channels, out_channels, 3, stride, padding=1, key=first)
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1, key=second)
        self.norms = [nn.BatchNorm(out_channels, num_spatial_dims=2) for _ in range(2)]
        same = channels == out_channels and stride == 1
        self.shortcut = (
            nn.Identity() if same else nn.Conv2d(channels, out_channels, 1, stride, key=shortcut)
        )

    def __call__(self, x):
        y = jax.nn.relu(self.norms[0](self.first(x)))
        return jax.nn.relu(self.shortcut(x) + self.norms[1](self.second(y)))


class ResNet(vernal.Module):
    stem: nn.Conv2d
    blocks: nn.Sequential
    head: nn.Linear

    def __init__(self, key):
        stem, head, *blocks = jax.random.split(key, 5)
        self.stem = nn.Conv2d(1, 16, 3, padding=1, key=stem)
        sizes = [(16, 16, 1), (16, 32, 2), (32, 32, 1)]
        self.blocks = nn.Sequential(
            [Block(*size, key=k) for size, k in zip(sizes, blocks, strict=True)]
        )
        self.head = nn.Linear(32, 10, key=head)

    def __call__(self, x):
        return self.head(self.blocks(self.stem(x)).mean(axis=(-2, -1)))


# %% [markdown]
# The loss returns the model too, as what it carries beside its value (`has_aux`). The statistics are buffers: no
# gradient, no momentum, no weight decay.


# %%
@vernal.filter_jit
def step(model, optimiser, state, x, y):
    def loss(model):
        logits, model = nn.apply(model, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), model

    (value, model), gradients = vernal.filter_value_and_grad(loss, has_aux=True)(model)
    model, state = optimiser.update(model, gradients, state)
    return model, state, value


@vernal.filter_jit
def accuracy(model, x, y):
    logits, _ = nn.apply(model, x, train=False)
    return (logits.argmax(-1) == y).mean()


model = ResNet(jax.random.key(0))
optimiser = vernal.Optimizer(optax.adamw, learning_rate=3e-3, weight_decay=1e-2)
state = optimiser.init(model)
accuracies = []
for epoch, key in enumerate(jax.random.split(jax.random.key(1), 8), start=1):
    order = jax.random.permutation(key, len(train_x))[: 21 * 64].reshape(21, 64)
    for batch in order:
        model, state, value = step(model, optimiser, state, train_x[batch], train_y[batch])
    accuracies.append(accuracy(model, test_x, test_y))
    print(f"epoch {epoch}: loss {value:.3f}, test accuracy {accuracies[-1]:.1%}")
assert accuracies[-1] > 0.97
print(f"the step was compiled {step.trace_count} time(s)")

# %% [markdown]
# A few digits that the network has not seen, each with what it says.

# %%
said = nn.apply(model, test_x[:16], train=False)[0].argmax(-1)
figure, axes = plt.subplots(2, 8, figsize=(8, 2.4), layout="constrained")
for image, digit, axis in zip(test_x[:16, 0], said, axes.flat, strict=True):
    axis.imshow(image, cmap="gray_r")
    axis.set_title(int(digit), fontsize=10)
    axis.axis("off")
figure.savefig("resnet.png", dpi=110)
