"""The guards and primitives of `equinox.internal`."""

import jax
import jax.extend
import jax.interpreters.ad
import jax.interpreters.mlir
import jax.numpy as jnp
import numpy as np

from .registry import calls

ONE = jnp.ones(2)


@calls("internal.unvmap_all", "internal.unvmap_any", "internal.unvmap_max")
def unvmap(name, eqx):
    mixed = jnp.array([True, False])
    yield name, mixed
    yield name, jnp.array([[1, 5], [3, 2]])
    yield name, ONE
    yield name, True
    yield name, 3
    yield name, 2.5
    yield name, np.array([1.0, 2.0])
    yield lambda: jax.vmap(name, out_axes=None)(mixed)
    yield lambda: jax.jit(jax.vmap(name, out_axes=None))(jnp.array([1, 7]))
    yield lambda: name(x=mixed)
    yield name, "text"
    yield name, jnp.zeros((0,), bool)
    yield lambda: jax.grad(lambda x: name(x).astype(float))(1.0)


@calls("internal.unvmap_all_p", "internal.unvmap_any_p", "internal.unvmap_max_p")
def unvmap_primitives(name, eqx):
    yield lambda: name.bind(jnp.array([True, False]))
    yield lambda: name.bind(jnp.array([1, 2]))
    yield lambda: jax.vmap(name.bind, out_axes=None)(jnp.array([1, 2]))
    yield lambda: name.multiple_results


@calls("internal.nonbatchable")
def nonbatchable(name, eqx):
    yield name, ONE
    yield name, (ONE, "text")
    yield lambda: jax.vmap(name)(ONE)
    yield lambda: jax.vmap(lambda x: name(1.0) + x)(ONE)
    yield lambda: jax.vmap(lambda x: name(x, allow_constant_across_batch=True))(ONE)
    yield lambda: jax.vmap(lambda x: name(x, allow_constant_across_batch=True))(jnp.arange(2.0))
    yield lambda: jax.grad(name)(1.0)
    yield lambda: name(ONE, name="it", msg="text")
    yield lambda: name(x=ONE)
    yield lambda: jax.jit(name)(ONE)


@calls("internal.nondifferentiable")
def nondifferentiable(name, eqx):
    yield name, ONE
    yield name, (ONE, "text", 1.0)
    yield lambda: jax.grad(name)(1.0)
    yield lambda: jax.jvp(name, (1.0,), (1.0,))
    yield lambda: jax.grad(lambda x: name(1.0) * x)(2.0)
    yield lambda: jax.vmap(name)(ONE)
    yield lambda: name(ONE, name="it")
    yield lambda: name(x=ONE, msg="text")
    yield lambda: name(ONE, "it")
    yield lambda: jax.jit(name)(1.0)


@calls("internal.nondifferentiable_backward")
def nondifferentiable_backward(name, eqx):
    yield name, ONE
    yield name, (ONE, "text", 1.0)
    yield lambda: jax.grad(name)(1.0)
    yield lambda: jax.jvp(name, (1.0,), (1.0,))
    yield lambda: jax.grad(lambda x: name(x, symbolic=False))(1.0)
    yield lambda: jax.grad(lambda x: 0 * name(x, symbolic=False))(1.0)
    yield lambda: jax.vmap(name)(ONE)
    yield lambda: name(ONE, "it", "text", True)
    yield lambda: name(x=ONE, name="it", msg="text")


@calls("internal.nontraceable")
def nontraceable(name, eqx):
    yield name, ONE
    yield name, (ONE, "text")
    yield lambda: jax.jit(name)(ONE)
    yield lambda: jax.vmap(name)(ONE)
    yield lambda: jax.grad(name)(1.0)
    yield lambda: name(x=ONE, name="it")
    yield lambda: name(1.0)


@calls(
    *(
        "internal.nonbatchable_p",
        "internal.nondifferentiable_backward_p",
        "internal.nontraceable_p",
    ),
    *(
        "internal.select_if_vmap_p",
        "internal.noinline_p",
        "internal.announce_jaxpr_p",
        "internal.maybe_set_p",
    ),
)
def primitives(name, eqx):
    yield lambda: isinstance(name, jax.extend.core.Primitive)
    yield lambda: name.multiple_results
    yield lambda: name.bind()


@calls("internal.select_if_vmap_p")
def select_if_vmap(name, eqx):
    def select(pred, x, y):
        return name.bind(pred, x, y, makes_false_steps=True)

    yield lambda: select(jnp.array(True), 2 * ONE, ONE)
    yield lambda: jax.vmap(select)(jnp.array([True, False]), 2 * ONE, ONE)


@calls("internal.nextafter", "internal.prevbefore")
def neighbours(name, eqx):
    for x in (1.0, 0.0, -1.0, jnp.inf, jnp.nan, 1, jnp.array([1.0, 2.0]), np.float32(1), "text"):
        yield lambda x=x: jnp.asarray(name(x)) - jnp.asarray(x)
        yield name, x
    yield lambda: name(jnp.array(1.0, "bfloat16"))
    yield lambda: name(0.0) == 0
    yield lambda: jax.grad(name)(1.0)
    yield lambda: jax.vmap(name)(ONE)
    yield lambda: name(x=1.0)


@calls("internal.materialise_zeros")
def materialise_zeros(name, eqx):
    yield name, ONE, None
    yield name, ONE, ONE
    yield name, 1, None
    yield name, jnp.ones(2, int), None
    yield name, "text", None
    yield name, jax.ShapeDtypeStruct((2,), "float32"), None
    yield lambda: name(jax.ShapeDtypeStruct((2,), "float32"), None, allow_struct=True)
    yield lambda: name(primal=1.0, tangent=None)


@calls(
    *(
        "internal.filter_primitive_bind",
        "internal.filter_primitive_def",
        "internal.filter_primitive_jvp",
    ),
    *("internal.filter_primitive_transpose", "internal.filter_primitive_batching"),
)
def filter_primitives(name, eqx):
    eqxi = eqx.internal

    def scaled():
        prim = jax.extend.core.Primitive("scaled")
        prim.multiple_results = True

        @eqxi.filter_primitive_def
        def impl(x, how, scale):
            return scale * x["a"] if how == "times" else x["a"]

        @eqxi.filter_primitive_def
        def abstract(x, how, scale):
            return x["a"]

        @eqxi.filter_primitive_jvp
        def jvp(primals, tangents):
            x, how, scale = primals
            return (
                eqxi.filter_primitive_bind(prim, *primals),
                eqxi.filter_primitive_bind(prim, {"a": tangents[0]["a"]}, how, scale),
            )

        @eqxi.filter_primitive_transpose
        def transpose(inputs, ct):
            x, how, scale = inputs
            return {"a": scale * ct if how == "times" else ct}, None, None

        prim.def_impl(impl)
        prim.def_abstract_eval(abstract)
        jax.interpreters.ad.primitive_jvps[prim] = jvp
        jax.interpreters.ad.primitive_transposes[prim] = transpose
        jax.interpreters.mlir.register_lowering(
            prim, jax.interpreters.mlir.lower_fun(impl, multiple_results=True)
        )
        return lambda x, how="times": eqxi.filter_primitive_bind(prim, {"a": x}, how, 3.0)

    two = jnp.array(2.0)
    yield lambda: scaled()(two)
    yield lambda: scaled()(two, "other")
    yield lambda: jax.jit(scaled())(two)
    yield lambda: jax.jvp(scaled(), (two,), (two,))
    yield lambda: jax.grad(scaled())(two)


@calls("internal.filter_primitive_bind")
def filter_primitive_bind(name, eqx):
    yield name
    yield name, 1


@calls(
    "internal.filter_primitive_def",
    "internal.filter_primitive_jvp",
    "internal.filter_primitive_batching",
)
def filter_primitive_rules(name, eqx):
    yield lambda: callable(name(lambda *args: args))
    yield lambda: callable(name(rule=lambda *args: args))
    yield name


@calls("internal.filter_primitive_transpose")
def filter_primitive_transpose(name, eqx):
    yield lambda: callable(name(lambda *args: args))
    yield lambda: callable(name(materialise_zeros=True)(lambda *args: args))


@calls("internal.create_vprim")
def create_vprim(name, eqx):
    def prim():
        return name(
            "doubled",
            lambda x: [2 * x],
            lambda x: [x],
            lambda primals, tangents: (p := prim_, p.bind(*primals), p.bind(*tangents))[1:],
            lambda cts, x: [2 * cts[0]],
        )

    prim_ = None
    yield lambda: prim().bind(ONE)
    yield lambda: jax.jit(prim().bind)(ONE)
    yield lambda: jax.vmap(prim().bind)(ONE)
    yield lambda: prim().multiple_results
    yield lambda: prim().name
    yield name, "doubled"


@calls("internal.register_impl_finalisation", "internal.primitive_finalisations")
def finalisations(name, eqx):
    eqxi = eqx.internal
    registered = eqxi.register_impl_finalisation

    def count():
        prim = jax.extend.core.Primitive("anything")
        registered(prim)
        return prim in eqxi.primitive_finalisations

    yield count
    yield lambda: isinstance(eqxi.primitive_finalisations, dict)
    yield lambda: eqxi.unvmap_any_p in eqxi.primitive_finalisations


@calls("internal.finalise_fn")
def finalise_fn(name, eqx):
    def checked(x):
        return eqx.internal.nonbatchable(x) + eqx.internal.unvmap_max(x)

    yield lambda: name(checked)(ONE)
    yield lambda: len(jax.make_jaxpr(name(checked))(ONE).jaxpr.eqns)
    yield lambda: name(fn=checked)(ONE)
    yield lambda: name(lambda x: jax.lax.stop_gradient(jnp.sin(x)))(ONE)
    yield lambda: name(1)


@calls(
    *("internal.finalise_jaxpr", "internal.finalise_jaxpr_as_fn"),
    *("internal.finalise_eval_jaxpr", "internal.finalise_make_jaxpr"),
)
def finalise_jaxprs(name, eqx):
    eqxi = eqx.internal

    def checked(x):
        return eqxi.unvmap_max(x) + x

    closed = jax.make_jaxpr(checked)(ONE)

    def primitives(closed):
        return sorted({str(equation.primitive) for equation in closed.jaxpr.eqns})

    yield lambda: primitives(eqxi.finalise_jaxpr(closed))
    yield lambda: eqxi.finalise_jaxpr_as_fn(closed)(ONE)
    yield lambda: eqxi.finalise_eval_jaxpr(closed.jaxpr, closed.consts, ONE)
    yield lambda: primitives(eqxi.finalise_make_jaxpr(checked)(ONE))
    yield lambda: eqxi.finalise_make_jaxpr(checked, return_shape=True)(ONE)[1]
    yield name, 1
