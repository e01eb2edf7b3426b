"""Derivatives, and rules of one's own for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from .registry import calls

ONE = jnp.ones(2)


def square(x):
    return jnp.sum(x**2)


def with_aux(x):
    return square(x), "aux"


def of_tree(tree, n=2.0):
    return n * jnp.sum(tree["x"] ** 2)


TREE = {"x": ONE, "n": 2, "f": jnp.tanh, "i": jnp.ones(2, int), "float": 1.0, "none": None}


@calls("filter_grad", "filter_value_and_grad")
def gradients(name, eqx):
    yield lambda: name(square)(ONE)
    yield lambda: name(square)(jnp.array(2.0))
    yield lambda: name(square)(np.ones(2, "float32"))
    yield lambda: name(square)(2.0)
    yield lambda: name(of_tree)(TREE)
    yield lambda: name(of_tree)({"x": ONE}, 3.0)
    yield lambda: name(of_tree)({"x": ONE}, n=3.0)
    yield lambda: name(lambda t: jnp.sum(t[0]))([ONE, ONE])
    yield lambda: name(lambda x: x["a"] * x["a"])({"a": jnp.array(2.0, "bfloat16")})
    yield lambda: name(with_aux, has_aux=True)(ONE)
    yield lambda: name(has_aux=True)(with_aux)(ONE)
    yield lambda: name(with_aux)(ONE)
    yield lambda: name(square, has_aux=True)(ONE)
    yield lambda: name(lambda x: x)(ONE)
    yield lambda: name(lambda x: "text")(ONE)
    yield lambda: name(lambda x: 1.0)(ONE)
    yield lambda: name(lambda x: 1)(ONE)
    yield lambda: name(lambda x: jnp.array(1))(ONE)
    yield lambda: name(lambda x: x * 1j)(jnp.array(1.0))
    yield lambda: name(lambda x: jnp.real(x * x), holomorphic=False)(jnp.array(1 + 1j))
    yield lambda: name(lambda x: x * x, holomorphic=True)(jnp.array(1 + 1j))
    yield lambda: name(square, argnums=0)(ONE)
    yield lambda: name(square, wrong=1)(ONE)
    yield lambda: name(of_tree)(n=2.0)
    yield lambda: name(of_tree)(tree={"x": ONE})
    yield lambda: name(square)()
    yield lambda: name(fun=square)(ONE)
    yield lambda: name(square).__name__
    yield lambda: name(lambda x: 1 / 0)(ONE)
    yield lambda: eqx.filter_jit(name(square))(ONE)
    yield lambda: jax.vmap(name(square))(jnp.ones((3, 2)))
    yield lambda: name(lambda m: m(-1.0))(eqx.nn.PReLU())

    class Model(eqx.Module):
        weight: jax.Array

        @name
        def loss(self, x):
            return jnp.sum(self.weight * x)

    yield lambda: Model(ONE).loss(ONE)


@calls("filter_jvp")
def filter_jvp(name, eqx):
    yield lambda: name(square, (ONE,), (ONE,))
    yield lambda: name(square, [ONE], [ONE])
    yield lambda: name(square, (ONE,), (None,))
    yield lambda: name(
        of_tree, (TREE,), ({**TREE, "n": None, "f": None, "i": None, "float": None},)
    )
    yield lambda: name(lambda x, y: (x * y, x, "text"), (2.0, 3.0), (1.0, None))
    yield lambda: name(lambda x, y: x * y, (2.0, 3), (1.0, None))
    yield lambda: name(lambda x, y: (x * y, y), (ONE, ONE), (ONE, None))
    yield lambda: name(of_tree, ({"x": ONE},), ({"x": ONE},), n=3.0)
    yield lambda: name(square, (ONE,), (jnp.ones(3),))
    yield lambda: name(square, (ONE,), (jnp.ones(2, int),))
    yield lambda: name(square, (ONE,), (ONE, ONE))
    yield lambda: name(square, (ONE,), ("text",))
    yield lambda: name(square, ONE, ONE)
    yield lambda: name(lambda i: i * 2.0, (jnp.array(1),), (None,))
    yield lambda: name(lambda i: i * 2.0, (jnp.array(1),), (1.0,))
    yield lambda: name(fn=square, primals=(ONE,), tangents=(ONE,))
    yield lambda: name(lambda x: 1.0, (ONE,), (ONE,))
    yield lambda: jax.jit(lambda x: name(square, (x,), (x,)))(ONE)


@calls("filter_vjp")
def filter_vjp(name, eqx):
    def both(fn, *primals, cotangent=None, **options):
        out, pull, *aux = name(fn, *primals, **options)
        return out, pull(jax.tree.map(jnp.ones_like, out) if cotangent is None else cotangent), aux

    yield both, square, ONE
    yield both, square, 2.0
    yield both, of_tree, TREE
    yield both, lambda x, y: x * y, ONE, 2.0
    yield both, lambda x, y: (x * y, x + y), ONE, ONE
    yield lambda: both(with_aux, ONE, has_aux=True)
    yield lambda: both(square, ONE, cotangent=jnp.ones(3))
    yield lambda: both(square, ONE, cotangent=(1.0,))
    yield lambda: both(lambda x: (x, "text", 1), ONE, cotangent=(ONE, None, None))
    yield lambda: name(square)
    yield lambda: name(fun=square)
    yield lambda: name(square, ONE, wrong=1)


@calls("filter_jacfwd", "filter_jacrev", "filter_hessian")
def jacobians(name, eqx):
    yield lambda: name(square)(ONE)
    yield lambda: name(lambda x: x**2)(ONE)
    yield lambda: name(lambda x: jnp.sum(x**3))(jnp.array(2.0))
    yield lambda: name(of_tree)(TREE)
    yield lambda: name(of_tree)({"x": ONE}, 3.0)
    yield lambda: name(of_tree)({"x": ONE}, n=3.0)
    yield lambda: name(lambda x: (square(x), x))(ONE)
    yield lambda: name(with_aux, has_aux=True)(ONE)
    yield lambda: name(with_aux, True)(ONE)
    yield lambda: name(square)(2.0)
    yield lambda: name(lambda x: "text")(ONE)
    yield lambda: name(lambda x: (x, 3))(ONE)
    yield lambda: name(lambda x: {"y": 2 * x, "n": True})(ONE)
    yield lambda: name(square)(jnp.ones(2, int))
    yield lambda: name(of_tree)(tree={"x": ONE})
    yield lambda: name(square)()
    yield lambda: name(fun=square)(ONE)
    yield lambda: name(square, wrong=1)
    yield lambda: name(square).__name__


@calls("filter_custom_jvp")
def filter_custom_jvp(name, eqx):
    def product():
        @name
        def fn(x, y, *, scale=1.0):
            return scale * x * y

        seen = []

        def rule(primals, tangents, *, scale=1.0):
            (x, y), (x_dot, y_dot) = primals, tangents
            seen.append([x_dot is None, y_dot is None])
            parts = [5 * y * x_dot] if x_dot is not None else []
            parts += [7 * x * y_dot] if y_dot is not None else []
            return scale * x * y, sum(parts[1:], parts[0]) if parts else None

        fn.def_jvp(rule)
        return fn, seen

    two, three = jnp.array(2.0), jnp.array(3.0)
    yield lambda: product()[0](two, three)
    yield lambda: product()[0](2.0, 3)
    yield lambda: product()[0](two, three, scale=2.0)
    yield lambda: jax.grad(product()[0])(two, three)
    yield lambda: jax.grad(product()[0])(2.0, 3.0)
    yield lambda: jax.jvp(product()[0], (two, three), (two, three))
    yield lambda: jax.grad(product()[0])(two, 3.0)
    yield lambda: jax.vmap(jax.grad(product()[0]))(ONE, ONE)

    def seen_by(fn_of, *args):
        fn, seen = product()
        fn_of(fn)(*args)
        return seen[-1:]

    yield seen_by, jax.grad, two, three
    yield seen_by, lambda fn: functools.partial(eqx.filter_jvp, fn), (two, 3), (two, None)
    yield lambda: jax.grad(lambda s: product()[0](two, three, scale=s))(two)
    yield lambda: name(lambda x: x)(two)
    yield lambda: name(lambda x: x).def_jvp(lambda primals, tangents: (primals, tangents))
    yield lambda: name(fn=lambda x: x).def_jvp(fn_jvp=lambda primals, tangents: (primals, tangents))
    yield lambda: name(lambda x: x).defjvp(lambda primals, tangents: (primals, tangents))
    yield lambda: name(lambda x: x).defjvps(None)
    yield name
    yield name, 1

    def wrong():
        fn = name(lambda x: x)
        fn.def_jvp(lambda primals, tangents: primals[0])
        return jax.grad(fn)(two)

    def tangent_of_another_shape():
        fn = name(lambda x: x)
        fn.def_jvp(lambda primals, tangents: (primals[0], jnp.ones(3)))
        return jax.grad(fn)(two)

    yield wrong
    yield tangent_of_another_shape


@calls("filter_custom_vjp")
def filter_custom_vjp(name, eqx):
    def product(seen):
        @name
        def fn(x, y, *, scale=1.0):
            return scale * x["a"] * y, "text"

        @fn.def_fwd
        def fwd(perturbed, x, y, *, scale=1.0):
            seen.append(perturbed)
            return (scale * x["a"] * y, "text"), (y, "kept")

        @fn.def_bwd
        def bwd(residuals, gradient, perturbed, x, y, *, scale=1.0):
            seen.append(gradient[1])
            return {"a": 5 * residuals[0] * gradient[0], "b": None}

        seen.append(fwd is None)
        return fn

    two, three = jnp.array(2.0), jnp.array(3.0)
    tree = {"a": two, "b": 1}

    def gradient(y, **kwargs):
        seen = []
        fn = product(seen)
        out = jax.grad(lambda a: fn({"a": a, "b": 1}, y, **kwargs)[0])(two)
        return out, seen

    yield lambda: product([])(tree, three)
    yield lambda: product([])({"a": 2.0, "b": 1}, 3.0)
    yield gradient, three
    yield gradient, 3.0
    yield lambda: gradient(three, scale=2.0)
    yield lambda: jax.grad(lambda y: product([])(tree, y)[0])(three)
    yield lambda: jax.jvp(lambda a: product([])({"a": a, "b": 1}, three)[0], (two,), (two,))
    yield lambda: jax.vmap(lambda y: gradient(y)[0])(ONE)
    yield lambda: name(lambda x: x)(two)
    yield lambda: jax.grad(name(lambda x: x))(two)
    yield lambda: name(lambda x: x).defvjp(lambda p, x: (x, None), lambda r, g, p, x: g)
    yield lambda: name(lambda x: x).def_fwd(fn_fwd=lambda p, x: (x, None))
    yield lambda: name(lambda x: x).def_bwd(fn_bwd=lambda r, g, p, x: g)
    yield name
    yield name, 1

    def wrong_structure():
        fn = name(lambda x: x)
        fn.def_fwd(lambda perturbed, x: (x, None))
        fn.def_bwd(lambda residuals, gradient, perturbed, x: (gradient, gradient))
        return jax.grad(fn)(two)

    def only_forward():
        fn = name(lambda x: x)
        fn.def_fwd(lambda perturbed, x: (x, None))
        return jax.grad(fn)(two)

    def of_a_number():
        fn = name(lambda x: 3 * x)
        fn.def_fwd(lambda perturbed, x: (3 * x, None))
        fn.def_bwd(lambda residuals, gradient, perturbed, x: 3 * gradient)
        return jax.grad(fn)(1.0)

    yield wrong_structure
    yield only_forward
    yield of_a_number
