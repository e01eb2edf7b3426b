"""Every method of trace estimation on the spectra of the literature: errors, and how honest the reported ones are.

The levels are those of an independent implementation in NumPy, of each method as its paper has it, in double precision,
with 100 trials of its own: the larger of its median error and of 0.845 times its mean error. Both estimate the median
of a normal error, which 100 trials know to 12% only. For the leave-one-out methods it is the variant with normal
probes that are rescaled, for the others the one with signs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.estimators._spectra import SPECTRA, errors_of, rotated
from vernal import estimators

N = 1000
BUDGETS = (20, 60, 120, 200)
# Relative to the trace, for each of the budgets.
LEVELS = {
    "Hutchinson": {
        "flat": (2.25e-03, 9.21e-04, 7.39e-04, 6.25e-04),
        "poly": (1.37e-01, 7.43e-02, 5.74e-02, 4.62e-02),
        "exp": (8.31e-02, 4.66e-02, 3.46e-02, 2.79e-02),
        "step": (3.31e-02, 1.59e-02, 1.01e-02, 9.93e-03),
    },
    "HutchPlusPlus": {
        "flat": (4.32e-03, 2.37e-03, 1.94e-03, 1.37e-03),
        "poly": (1.23e-02, 1.29e-03, 3.40e-04, 1.07e-04),
        "exp": (2.29e-02, 1.53e-04, 8.34e-08, 4.74e-12),
        "step": (4.79e-02, 2.33e-02, 1.04e-02, 1.87e-05),
    },
    "XTrace": {
        "flat": (2.62e-03, 1.83e-03, 1.28e-03, 8.97e-04),
        "poly": (7.51e-03, 6.41e-04, 1.84e-04, 5.83e-05),
        "exp": (1.20e-02, 5.21e-06, 7.87e-11, 3.05e-16),
        "step": (3.79e-02, 2.28e-02, 6.19e-06, 3.96e-07),
    },
    "XNysTrace": {
        "flat": (2.28e-03, 9.87e-04, 7.55e-04, 5.68e-04),
        "poly": (4.94e-03, 5.96e-04, 1.35e-04, 4.92e-05),
        "exp": (2.42e-03, 3.95e-09, 4.60e-15, 5.33e-16),
        "step": (3.31e-02, 4.96e-03, 2.87e-04, 8.43e-05),
    },
}
# Below it, an error is one of rounding.
ROUNDING = 1e-15
# More where they are cheap, and where a few bad sketches make most of the error.
SEEDS = {"Hutchinson": 300}


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", LEVELS)
def test_errors_are_those_of_the_literature_and_reported_honestly(name):
    with jax.enable_x64(True):
        operators = {s: (rotated(s, N, jnp.float64), f(N).sum()) for s, f in SPECTRA.items()}
        found = {}
        for m in BUDGETS:
            method, seeds = getattr(estimators, name)(), SEEDS.get(name, 100)
            for spectrum, errors in errors_of(method, operators, m, seeds).items():
                found[spectrum, m] = errors
    for (spectrum, m), errors in found.items():
        level = LEVELS[name][spectrum][BUDGETS.index(m)]
        assert errors.median <= 1.3 * max(level, ROUNDING), (spectrum, m, errors)
        assert 0.8 <= errors.ratio <= 1.5, (spectrum, m, errors)
        # Of one cell, 100 seeds know the share only to 2 or 3%; of all of them, they know it well.
        assert errors.inside >= 0.85, (spectrum, m, errors)
        if level > ROUNDING:
            assert abs(errors.bias) < 4.5, (spectrum, m, errors)
    assert np.mean([errors.inside for errors in found.values()]) >= 0.93
