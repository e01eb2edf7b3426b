"""Watches the curvature of a loss while a network learns, from products with its Hessian alone.

    python examples/hessian_trace.py [--epochs 12] [--matvecs 60] [--seed 0] [--out runs/hessian_trace]

The network reads the handwritten digits of scikit-learn, as that of `digits.py`, but is small enough for its Hessian
to be multiplied by every unit vector: at a few epochs the estimates are compared with the exact trace. The Hessian is
the sum of two: the Gauss-Newton matrix, without negative eigenvalues, and what the second derivatives of the network
add. Both are watched.
"""

import argparse
import pathlib
import time

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits

import vernal
from vernal import estimators, linalg, nn
from vernal.show import table

BATCH, PROBED, EXACT = 64, 128, 3


class Classifier(vernal.Module):
    layers: list

    def __init__(self, key):
        key1, key2, key3 = jax.random.split(key, 3)
        self.layers = [
            nn.Conv2d(1, 4, kernel_size=3, padding=1, key=key1),
            jax.nn.silu,
            nn.AvgPool2d(2, stride=2),
            nn.Conv2d(4, 8, kernel_size=3, padding=1, key=key2),
            jax.nn.silu,
            nn.AvgPool2d(2, stride=2),
            jnp.ravel,
            nn.Linear(32, 10, key=key3),
        ]

    def __call__(self, image):
        for layer in self.layers:
            image = layer(image)
        return image


def predict(model, images):
    return jax.vmap(model)(images)


def loss_of(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss(model, images, labels):
    return loss_of(predict(model, images), labels)


@vernal.filter_jit
def train_step(model, optimizer, state, images, labels):
    value, grads = vernal.filter_value_and_grad(loss)(model, images, labels)
    model, state = optimizer.update(model, grads, state)
    return model, state, value


# The operators are made inside: the model is an ordinary argument, and all epochs share one program.
@vernal.filter_jit
def curvature(model, images, labels, key, matvecs):
    hessian = linalg.hessian_operator(loss, model, images, labels)
    # Cross-entropy is convex in the logits, so this one may be told to be positive semidefinite.
    gauss_newton = linalg.gauss_newton_operator(
        predict, model, images, loss=lambda logits: loss_of(logits, labels)
    )
    # As many products as there are parameters make an exact answer.
    return [
        estimators.trace(operator, key, matvecs=min(matvecs, operator.size))
        for operator in (hessian, gauss_newton)
    ]


def train(epochs, matvecs, seed):
    """A record for every epoch, from before the first to after the last."""
    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    model = Classifier(jax.random.key(seed))
    optimizer = vernal.Optimizer(optax.adam, learning_rate=5e-3)
    state = optimizer.init(model)
    size = sum(x.size for x in jax.tree.leaves(vernal.filter(model, vernal.is_inexact_array)))
    checked = set(np.linspace(0, epochs, EXACT).round().astype(int))
    probed = images[:PROBED], labels[:PROBED]
    history = []
    for epoch in range(epochs + 1):
        key = jax.random.fold_in(jax.random.key(seed), epoch)
        start = time.perf_counter()
        found = jax.block_until_ready(curvature(model, *probed, key, matvecs))
        taken = time.perf_counter() - start
        exact = None
        if epoch in checked:
            exact = [float(e.value) for e in curvature(model, *probed, key, size)]
        history.append(
            {
                "epoch": epoch,
                "loss": float(loss(model, *probed)),
                "estimates": found,
                "exact": exact,
                "seconds": taken,
            }
        )
        if epoch == epochs:
            break
        order = np.random.default_rng([seed, epoch]).permutation(len(images))
        for i in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[i : i + BATCH]
            model, state, _ = train_step(model, optimizer, state, images[chosen], labels[chosen])
    return size, history


def report(size, matvecs, history):
    rows = []
    for record in history:
        if record["exact"] is None:
            continue
        for name, estimate, exact in zip(
            ("Hessian", "Gauss-Newton"), record["estimates"], record["exact"], strict=True
        ):
            low, high = (float(x) for x in estimate.interval())
            rows.append(
                [
                    str(record["epoch"]),
                    name,
                    f"{record['loss']:.3f}",
                    f"{exact:.2f}",
                    f"{float(estimate.value):.2f}",
                    f"{low:.2f} to {high:.2f}",
                    "yes" if low <= exact <= high else "no",
                ]
            )
    print(table(None, ["epoch", "matrix", "loss", "exact", "estimate", "95%", "inside"], rows))
    share = matvecs / size
    print(f"{size:,} parameters, {matvecs} products for an estimate: {share:.1%} of an exact trace")
    first, *later = history
    traces = [float(record["estimates"][0].value) for record in history]
    peak = int(np.argmax(traces))
    print(f"the Hessian's trace: {traces[0]:.1f} at first, {traces[peak]:.1f} at its highest")
    print(f"    (after epoch {peak}), {traces[-1]:.1f} at the end")
    seconds = np.median([record["seconds"] for record in later])
    print(
        f"an estimate of both: {1000 * seconds:.0f} ms; the first, with compilation: {first['seconds']:.1f} s"
    )


def draw(history, path):
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    epochs = [record["epoch"] for record in history]
    for i, name in enumerate(("Hessian", "Gauss-Newton")):
        values = np.array([float(record["estimates"][i].value) for record in history])
        ends = np.array(
            [[float(x) for x in record["estimates"][i].interval()] for record in history]
        )
        line = left.errorbar(epochs, values, np.abs(ends.T - values), capsize=2, label=name)
        checked = [record for record in history if record["exact"]]
        left.plot(
            [record["epoch"] for record in checked],
            [record["exact"][i] for record in checked],
            "o",
            color=line[0].get_color(),
            markerfacecolor="none",
            markersize=9,
            label=f"{name}, exact",
        )
    left.set(xlabel="epoch", ylabel="trace, with intervals of 95%")
    left.legend()
    right.plot(epochs, [record["loss"] for record in history])
    right.set(xlabel="epoch", ylabel="loss", yscale="log")
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--matvecs", type=int, default=60, help="products for one estimate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/hessian_trace"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    size, history = train(args.epochs, args.matvecs, args.seed)
    report(size, args.matvecs, history)
    draw(history, args.out / "trace.png")
    print(f"drawn: {args.out / 'trace.png'}")


if __name__ == "__main__":
    main()
