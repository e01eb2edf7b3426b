# %% [markdown]
# # Fine-tuning with frozen statistics
#
# A network has learnt the digits 0 to 6. It is to tell 7, 8 and 9 apart from 24 examples. Its convolutions and the
# running statistics of its norms are frozen by path, and only a new head is trained.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from sklearn.datasets import load_digits

import vernal
from vernal import nn
from vernal.trees import named_leaves

digits = load_digits()
images = jnp.asarray(digits.images[:, None] / 16, dtype=jnp.float32)
labels = jnp.asarray(digits.target)
known, new = labels < 7, labels >= 7


class Classifier(vernal.Module):
    features: nn.Sequential
    head: nn.Linear

    def __init__(self, num_classes, key):
        first, second, head = jax.random.split(key, 3)
        self.features = nn.Sequential(
            [
                nn.Conv2d(1, 16, 3, key=first),
                nn.BatchNorm(16, num_spatial_dims=2),
                jax.nn.relu,
                nn.Conv2d(16, 32, 3, stride=2, key=second),
                nn.BatchNorm(32, num_spatial_dims=2),
                jax.nn.relu,
            ]
        )
        self.head = nn.Linear(128, num_classes, key=head)

    def __call__(self, x):
        return self.head(self.features(x).reshape(len(x), -1))


@vernal.filter_jit
def step(model, optimiser, state, x, y):
    def loss(model):
        logits, model = nn.apply(model, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), model

    (value, model), gradients = vernal.filter_value_and_grad(loss, has_aux=True)(model)
    model, state = optimiser.update(model, gradients, state)
    return model, state, value


def train(model, x, y, steps):
    optimiser = vernal.Optimizer(optax.adamw, 5e-3, weight_decay=1e-2)
    state = optimiser.init(model)
    for key in jax.random.split(jax.random.key(1), steps):
        batch = jax.random.choice(key, len(x), (64,))
        model, state, _ = step(model, optimiser, state, x[batch], y[batch])
    return model


@vernal.filter_jit
def accuracy(model, x, y):
    return (nn.apply(model, x, train=False)[0].argmax(-1) == y).mean()


pretrained = train(Classifier(7, jax.random.key(0)), images[known], labels[known], 200)
print(f"0 to 6: {accuracy(pretrained, images[known], labels[known]):.1%}")

# %% [markdown]
# `tree_at` puts a new head in, `freeze` marks everything under `features`. What is frozen has no gradient, no optimiser
# state and no weight decay, and its norms use their statistics instead of the batch's. The same step trains it.

# %%
model = vernal.tree_at("head", pretrained, nn.Linear(128, 3, key=jax.random.key(2)))
model = vernal.freeze(model, "features")
few_x, few_y = images[new][:24], labels[new][:24] - 7
rest_x, rest_y = images[new][24:], labels[new][24:] - 7
tuned = train(model, few_x, few_y, 200)

before, after = named_leaves(model), named_leaves(tuned)
moved = [name for name in after if not (before[name] == after[name]).all()]
print(f"what has moved: {', '.join(moved)}")
assert moved == ["head.weight", "head.bias"]
from_scratch = train(Classifier(3, jax.random.key(0)), few_x, few_y, 200)
scores = {
    "guessing": 1 / 3,
    "from scratch": float(accuracy(from_scratch, rest_x, rest_y)),
    "fine-tuned head": float(accuracy(tuned, rest_x, rest_y)),
    "all, after the head": float(
        accuracy(train(vernal.unfreeze(tuned), few_x, few_y, 100), rest_x, rest_y)
    ),
}
for name, score in scores.items():
    print(f"7 to 9, {name}: {score:.1%}")
assert scores["fine-tuned head"] > 0.75

# %%
figure, axis = plt.subplots(figsize=(6, 2.5), layout="constrained")
axis.barh(list(scores), list(scores.values()))
axis.set(xlabel="accuracy on 7, 8 and 9", xlim=(0, 1))
figure.savefig("fine_tuning.png", dpi=110)
