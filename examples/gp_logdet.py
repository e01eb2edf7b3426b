"""Learns the hyperparameters of a Gaussian process without ever having its kernel matrix.

    python examples/gp_logdet.py [--steps 60] [--matvecs 120] [--seed 0] [--out runs/gp_logdet]

The likelihood of a Gaussian process has the log-determinant of its kernel matrix in it, which takes a factorisation of
the whole matrix. Here it is estimated from products with that matrix, which are made block by block, and so is its
gradient. The data are the 442 patients of the diabetes study that ship inside scikit-learn: few enough to learn the
same model by exact factorisation as well, and to see what the estimates lose.
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.scipy.linalg import cho_factor, cho_solve
from jax.scipy.sparse.linalg import cg
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import vernal
from vernal import estimators, linalg
from vernal.show import table

RATE, EVERY = 0.1, 5


# One length for each of the ten measurements of a patient: those that say nothing become long.
class Kernel(vernal.Module):
    log_lengths: jax.Array
    log_height: jax.Array

    def __call__(self, x, y):
        distance = jnp.sum(((x - y) * jnp.exp(-self.log_lengths)) ** 2)
        return jnp.exp(2 * self.log_height - distance / 2)


class Process(vernal.Module):
    kernel: Kernel
    log_noise: jax.Array

    @property
    def variance(self):
        return jnp.exp(2 * self.log_noise)

    def covariance(self, points, others):
        return jax.vmap(lambda x: jax.vmap(lambda y: self.kernel(x, y))(others))(points)

    def matrix(self, points):
        return self.covariance(points, points) + self.variance * jnp.eye(len(points))

    def operator(self, points):
        return linalg.kernel_operator(self.kernel, points, noise=self.variance)


def exact(process, key, points, targets):
    """The negative log-likelihood by Cholesky's factorisation, and its error: none."""
    factor = cho_factor(process.matrix(points), lower=True)
    logdet = 2 * jnp.sum(jnp.log(jnp.diag(factor[0])))
    fit = targets @ cho_solve(factor, targets)
    return (fit + logdet + len(targets) * jnp.log(2 * jnp.pi)) / 2, jnp.zeros(())


def estimated(matvecs):
    def likelihood(process, key, points, targets):
        """The same from products alone, and the standard error of it."""
        operator = process.operator(points)
        weights, _ = cg(jax.lax.stop_gradient(operator).mv, targets, tol=1e-4)
        weights = jax.lax.stop_gradient(weights)
        # Equal to `targets @ weights` where these solve the system, with an error and a gradient of second order in
        # theirs: nothing is differentiated through the iterations.
        fit = 2 * targets @ weights - weights @ operator.mv(weights)
        logdet = estimators.logdet(operator, key, matvecs=matvecs)
        value = (fit + logdet.value + len(targets) * jnp.log(2 * jnp.pi)) / 2
        return value, logdet.standard_error / 2

    return likelihood


def train(likelihood, points, targets, steps, seed):
    """The process at the end, and the way to it: for some steps, value, error, and what the value should be."""

    @vernal.filter_jit
    def step(process, optimizer, state, key, points, targets):
        compute = vernal.filter_value_and_grad(likelihood, has_aux=True)
        (value, error), gradient = compute(process, key, points, targets)
        process, state = optimizer.update(process, gradient, state)
        return process, state, value, error

    truth = vernal.filter_jit(exact)
    process = Process(
        Kernel(jnp.ones(points.shape[1]), jnp.zeros(())), jnp.full((), -0.5, jnp.float32)
    )
    optimizer = vernal.Optimizer(optax.adam, RATE)
    state, way = optimizer.init(process), []
    for i in range(steps):
        # Another key for every step: the errors of the gradients average out on the way.
        key = jax.random.fold_in(jax.random.key(seed), i)
        before = process
        process, state, value, error = step(process, optimizer, state, key, points, targets)
        if i % EVERY == 0 or i == steps - 1:
            want, _ = truth(before, key, points, targets)
            way.append((i, float(value), float(error), float(want)))
    count = step.trace_count
    return process, np.array(way), "once" if count == 1 else f"{count} times"


def test_error(process, data):
    """Root mean square error on patients not seen, in standard deviations of the target."""
    points, others, targets, others_targets = data
    factor = cho_factor(process.matrix(points), lower=True)
    predictions = process.covariance(others, points) @ cho_solve(factor, targets)
    return float(jnp.sqrt(jnp.mean((predictions - others_targets) ** 2)))


def load(seed):
    data = load_diabetes()
    points, others, targets, others_targets = train_test_split(
        data.data, data.target, test_size=100, random_state=seed
    )
    center, scale = points.mean(axis=0), points.std(axis=0)
    points, others = ((x - center) / scale for x in (points, others))
    center, scale = targets.mean(), targets.std()
    targets, others_targets = ((y - center) / scale for y in (targets, others_targets))
    arrays = [jnp.asarray(x, jnp.float32) for x in (points, others, targets, others_targets)]
    return arrays, data.feature_names


def draw(processes, ways, names, path):
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    steps, values, errors, truths = ways["estimated"].T
    left.plot(*ways["exact"][:, :2].T, "k-", linewidth=1, label="learnt exactly")
    left.plot(steps, truths, "C0-", linewidth=1, label="learnt from estimates")
    left.errorbar(steps, values, 2 * errors, fmt="C0.", capsize=2, label="what was estimated")
    left.set(xlabel="step", ylabel="negative log-likelihood", title="two standard errors")
    left.legend()
    places = np.arange(len(names))
    for shift, color, (name, process) in zip(
        (-0.2, 0.2), ("k", "C0"), processes.items(), strict=True
    ):
        weights = np.exp(-np.asarray(process.kernel.log_lengths))
        right.bar(places + shift, weights, 0.4, color=color, label=name)
    right.set_xticks(places, names)
    right.set(title="what matters", ylabel="1 / length")
    right.legend()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--matvecs", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/gp_logdet"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data, names = load(args.seed)
    points, _, targets, _ = data
    print(f"{len(points)} patients; {args.matvecs} products for each log-determinant")

    processes, ways, rows = {}, {}, []
    for name, likelihood in (("exact", exact), ("estimated", estimated(args.matvecs))):
        process, way, compiled = train(likelihood, points, targets, args.steps, args.seed)
        processes[name], ways[name] = process, way
        value = float(exact(process, None, points, targets)[0])
        sizes = (float(jnp.exp(x)) for x in (process.kernel.log_height, process.log_noise))
        error = test_error(process, data)
        rows.append([name, compiled, f"{value:.2f}", *(f"{x:.3f}" for x in (*sizes, error))])
    columns = ["learnt by", "compiled", "negative log-likelihood", "height", "noise", "test error"]
    print(table("Both models, judged exactly", columns, rows))

    _, values, errors, truths = ways["estimated"].T
    inside = np.sum(np.abs(values - truths) <= 2 * errors)
    print(f"{inside} of {len(values)} values within two of their standard errors of the exact ones")
    print(f"the standard error at the end: {errors[-1]:.2f}")
    order = [np.argsort(np.asarray(p.kernel.log_lengths))[:3] for p in processes.values()]
    for name, best in zip(processes, order, strict=True):
        print(f"what matters most, {name}: {', '.join(names[i] for i in best)}")
    draw(processes, ways, names, args.out / "likelihood.png")
    print(f"drawn: {args.out / 'likelihood.png'}")


if __name__ == "__main__":
    main()
