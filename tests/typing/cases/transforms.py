"""Transformed functions keep the signature of what they wrap."""

from typing import assert_type

import jax
import jax.numpy as jnp

import vernal

x = jnp.ones(3)

# What a room offers to other rooms alone.
hidden = vernal.transforms.poison  # error: - | attr-defined


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


# So do custom rules, and a rule stays what it is.
@vernal.filter_custom_jvp
def sine(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@sine.def_jvp
def sine_rule(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return sine(primals[0]), jnp.cos(primals[0]) * tangents[0]


assert_type(sine(x), jax.Array)
assert_type(sine_rule((x,), (x,)), tuple[jax.Array, jax.Array])
sine("x")  # error: reportArgumentType | arg-type


@vernal.filter_custom_vjp
def identity(x: jax.Array, name: str) -> jax.Array:
    return x


assert_type(identity(x, "name"), jax.Array)
identity(x)  # error: reportCallIssue | call-arg


# Checks and loops return what they are given.
assert_type(vernal.error_if(x, x < 0, "negative"), jax.Array)
vernal.error_if(x, x < 0, "negative", on_error="explode")  # error: reportArgumentType | arg-type
carry = (x, 0)
assert_type(
    vernal.loops.while_loop(lambda c: c[1] < 3, lambda c: (c[0] + 1, c[1] + 1), carry),
    tuple[jax.Array, int],
)
