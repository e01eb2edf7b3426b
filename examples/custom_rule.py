"""Learns how much the air brakes a falling ball, and which wind blows, from where the ball was seen.

    python examples/custom_rule.py [--steps 300] [--seed 0]

The air brakes with the square of the speed, so the length of a vector is needed in every time step. At the first one
the ball is at rest and no wind is known: the vector is zero, and the derivative of its length is 0/0. One NaN there
spoils the gradient. The mathematics is harmless, since the length is multiplied by the vector; a rule of our own for
the derivative says so, and works inside a scan in a module like any other function.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import vernal
from vernal.transforms import filter_custom_jvp

DT, COUNT = 0.05, 100
GRAVITY = jnp.array([0.0, -9.81])


def plain_length(vector):
    return jnp.sqrt(jnp.sum(vector**2))


@filter_custom_jvp
def length(vector):
    return plain_length(vector)


# The derivative of the length is the component along the vector, and 0 where there is no direction.
@length.def_jvp
def length_rule(primals, tangents):
    (vector,), (vector_dot,) = primals, tangents
    out = length(vector)
    return out, jnp.sum(vector * vector_dot) / jnp.where(out == 0, 1.0, out)


class Ball(vernal.Module):
    log_drag: jax.Array
    wind: jax.Array
    length: object = length

    def __call__(self, count):
        """Where the ball is after each of `count` time steps, from rest: an array of shape (count, 2)."""

        drag = jnp.exp(self.log_drag)

        def step(state, _):
            position, velocity = state
            air = velocity - jnp.stack([self.wind, 0.0])
            velocity = velocity + DT * (GRAVITY - drag * self.length(air) * air)
            position = position + DT * velocity
            return (position, velocity), position

        at_rest = jnp.zeros(2), jnp.zeros(2)
        return jax.lax.scan(step, at_rest, length=count)[1]


def mean_squared_error(ball, seen):
    return jnp.mean((ball(len(seen)) - seen) ** 2)


@vernal.filter_jit
def train_step(ball, optimizer, state, seen):
    loss, grads = vernal.filter_value_and_grad(mean_squared_error)(ball, seen)
    ball, state = optimizer.update(ball, grads, state)
    return ball, state, loss


def describe(ball):
    return f"log(drag) {ball.log_drag:.2f}, wind {ball.wind:.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    truth = Ball(log_drag=-3.0, wind=4.0)
    noise = 0.01 * jax.random.normal(jax.random.key(args.seed), (COUNT, 2))
    seen = truth(COUNT) + noise

    ball = Ball(log_drag=-5.0, wind=0.0)
    without = vernal.tree_at(lambda ball: ball.length, ball, plain_length)
    for name, model in [("without the rule", without), ("with the rule", ball)]:
        grads = vernal.filter_grad(mean_squared_error)(model, seen)
        print(f"first gradient {name}: {describe(grads)}")

    optimizer = vernal.Optimizer(
        optax.adam, learning_rate=optax.cosine_decay_schedule(0.1, args.steps)
    )
    state = optimizer.init(ball)
    for step in range(args.steps):
        ball, state, loss = train_step(ball, optimizer, state, seen)
        if (step + 1) % max(1, args.steps // 5) == 0:
            print(f"step {step + 1}: mean squared error {loss:.5f} m²")

    print(f"learnt: {describe(ball)}")
    print(f"truth:  {describe(truth)}")


if __name__ == "__main__":
    main()
