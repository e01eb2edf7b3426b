"""Trains a convolutional network to read handwritten digits, saves it, and loads it back.

    python examples/digits.py [--epochs 30] [--seed 0] [--out runs/digits] [--resume]

The data are the 1,797 images of 8x8 pixels that ship inside scikit-learn. Ctrl-C stops the training; `--resume`
continues it after the last whole epoch, and ends with the same numbers as if it had never stopped.
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import vernal
from vernal import nn

BATCH = 64


# A model is a class with fields. Layers and plain functions may stand in one list: the arrays inside are what is
# trained, everything else is structure.
class Classifier(vernal.Module):
    layers: list

    def __init__(self, key):
        key1, key2, key3 = jax.random.split(key, 3)
        self.layers = [
            nn.Conv2d(1, 32, kernel_size=3, padding=1, key=key1),
            jax.nn.relu,
            nn.MaxPool2d(2, stride=2),
            nn.Conv2d(32, 64, kernel_size=3, padding=1, key=key2),
            jax.nn.relu,
            nn.MaxPool2d(2, stride=2),
            jnp.ravel,
            nn.Linear(256, 10, key=key3),
        ]

    def __call__(self, image):
        for layer in self.layers:
            image = layer(image)
        return image


# The model reads one image; `jax.vmap` makes it read many.
def loss_and_accuracy(model, images, labels):
    logits = jax.vmap(model)(images)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(axis=1) == labels).mean()


# Model, optimiser and state are ordinary arguments. All arrays in them are traced, so this compiles once.
@vernal.filter_jit
def train_step(model, optimizer, state, images, labels):
    compute = vernal.filter_value_and_grad(loss_and_accuracy, has_aux=True)
    (loss, accuracy), grads = compute(model, images, labels)
    model, state = optimizer.update(model, grads, state)
    return model, state, loss, accuracy


evaluate = vernal.filter_jit(loss_and_accuracy)


@vernal.filter_jit
def predict(model, images):
    return jax.vmap(model)(images).argmax(axis=1)


def load_data(seed):
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    return train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=seed)


def batches(images, labels, seed, epoch):
    # The last, shorter batch is left out: another shape would be another program. Each epoch leaves out others.
    order = np.random.default_rng([seed, epoch]).permutation(len(images))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        chosen = order[start : start + BATCH]
        yield images[chosen], labels[chosen]


def draw_curves(history, path):
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axes, name in ((left, "loss"), (right, "accuracy")):
        for part in ("train", "test"):
            values = [epoch[f"{part}_{name}"] for epoch in history]
            axes.plot(range(1, len(values) + 1), values, label=part)
        axes.set(xlabel="epoch", ylabel=name)
    left.set_yscale("log")
    left.legend()
    figure.savefig(path, dpi=120)


def train(epochs, seed, checkpoint, resume):
    history = []
    if resume:
        about = vernal.saving.load_metadata(checkpoint)
        history, seed = about["history"], about["seed"]
    train_images, test_images, train_labels, test_labels = load_data(seed)
    model = Classifier(jax.random.key(seed))
    optimizer = vernal.Optimizer(optax.adamw, learning_rate=3e-3, weight_decay=1e-2)
    state = optimizer.init(model)
    if resume:
        # One file holds all that changes, so that what is found there always fits together.
        model, state = vernal.load(checkpoint, like=(model, state))
    print(vernal.debug.summary(model, train_images[0]))

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=epochs, completed=len(history))
        for epoch in range(len(history), epochs):
            seen = []
            for images, labels in batches(train_images, train_labels, seed, epoch):
                model, state, *measured = train_step(model, optimizer, state, images, labels)
                seen.append(measured)
            loss, accuracy = np.mean(jax.device_get(seen), axis=0).tolist()
            test_loss, test_accuracy = map(float, evaluate(model, test_images, test_labels))
            history.append(
                {
                    "train_loss": loss,
                    "train_accuracy": accuracy,
                    "test_loss": test_loss,
                    "test_accuracy": test_accuracy,
                }
            )
            vernal.save(checkpoint, (model, state), metadata={"history": history, "seed": seed})
            text = f"epoch {epoch + 1}/{epochs}  loss {loss:.4f}  accuracy {accuracy:.2%}"
            progress.update(bar, advance=1, description=text)
    return model, history, test_images


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/digits"))
    parser.add_argument("--resume", action="store_true", help="continue where the last run stopped")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint = args.out / "checkpoint.safetensors"
    if args.resume and not checkpoint.exists():
        sys.exit(f"There is nothing to resume: {checkpoint} does not exist.")
    if not args.resume:
        checkpoint.unlink(missing_ok=True)

    try:
        model, history, test_images = train(args.epochs, args.seed, checkpoint, args.resume)
    except KeyboardInterrupt:
        kept = f"the last whole epoch is in {checkpoint}; continue with --resume"
        print(f"Stopped: {kept if checkpoint.exists() else 'before the end of the first epoch'}.")
        sys.exit(130)

    print(f"test accuracy: {history[-1]['test_accuracy']:.2%}")
    count = train_step.trace_count
    print(f"training step: compiled {'once' if count == 1 else f'{count} times'}")

    path, curves = args.out / "model.safetensors", args.out / "curves.png"
    vernal.save(path, model)
    draw_curves(history, curves)
    print(f"written: {path}, {curves}")

    # Loading needs the structure of the model, but no weights: this one has only shapes.
    skeleton = vernal.filter_eval_shape(Classifier, jax.random.key(0))
    loaded = vernal.load(path, like=skeleton)
    same = np.array_equal(predict(loaded, test_images), predict(model, test_images))
    print(f"loaded back: predictions are {'equal' if same else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
