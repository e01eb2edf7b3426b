"""Three classic ways to compile a training step again and again, what Vernal says of each, and the corrected script.

    python examples/recompile.py [--epochs 3]

The same classifier of handwritten digits is trained twice. The first loop makes the mistakes:

* a new optimiser with another learning rate in each epoch,
* a Python number that changes from call to call,
* a last batch that is shorter than the others.

`vernal.debug.log_retraces` prints one line for each time that the step is compiled again. The second loop is
mended, and `vernal.debug.no_retrace` would stop it at the first compilation too many. The whole script can also be
watched from outside: `python -m vernal compiles examples/recompile.py`.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import vernal

BATCH = 64


def smoothed_loss(model, images, labels, smoothing):
    targets = optax.smooth_labels(jax.nn.one_hot(labels, 10), smoothing)
    return optax.softmax_cross_entropy(jax.vmap(model)(images), targets).mean()


@vernal.filter_jit
def careless_step(model, optimizer, state, images, labels, smoothing):
    grads = vernal.filter_grad(smoothed_loss)(model, images, labels, smoothing)
    updates, state = optimizer.update(grads, state, vernal.params(model))
    return vernal.apply_updates(model, updates), state


def careless(model, images, labels, epochs):
    state = optax.adam(1e-2).init(vernal.params(model))
    for epoch in range(epochs):
        # Mistake 1: the learning rate is part of the program.
        optimizer = optax.adam(1e-2 / (1 + epoch))
        # Mistake 2: so is every Python number.
        smoothing = 0.1 / (1 + epoch)
        # Mistake 3: the last batch has another shape.
        for start in range(0, len(images), BATCH):
            batch = slice(start, start + BATCH)
            model, state = careless_step(
                model, optimizer, state, images[batch], labels[batch], smoothing
            )
    return model


@vernal.filter_jit
def mended_step(model, optimizer, state, images, labels, smoothing):
    grads = vernal.filter_grad(smoothed_loss)(model, images, labels, smoothing)
    return optimizer.update(model, grads, state)


def mended(model, images, labels, epochs):
    optimizer = vernal.Optimizer(optax.adam, 1e-2)
    state = optimizer.init(model)
    for epoch in range(epochs):
        # The settings of an `Optimizer` are arrays: another learning rate is the same program.
        optimizer = optimizer.replace(learning_rate=1e-2 / (1 + epoch))
        # A number that changes is given as an array.
        smoothing = jnp.asarray(0.1 / (1 + epoch))
        # What is left over at the end of an epoch is left out. (To use it, pad it, and give those examples no weight.)
        order = np.random.default_rng(epoch).permutation(len(images))
        for start in range(0, len(images) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            model, state = mended_step(
                model, optimizer, state, images[batch], labels[batch], smoothing
            )
    return model


def accuracy(model, images, labels):
    return float((jax.vmap(model)(images).argmax(axis=1) == labels).mean())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    model = vernal.nn.MLP(64, 10, 64, depth=2, key=jax.random.key(0))

    print("careless:")
    start = time.perf_counter()
    with vernal.debug.log_retraces(lambda line: print(f"  {line}")):
        trained = careless(model, images, labels, epochs)
    print(
        f"  compiled {careless_step.trace_count} times, {time.perf_counter() - start:.1f} s, "
        f"accuracy {accuracy(trained, images, labels):.1%}"
    )

    print("mended:")
    start = time.perf_counter()
    with vernal.debug.no_retrace():
        trained = mended(model, images, labels, epochs)
    times = {1: "once"}.get(mended_step.trace_count, f"{mended_step.trace_count} times")
    print(
        f"  compiled {times}, {time.perf_counter() - start:.1f} s, "
        f"accuracy {accuracy(trained, images, labels):.1%}"
    )


if __name__ == "__main__":
    main()
