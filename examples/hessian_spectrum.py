"""The five largest eigenvalues of a network's Hessian, and which of its parameters their eigenvectors move.

Run it with

    python examples/hessian_spectrum.py                 # trains a small classifier of digits, and draws a plot
    python examples/hessian_spectrum.py --plot file.png

The Hessian is never made: `vernal.linalg.eigsh` multiplies by it. The loss is that of 256 images; each eigenvalue comes
with the length of its residual, within which there certainly is one. An eigenvector is a tree like the model, so that
its share in every layer can be read off by path.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import vernal
from vernal import linalg, nn
from vernal.show import table

COUNT, PROBED = 5, 256


def loss(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@vernal.filter_jit
def train_step(model, optimizer, state, images, labels):
    grads = vernal.filter_grad(loss)(model, images, labels)
    return optimizer.update(model, grads, state)


@vernal.filter_jit
def spectrum(model, images, labels):
    return linalg.eigsh(linalg.hessian_operator(loss, model, images, labels), COUNT, rtol=1e-3)


def trained(steps, seed):
    digits = load_digits()
    images = (digits.images.reshape(-1, 64) / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    model = nn.MLP(64, 10, 32, 2, activation=jax.nn.silu, key=jax.random.key(seed))
    optimizer = vernal.Optimizer(optax.adam, learning_rate=5e-3)
    state = optimizer.init(model)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        batch = rng.integers(len(images), size=64)
        model, state = train_step(model, optimizer, state, images[batch], labels[batch])
    return model, images[:PROBED], labels[:PROBED]


def shares(vectors):
    """By path, the share of each parameter in the squared length of every eigenvector."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(vectors)
    return {
        jax.tree_util.keystr(path).lstrip("."): np.asarray(
            jnp.sum(x.reshape(COUNT, -1) ** 2, axis=1)
        )
        for path, x in leaves
    }


def draw(file, values, by_path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.bar(range(1, COUNT + 1), values)
    left.set(title="eigenvalues of the Hessian", xlabel="largest first")
    bottom = np.zeros(COUNT)
    for path, share in by_path.items():
        right.bar(range(1, COUNT + 1), share, bottom=bottom, label=path)
        bottom += share
    right.set(title="share of each parameter", xlabel="eigenvector")
    right.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(file, dpi=150)
    print(f"the plot is in {file}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", default="hessian_spectrum.png")
    arguments = parser.parse_args(argv)
    found = spectrum(*trained(arguments.steps, arguments.seed))
    by_path = shares(found.vectors)
    head = ["eigenvalue", *(f"{value:.3f}" for value in found.values)]
    errors = ["residual", *(f"{error:.0e}" for error in found.errors)]
    rows = [[path, *(f"{x:.0%}" for x in share)] for path, share in by_path.items()]
    print(table("Eigenvectors of the Hessian, by path", head, [errors, *rows]))
    print(f"{found.matvecs} products; tolerance met: {bool(found.tolerance_met)}")
    draw(arguments.plot, found.values, by_path)
    return found


if __name__ == "__main__":
    main()
