"""Transformed functions keep the signature of what they wrap."""

from typing import assert_type

import jax
import jax.numpy as jnp

import vernal

x = jnp.ones(3)


@vernal.filter_jit
def scale(x: jax.Array, factor: float = 2.0, *, name: str = "") -> jax.Array:
    return x * factor


assert_type(scale(x), jax.Array)
assert_type(scale(x, 3.0, name="three"), jax.Array)
scale("x")  # error: reportArgumentType | arg-type
scale()  # error: reportCallIssue | call-arg
scale(x, colour="red")  # error: reportCallIssue | call-arg


@vernal.filter_jit(donate="all")
def pair(x: jax.Array, name: str) -> tuple[jax.Array, str]:
    return x, name


assert_type(pair(x, "x"), tuple[jax.Array, str])
pair(x, 1)  # error: reportArgumentType | arg-type


# On methods `self` is bound.
class Model(vernal.Module):
    weight: jax.Array

    @vernal.filter_jit
    def apply(self, x: jax.Array) -> jax.Array:
        return self.weight * x

    @vernal.filter_jit
    def __call__(self, x: jax.Array, times: int) -> jax.Array:
        return self.weight * x * times


model = Model(x)
assert_type(model.apply(x), jax.Array)
assert_type(model(x, 2), jax.Array)
model.apply()  # error: reportCallIssue | call-arg
model.apply("x")  # error: reportArgumentType | arg-type
model(x, "two")  # error: reportArgumentType | arg-type


# A gradient has the type of the first argument, and takes the arguments of the function.
def loss(model: Model, x: jax.Array) -> jax.Array:
    return jnp.sum(model.apply(x))


assert_type(vernal.filter_grad(loss)(model, x), Model)
assert_type(vernal.filter_value_and_grad(loss)(model, x), tuple[jax.Array, Model])
vernal.filter_grad(loss)(model, "x")  # error: reportArgumentType | arg-type
vernal.filter_grad(loss)(model)  # error: reportCallIssue | call-arg


@vernal.filter_value_and_grad
def decorated(model: Model, x: jax.Array) -> jax.Array:
    return jnp.sum(model.apply(x))


value, gradient = decorated(model, x)
assert_type(value, jax.Array)
assert_type(gradient, Model)


# The other transformations keep it too.
def double(x: jax.Array) -> jax.Array:
    return 2 * x


assert_type(vernal.filter_vmap(double)(x), jax.Array)
vernal.filter_vmap(double)(x, x)  # error: reportCallIssue | call-arg
assert_type(vernal.filter_checkpoint(double)(x), jax.Array)
vernal.filter_checkpoint(double)("x")  # error: reportArgumentType | arg-type
