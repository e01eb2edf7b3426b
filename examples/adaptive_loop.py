"""Learns how stiff an oscillator is from where it was seen, through an adaptive ODE solver.

    python examples/adaptive_loop.py [--time 10.0] [--tolerance 1e-5]

The solver chooses its steps so that the error of each is within a tolerance (the pair of formulas of Bogacki and
Shampine, 1989, doi:10.1016/0893-9659(89)90079-7). How many it takes depends on the values, so it is a while loop. A
checkpointed one is differentiated in reverse and in forward mode, with a few states in memory. The accepted steps are
written to a buffer, which is never copied, and a meter shows how far the compiled loop is.
"""

import argparse

import jax
import jax.numpy as jnp

import vernal
from vernal.loops import while_loop
from vernal.runtime import NoProgressMeter, TextProgressMeter

MAX_STEPS = 1000


class VanDerPol(vernal.Module):
    """x'' = stiffness (1 - x^2) x' - x, as a system of first order."""

    stiffness: jax.Array

    def __call__(self, y):
        x, v = y
        return jnp.stack([v, self.stiffness * (1 - x**2) * v - x])


class Solution(vernal.Module):
    """Where the solver is, and how it got there."""

    t: jax.Array
    y: jax.Array
    step_size: jax.Array
    accepted: jax.Array
    rejected: jax.Array
    ts: jax.Array
    ys: jax.Array


def bogacki_shampine(field, y, h):
    """A step of third order, and an estimate of its error."""
    k1 = field(y)
    k2 = field(y + h * k1 / 2)
    k3 = field(y + h * 3 * k2 / 4)
    new = y + h * (2 * k1 + 3 * k2 + 4 * k3) / 9
    k4 = field(new)
    return new, h * (-5 * k1 / 72 + k2 / 12 + k3 / 9 - k4 / 8)


def solve(field, y0, t1, tolerance, meter=NoProgressMeter()):  # noqa: B008 (it is immutable)
    """Integrates `field` from `y0` at time 0 to time `t1`."""

    def body(carry):
        now, progress = carry
        h = jnp.minimum(now.step_size, t1 - now.t)
        new, error = bogacki_shampine(field, now.y, h)
        scale = tolerance * (1 + jnp.maximum(jnp.abs(now.y), jnp.abs(new)))
        # How the steps are chosen is not differentiated: the solution hardly depends on it.
        norm = jax.lax.stop_gradient(jnp.sqrt(jnp.mean((error / scale) ** 2)))
        accept = norm <= 1
        factor = jnp.clip(0.9 * jnp.maximum(norm, 1e-6) ** (-1 / 3), 0.2, 5.0)
        t = jnp.where(accept, now.t + h, now.t)
        y = jnp.where(accept, new, now.y)
        solution = Solution(
            t=t,
            y=y,
            step_size=h * factor,
            accepted=now.accepted + accept,
            rejected=now.rejected + ~accept,
            ts=now.ts.at[now.accepted].set(t, pred=accept),
            ys=now.ys.at[now.accepted].set(y, pred=accept),
        )
        return solution, meter.step(progress, t / t1)

    start = Solution(
        t=jnp.zeros(()),
        y=y0,
        step_size=jnp.array(0.01),
        accepted=jnp.array(0),
        rejected=jnp.array(0),
        ts=jnp.full(MAX_STEPS, jnp.inf),
        ys=jnp.zeros((MAX_STEPS, 2)),
    )
    end, progress = while_loop(
        lambda carry: carry[0].t < t1,
        body,
        (start, meter.init()),
        max_steps=MAX_STEPS,
        kind="checkpointed",
        buffers=lambda carry: (carry[0].ts, carry[0].ys),
    )
    meter.close(progress)
    return end


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time", type=float, default=10.0)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    args = parser.parse_args()
    y0, t1 = jnp.array([2.0, 0.0]), args.time

    def end(field):
        return solve(field, y0, t1, args.tolerance).y

    @jax.jit
    def gauss_newton(field, seen):
        """A better stiffness, from the derivative of both coordinates in forward mode."""
        y, slope = jax.jvp(end, (field,), (VanDerPol(jnp.ones(())),))
        better = field.stiffness - slope @ (y - seen) / (slope @ slope)
        return VanDerPol(better), 2 * slope @ (y - seen)

    truth = VanDerPol(jnp.array(2.0))
    meter = TextProgressMeter(minimum_increase=0.25)
    path = jax.jit(lambda field: solve(field, y0, t1, args.tolerance, meter))(truth)
    jax.effects_barrier()
    print(f"{path.accepted} steps of {jnp.diff(path.ts[: path.accepted]).min():.4f} or more")
    seen = path.y

    field = VanDerPol(jnp.array(1.7))
    loss = jax.jit(jax.value_and_grad(lambda field: jnp.sum((end(field) - seen) ** 2)))
    for _ in range(6):
        error, gradient = loss(field)
        better, forward = gauss_newton(field, seen)
        print(
            f"stiffness {field.stiffness:.4f}: squared error {error:.1e}, "
            f"gradient {gradient.stiffness:.4f} in reverse mode, {forward:.4f} in forward mode"
        )
        field = better
    print(f"learnt: stiffness {field.stiffness:.4f}")
    print(f"truth:  stiffness {truth.stiffness:.4f}")


if __name__ == "__main__":
    main()
