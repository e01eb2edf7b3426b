"""Compiling, mapping, tracing."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np

from .registry import Counted, calls


def plus(x, y=1.0, *, scale=1.0):
    return scale * (x + y)


def strange(x, what=None):
    return x, "text", what, 2.0, jnp.tanh, None


class Unhashable:
    __hash__ = None


def traces(transform, *arguments):
    """How often a function is traced for these calls."""
    counted = Counted(plus)
    fn = transform(counted)
    for args, kwargs in arguments:
        fn(*args, **kwargs)
    return counted.count


ONE = jnp.ones(2)


@calls("filter_jit")
def filter_jit(name, eqx):
    yield lambda: name(plus)(ONE)
    yield lambda: name(plus)(1.0)
    yield lambda: name(plus)(1, 2)
    yield lambda: name(plus)(jnp.array(1.0), 2)
    yield lambda: name(plus)(np.ones(2), 2.0)
    yield lambda: name(plus)(np.float64(1), scale=2)
    yield lambda: name(strange)(np.ones(2), "a")
    yield lambda: name(strange)(x=1.0)
    yield lambda: name(lambda: jnp.array(2.0))()
    yield lambda: name(lambda x: x)(jnp.array(2.0))
    yield lambda: name(lambda x: (x, np.ones(2), 1, [x]))(ONE)
    yield lambda: name(donate="all")(plus)(jnp.ones(2))
    yield lambda: name(plus, donate="all-except-first")(jnp.ones(2))
    yield lambda: name(plus, donate="warn")(jnp.ones(2))
    yield lambda: name(plus, donate="wrong")(ONE)
    yield lambda: name(plus, static_argnums=0)(ONE)
    yield lambda: name(plus, static_argnames="y")(ONE)
    yield lambda: name(plus, donate_argnums=0)(ONE)
    yield lambda: name(plus, wrong=1)(ONE)
    yield lambda: name(plus, inline=True)(ONE)
    yield lambda: name(plus)(ONE, wrong=1)
    yield lambda: name(plus)()
    yield lambda: name(plus)(Unhashable())
    yield lambda: name(lambda x: 1 / 0)(ONE)
    yield lambda: name(lambda x: bool(x))(jnp.array(True))
    yield lambda: name(lambda x: jnp.ones(x))(jnp.array(2))
    yield lambda: name(1)
    yield lambda: name(fun=plus)(ONE)
    yield lambda: name(plus).__name__
    yield lambda: name(plus).__wrapped__ is plus
    yield lambda: name(eqx.nn.PReLU())(-ONE)
    yield lambda: name(functools.partial(plus, scale=3.0))(ONE)
    yield lambda: jax.vmap(name(plus))(ONE)
    yield lambda: jax.grad(name(plus))(1.0)
    yield lambda: len(name(plus).lower(ONE).as_text()) > 10
    yield lambda: name(plus).lower(ONE).compile()(ONE)
    yield lambda: name(plus).lower(jax.ShapeDtypeStruct((2,), "float32")).compile()(ONE)
    yield lambda: pickle.loads(pickle.dumps(name(plus)))(ONE)
    for arguments in (
        [((ONE,), {}), ((2 * ONE,), {})],
        [((1.0,), {}), ((2.0,), {})],
        [((1.0,), {}), ((1,), {})],
        [((ONE,), {}), ((), {"x": ONE})],
        [((ONE,), {}), ((ONE, 1.0), {})],
        [((ONE,), {}), ((jnp.ones(3),), {})],
        [((ONE,), {}), ((jnp.ones(2, int),), {})],
        [((ONE,), {}), ((np.ones(2, "float32"),), {})],
        [((jnp.array(1.0),), {}), ((jnp.array(1.0, jnp.float32),), {})],
        [((np.float32(1),), {}), ((jnp.array(1.0, jnp.float32),), {})],
        [((True,), {}), ((1,), {})],
    ):
        yield traces, name, *arguments

    class Model(eqx.Module):
        weight: jax.Array
        size: int = eqx.field(static=True, default=1)

        @name
        def method(self, x):
            return self.weight * x

        @name
        def __call__(self, x):
            return self.size * self.weight * x

    yield lambda: Model(ONE).method(ONE)
    yield lambda: Model(ONE, 3)(ONE)
    yield lambda: Model.method(Model(ONE), ONE)
    yield lambda: name(lambda m: m)(Model(ONE, 3))
    yield lambda: eqx.filter_grad(lambda m: m(1.0).sum())(Model(ONE)).weight


@calls("filter_vmap")
def filter_vmap(name, eqx):
    xs = jnp.arange(6.0).reshape(3, 2)
    yield lambda: name(plus)(xs)
    yield lambda: name(plus)(xs, 2.0)
    yield lambda: name(plus)(xs, xs)
    yield lambda: name(plus)(xs, y=xs)
    yield lambda: name(plus, in_axes=(0, None))(xs, jnp.ones(2))
    yield lambda: name(plus, in_axes=1)(xs)
    yield lambda: name(plus, in_axes=-1, out_axes=-1)(xs)
    yield lambda: name(plus, in_axes=None)(xs)
    yield lambda: name(plus, in_axes=None, axis_size=4)(xs)
    yield lambda: name(plus, in_axes={"x": 1})(xs)
    yield lambda: name(plus, in_axes={"y": None})(xs, jnp.ones(2))
    yield lambda: name(plus, in_axes={"wrong": 0})(xs)
    yield lambda: name(plus, in_axes=eqx.if_array(1))(xs)
    yield lambda: name(plus, in_axes=(lambda x: 0, None))(xs, 1.0)
    yield lambda: name(plus, in_axes=(0, 0))(xs, 1.0)
    yield lambda: name(plus, in_axes=(0,))(xs, xs)
    yield lambda: name(plus, in_axes="wrong")(xs)
    yield lambda: name(plus, in_axes=1.0)(xs)
    yield lambda: name(plus, out_axes=1)(xs)
    yield lambda: name(plus, out_axes=None)(xs)
    yield lambda: name(strange)(xs, "a")
    yield lambda: name(strange, out_axes=0)(xs, "a")
    yield lambda: name(lambda x: (x, jnp.ones(2)))(xs)
    yield lambda: name(lambda x: (x, 1.0, np.ones(2)))(xs)
    yield lambda: name(lambda x: (x, 1.0), out_axes=0)(xs)
    yield lambda: name(lambda x: (x, 1.0), out_axes=(0, None))(xs)
    yield lambda: name(lambda: jnp.ones(2), axis_size=3)()
    yield lambda: name(lambda: jnp.ones(2), axis_size=3, out_axes=None)()
    yield lambda: name(lambda: jnp.ones(2))()
    yield lambda: name(plus)(jnp.array(1.0))
    yield lambda: name(plus)(xs, jnp.ones(4))
    yield lambda: name(plus, axis_size=4)(xs)
    yield lambda: name(lambda x: x - jax.lax.pmean(x, "i"), axis_name="i")(xs)
    yield lambda: name(plus, wrong=1)(xs)
    yield lambda: name(axis_size=3)(plus)(xs)
    yield lambda: name(fun=plus)(xs)
    yield lambda: name(plus).__name__
    yield lambda: name(name(plus))(xs)
    yield lambda: name(lambda m, x: m(x))(eqx.nn.PReLU(), xs)
    yield lambda: name(lambda m, x: m(x), in_axes=(None, 0))(eqx.nn.PReLU(), -xs)
    yield (
        lambda: (
            name(lambda key: eqx.nn.Linear(2, 1, key=key))(
                jax.random.split(jax.random.key(0), 3)
            ).weight
        )
    )
    yield lambda: name(lambda x: x)(jax.random.split(jax.random.key(0), 3))
    yield traces, name, ((xs,), {}), ((xs,), {})


@calls("filter_pmap")
def filter_pmap(name, eqx):
    xs = jnp.arange(4.0).reshape(2, 2)
    yield lambda: name(plus)(xs)
    yield lambda: name(plus)(xs, 2.0)
    yield lambda: name(plus, in_axes=(0, None))(xs, jnp.ones(2))
    yield lambda: name(strange)(xs, "a")
    yield lambda: name(lambda x: jax.lax.psum(x, "i"), axis_name="i")(xs)
    yield lambda: name(plus, donate="wrong")(xs)
    yield lambda: name(plus, static_broadcasted_argnums=0)(xs)
    yield lambda: name(plus)(jnp.array(1.0))
    yield lambda: name(plus)(xs, y=xs)
    yield lambda: name(plus, out_axes=None)(xs)
    yield lambda: name(plus).__name__


@calls("filter_eval_shape", "internal.cached_filter_eval_shape")
def filter_eval_shape(name, eqx):
    struct = jax.ShapeDtypeStruct((2,), "float32")
    yield name, plus, ONE
    yield name, plus, struct
    yield name, plus, 1.0
    yield name, plus, ONE, 2
    yield name, plus, jnp.array(1.0)
    yield lambda: name(plus, ONE, scale=2)
    yield name, strange, ONE, "a"
    yield name, lambda: (1, jnp.ones(2), "a", np.ones(2))
    yield lambda: name(lambda key: eqx.nn.Linear(2, 3, key=key), jax.random.key(0)).weight
    yield lambda: name(eqx.nn.PReLU(), struct)
    yield name, plus, jnp.ones(2), jnp.ones(3)
    yield name, plus
    yield name, jnp.zeros, jnp.array(2)
    yield name, lambda x: x.missing, ONE
    yield name, 1, ONE
    yield lambda: name(jnp.sum, jnp.ones(2, int))


@calls("filter_eval_shape")
def filter_eval_shape_by_name(name, eqx):
    yield lambda: name(fun=plus, x=ONE)
    yield lambda: traces(lambda fn: functools.partial(name, fn), ((ONE,), {}), ((ONE,), {})) > 0


@calls("filter_make_jaxpr")
def filter_make_jaxpr(name, eqx):
    def shape(fn, *args, **kwargs):
        closed, struct, static = name(fn)(*args, **kwargs)
        return closed.in_avals[0].shape, struct, static, len(closed.out_avals)

    yield shape, plus, ONE
    yield shape, plus, jax.ShapeDtypeStruct((2,), "float32")
    yield shape, strange, ONE, "a"
    yield lambda: shape(plus, ONE, scale=2.0)
    yield lambda: name(fun=plus)(ONE)[1]
    yield lambda: len(name(lambda: 1)())
    yield lambda: name(plus)()
    yield lambda: name(plus).__name__
    yield lambda: jax.core.eval_jaxpr(name(plus)(ONE)[0].jaxpr, name(plus)(ONE)[0].consts, ONE)


@calls("filter_shard")
def filter_shard(name, eqx):
    device = jax.devices()[1]
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, jax.P("i"))
    yield lambda: name(ONE, split)
    yield lambda: name(ONE, split).sharding == split
    yield lambda: name({"a": ONE, "b": "text", "c": 1.0}, split)
    yield lambda: name([ONE, np.ones(2)], device)
    yield lambda: name(ONE, device).devices() == {device}
    yield lambda: eqx.filter_jit(lambda x: name(x, split))(ONE)
    yield lambda: name(jnp.ones(3), split)
    yield lambda: name(ONE, "wrong")
    yield lambda: name(x=ONE, device_or_shardings=split)
    yield lambda: name({"a": ONE, "b": ONE}, {"a": split, "b": split})
    yield lambda: name(eqx.nn.PReLU(), device)


@calls("filter_pure_callback")
def filter_pure_callback(name, eqx):
    struct = jax.ShapeDtypeStruct((2,), "float32")

    def host(x, what="a"):
        return np.asarray(x) * (2 if what == "a" else 3)

    yield lambda: name(host, ONE, result_shape_dtypes=struct)
    yield lambda: name(host, ONE, "b", result_shape_dtypes=struct)
    yield lambda: name(host, ONE, what="b", result_shape_dtypes=struct)
    yield lambda: jax.jit(lambda x: name(host, x, result_shape_dtypes=struct))(ONE)
    yield lambda: name(lambda x: (np.asarray(x), "s"), ONE, result_shape_dtypes=(struct, "s"))
    yield lambda: name(lambda x: (np.asarray(x), "t"), ONE, result_shape_dtypes=(struct, "s"))
    yield lambda: name(host, jnp.ones(3), result_shape_dtypes=struct)
    yield lambda: name(host, ONE)
    yield lambda: name(host, 1.0, result_shape_dtypes=jax.ShapeDtypeStruct((), "float32"))
    mapped = jax.ShapeDtypeStruct((), "float32")
    for method in ("sequential", "expand_dims", "broadcast_all", None, "wrong"):
        yield lambda method=method: jax.vmap(
            lambda x: name(host, x, result_shape_dtypes=mapped, vmap_method=method)
        )(ONE)
    yield lambda: jax.vmap(lambda x: name(host, x, result_shape_dtypes=mapped, vectorized=True))(
        ONE
    )
    yield lambda: name(callback=host, x=ONE, result_shape_dtypes=struct)


@calls("clear_caches")
def clear_caches(name, eqx):
    yield name
    yield name, 1


@calls("filter_checkpoint")
def filter_checkpoint(name, eqx):
    yield lambda: name(plus)(ONE)
    yield lambda: name(plus)(1.0)
    yield lambda: name(plus)(ONE, scale=2)
    yield lambda: name(strange)(ONE, "a")
    yield lambda: jax.grad(lambda x: name(jnp.sin)(x))(1.0)
    yield lambda: name(prevent_cse=False)(plus)(ONE)
    yield lambda: name(plus, policy=jax.checkpoint_policies.everything_saveable)(ONE)
    yield lambda: name(fun=plus)(ONE)
    yield lambda: name(plus, wrong=1)(ONE)
    yield lambda: name(plus)()
    yield lambda: name(plus).__name__
    yield lambda: eqx.filter_grad(lambda m: name(m)(-ONE).sum())(eqx.nn.PReLU()).negative_slope


@calls("filter_closure_convert")
def filter_closure_convert(name, eqx):
    yield lambda: name(plus, ONE)(ONE)
    yield lambda: name(lambda x: x + ONE, ONE)(2 * ONE)
    scale = jnp.array(3.0)

    def closed(x, what="a"):
        return scale * x if what == "a" else x

    yield lambda: name(closed, ONE)(ONE)
    yield lambda: name(closed, ONE, "b")(ONE, "b")
    yield lambda: name(closed, ONE, "a")(ONE, "b")
    yield lambda: name(closed, ONE)(jnp.ones(3))
    yield lambda: name(closed, ONE)(jnp.ones(2, int))
    yield lambda: name(closed, ONE)()
    yield lambda: name(closed, ONE)(ONE, ONE)
    yield lambda: name(closed, jax.ShapeDtypeStruct((2,), "float32"))(ONE)
    yield lambda: name(closed, 1.0)(1.0)
    yield lambda: name(closed, ONE).out_struct
    yield lambda: name(closed, ONE).in_struct[0]
    yield lambda: len(jax.tree.leaves(name(closed, ONE)))
    yield lambda: name(fn=closed, x=ONE)(x=ONE)
    yield lambda: jax.grad(lambda s: name(lambda x: s * x, 2.0)(2.0))(3.0)
