"""Trains a population of networks at once, each with its own learning rate and weight decay, in one compiled step.

    python examples/sweep.py [--epochs 20] [--seed 0]

An optimiser is a value whose leaves are its numbers, so `jax.vmap` maps over optimisers as over anything else. The best
network of the population then learns another task with all but its last layer frozen.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import vernal
from vernal import nn
from vernal.show import table

BATCH = 128
RATES = [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
DECAYS = [0.0, 0.1, 1.0]


def loss(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def update(model, optimizer, state, images, labels):
    gradients = vernal.filter_grad(loss)(model, images, labels)
    return optimizer.update(model, gradients, state)


# Every member of the population has a model, an optimiser and a state of its own; all see the same images.
train_all = vernal.filter_jit(jax.vmap(update, in_axes=(0, 0, 0, None, None)))
train_one = vernal.filter_jit(update)


@vernal.filter_jit
def accuracy(model, images, labels):
    return (jax.vmap(model)(images).argmax(axis=1) == labels).mean()


def batches(images, labels, epochs, seed):
    generator = np.random.default_rng(seed)
    for _ in range(epochs):
        order = generator.permutation(len(images))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield images[chosen], labels[chosen]


def sweep(data, epochs, seed):
    """The best model, after training one for every learning rate and weight decay."""
    train_images, test_images, train_labels, test_labels = data
    rates, decays = (x.ravel() for x in jnp.meshgrid(jnp.array(RATES), jnp.array(DECAYS)))
    optimizers = vernal.Optimizer(optax.adamw, learning_rate=rates, weight_decay=decays)
    # The same beginning for all of them.
    keys = jnp.broadcast_to(jax.random.key(seed), rates.shape)
    models = jax.vmap(lambda key: nn.MLP(64, 10, 32, depth=2, key=key))(keys)
    states = jax.vmap(lambda optimizer, model: optimizer.init(model))(optimizers, models)
    for images, labels in batches(train_images, train_labels, epochs, seed):
        models, states = train_all(models, optimizers, states, images, labels)

    found = jax.vmap(accuracy, in_axes=(0, None, None))(models, test_images, test_labels)
    columns = ["learning rate", *(f"decay {decay:g}" for decay in DECAYS)]
    by_rate = found.reshape(len(DECAYS), len(RATES)).T
    rows = [
        [f"{rate:g}", *(f"{x:.1%}" for x in row)] for rate, row in zip(RATES, by_rate, strict=True)
    ]
    print(table("Accuracy on images not seen in training", columns, rows))
    count = train_all.trace_count
    print(f"{len(found)} networks: compiled {'once' if count == 1 else f'{count} times'}")
    best = int(found.argmax())
    return jax.tree.map(lambda x: x[best], models)


def fine_tune(model, data, epochs, seed):
    """Teaches the last layer alone to tell odd digits from even ones."""
    train_images, test_images, train_labels, test_labels = data
    head = nn.Linear(32, 2, key=jax.random.key(seed))
    model = vernal.tree_at(lambda m: m.layers[2], model, head)
    model = vernal.unfreeze(vernal.freeze(model, "**"), "layers.2")
    optimizer = vernal.Optimizer(optax.adamw, learning_rate=1e-2)
    state = optimizer.init(model)
    before = model
    for images, labels in batches(train_images, train_labels % 2, epochs, seed):
        model, state = train_one(model, optimizer, state, images, labels)

    trained, frozen = vernal.partition(model, vernal.trainable(model))
    sizes = [sum(x.size for x in jax.tree.leaves(part)) for part in (trained, frozen)]
    print(f"odd or even: {accuracy(model, test_images, test_labels % 2):.1%}")
    print(f"{sizes[0]} parameters trained, {sizes[1]:,} frozen")
    same = np.array_equal(model.layers[0].weight, before.layers[0].weight)
    print(f"frozen layers: {'unchanged' if same else 'CHANGED'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    data = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=args.seed)
    model = sweep(data, args.epochs, args.seed)
    fine_tune(model, data, args.epochs, args.seed)


if __name__ == "__main__":
    main()
