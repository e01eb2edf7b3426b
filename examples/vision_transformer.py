# %% [markdown]
# # A vision transformer
#
# Each image of 8 by 8 pixels is cut into sixteen patches of 2 by 2. Four equal blocks look at them: an `nn.Stack`,
# which scans over its layers, so the block is traced and compiled once, however deep the model is.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import vernal
from vernal import nn

PATCH, WIDTH, DEPTH = 2, 48, 4


class Block(vernal.Module):
    attention: nn.MultiheadAttention
    mlp: nn.MLP
    norms: list
    dropout: nn.Dropout

    def __init__(self, key):
        attention, mlp = jax.random.split(key)
        self.attention = nn.MultiheadAttention(4, WIDTH, key=attention)
        self.mlp = nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, activation=jax.nn.gelu, key=mlp)
        self.norms = [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]
        self.dropout = nn.Dropout(0.2)

    def __call__(self, x):
        y = self.norms[0](x)
        x = x + self.dropout(self.attention(y, y, y))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class VisionTransformer(vernal.Module):
    embed: nn.Conv2d
    position: jax.Array
    blocks: nn.Stack
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, key):
        embed, position, blocks, head = jax.random.split(key, 4)
        self.embed = nn.Conv2d(1, WIDTH, PATCH, PATCH, key=embed)
        self.position = 0.5 * jax.random.normal(position, ((8 // PATCH) ** 2, WIDTH))
        self.blocks = nn.Stack(lambda key: Block(key), DEPTH, key=blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10, key=head)

    def __call__(self, images):
        patches = self.embed(images)  # (batch, WIDTH, 4, 4)
        patches = patches.reshape(*patches.shape[:-2], -1).swapaxes(-1, -2)
        return self.head(self.norm(self.blocks(patches + self.position)).mean(axis=-2))


# %% [markdown]
# One key per call of `nn.apply` is enough for dropout: every use of a layer draws anew. The learning rate is a
# schedule, and weight decay acts on the matrices alone. They are named: in a `Stack`, whose arrays have one axis more,
# a bias has as many axes as a matrix elsewhere.


# %%
@vernal.filter_jit
def step(model, optimiser, state, x, y, key):
    @vernal.filter_value_and_grad
    def loss(model):
        logits, _ = nn.apply(model, x, key=key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    value, gradients = loss(model)
    model, state = optimiser.update(model, gradients, state)
    return model, state, value


@vernal.filter_jit
def accuracy(model, x, y):
    logits, _ = nn.apply(model, x, train=False)
    return (logits.argmax(-1) == y).mean()


digits = load_digits()
train_x, test_x, train_y, test_y = train_test_split(
    jnp.asarray(digits.images[:, None] / 16, dtype=jnp.float32),
    jnp.asarray(digits.target),
    test_size=0.25,
    random_state=0,
)
EPOCHS, BATCH = 20, 64
steps = len(train_x) // BATCH
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 2 * steps, EPOCHS * steps)
model = VisionTransformer(jax.random.key(0))
matrices = ["embed.weight", "blocks.**.{attention,mlp}.**.weight", "head.weight"]
optimiser = vernal.Optimizer(
    optax.adamw, schedule, weight_decay=0.1, mask=vernal.trainable(model, matrices)
)
state = optimiser.init(model)
losses = []
for epoch, key in enumerate(jax.random.split(jax.random.key(1), EPOCHS), start=1):
    keys = jax.random.split(key, steps + 1)
    order = jax.random.permutation(keys[0], len(train_x))[: steps * BATCH].reshape(steps, BATCH)
    for batch, k in zip(order, keys[1:], strict=True):
        model, state, value = step(model, optimiser, state, train_x[batch], train_y[batch], k)
        losses.append(float(value))
    if epoch % 4 == 0:
        print(
            f"epoch {epoch}: loss {value:.3f}, test accuracy {accuracy(model, test_x, test_y):.1%}"
        )
assert accuracy(model, test_x, test_y) > 0.95

# %%
figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.semilogy(losses)
axis.set(xlabel="step", ylabel="loss")
figure.savefig("vision_transformer.png", dpi=110)
