"""Leave-one-out estimates as they are defined, each from a factorisation of its own, in double precision."""

import numpy as np


def basis(block):
    return np.linalg.qr(block)[0] if block.shape[1] else block


def with_basis(matrix, probes, j, others):
    """The estimate of `XTrace` with the test vector j and a basis of the products with others."""
    n = len(matrix)
    q = basis(matrix @ probes[:, others])
    rest = probes[:, j] - q @ (q.conj().T @ probes[:, j])
    weight = (n - len(others)) / np.vdot(rest, rest).real
    return np.trace(q.conj().T @ matrix @ q) + weight * np.vdot(rest, matrix @ rest)


def with_nystrom(matrix, probes, j, others):
    """The estimate of `XNysTrace`, likewise."""
    n = len(matrix)
    products = matrix @ probes[:, others]
    low = products @ np.linalg.solve(probes[:, others].conj().T @ products, products.conj().T)
    span = basis(probes[:, others])
    rest = probes[:, j] - span @ (span.conj().T @ probes[:, j])
    weight = (n - len(others)) / np.vdot(rest, rest).real
    return np.trace(low) + weight * np.vdot(probes[:, j], (matrix - low) @ probes[:, j])


def left_out(estimate, matrix, probes):
    """`(single, double)`: the estimates without one probe, and [i, j] the one that tests j without i."""
    k = probes.shape[1]
    every = range(k)
    single = np.array([estimate(matrix, probes, j, [i for i in every if i != j]) for j in every])
    double = np.zeros((k, k), single.dtype)
    for i in every:
        for j in every:
            if i != j:
                others = [x for x in every if x not in (i, j)]
                double[i, j] = estimate(matrix, probes, j, others)
    return single, double


def mean_and_variance(single, double):
    """The mean, and its variance by both expressions for the covariance."""
    k = len(single)
    different = ~np.eye(k, dtype=bool)
    moved = np.where(different, single[None, :] - double, 0)
    centred = single - single.mean()
    mutual = np.mean((moved * moved.conj().T).real[different])
    plain = np.mean((centred.conj()[:, None] * moved).real[different])
    spread = np.sum(np.abs(centred) ** 2) / (k - 1) / k
    return single.mean(), spread + (max(mutual, 0) + max(plain, 0)) / 2
