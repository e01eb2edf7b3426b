"""Small helpers of `equinox.internal`."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl

from .registry import calls

ONE = jnp.ones(2)


def plus(x, y=1.0):
    return x + y


@calls("internal.ω")
def omega(name, eqx):
    ω = name
    tree = {"a": ONE, "b": (1.0, 2 * ONE)}
    for operation in (
        lambda x: x + x,
        lambda x: x - 1,
        lambda x: 2 * x,
        lambda x: x * 2,
        lambda x: 1 / x,
        lambda x: x / 2,
        lambda x: x**2,
        lambda x: x**x,
        lambda x: x // 2,
        lambda x: x % 2,
        lambda x: -x,
        lambda x: abs(x),
        lambda x: x @ x,
        lambda x: x < 2,
        lambda x: x + jnp.array(1.0),
        lambda x: x + ONE,
        lambda x: x + np.ones(2, "float32"),
        lambda x: x + np.float32(1),
        lambda x: x + "text",
        lambda x: x + None,
        lambda x: x.call(jnp.sum),
        lambda x: x + name({"a": 1}),
        lambda x: x + name(tree, is_leaf=lambda y: False),
    ):
        yield lambda operation=operation: operation(tree**ω).ω
    arrays = [jnp.arange(3.0), jnp.ones(3)]
    yield lambda: (arrays**ω)[1].ω
    yield lambda: (arrays**ω).at[1].set([5.0, 6.0] ** ω).ω
    yield lambda: (arrays**ω).at[1].add([5.0, 6.0] ** ω).ω
    for method in ("multiply", "divide", "power", "min", "max"):
        yield lambda method=method: getattr((arrays**ω).at[1], method)([2.0, 2.0] ** ω).ω
    yield lambda: name(value=tree).ω
    yield lambda: (1.0**ω).ω
    yield lambda: repr(1**ω)
    yield lambda: bool(1**ω)
    yield lambda: ([None, 1] ** ω + [None, 2] ** ω).ω


@calls("internal.Static")
def static(name, eqx):
    yield lambda: name([1, "a"]).value
    yield lambda: jax.tree.leaves(name([1, "a"]))
    yield lambda: name([1]) == name([1])
    yield lambda: name([1]) == name([2])
    yield lambda: jax.jit(lambda x: x)(name((1, "a"))).value
    yield lambda: name(value=3).value
    yield lambda: name(ONE).value
    yield lambda: isinstance(name(1), eqx.Module)
    yield lambda: name[int]
    yield name


@calls("internal.str2jax")
def str2jax(name, eqx):
    yield lambda: repr(name("text"))
    yield lambda: jax.tree.leaves(name("text"))
    yield lambda: jax.tree.structure(name("a")) == jax.tree.structure(name("a"))
    yield lambda: name("a") == name("a")
    yield lambda: jax.jit(lambda x: x)(name("a")) is None
    yield lambda: name(msg="text") is None
    yield name, 1


@calls("internal.doc_repr")
def doc_repr(name, eqx):
    yield name, 1, "text"
    yield lambda: name(obj=1, string="text")
    yield name, 1


@calls("internal.doc_remove_args")
def doc_remove_args(name, eqx):
    yield lambda: name("x")(plus)(1.0)
    yield lambda: name()(plus) is plus
    yield lambda: name("missing")(1)


@calls("internal.eval_empty", "internal.eval_zero")
def evaluated(name, eqx):
    yield lambda: jax.tree.map(lambda x: (x.shape, x.dtype), name(plus, ONE))
    yield lambda: name(plus, ONE).weak_type
    yield lambda: name(plus, 1.0).weak_type
    yield lambda: name(lambda x: (x.shape[0], "text"), ONE)
    yield lambda: name(lambda x, y: [x, y], ONE, jnp.ones((), int))[1].dtype
    yield name, plus
    yield lambda: name(fn=plus)


@calls("internal.scan_trick")
def scan_trick(name, eqx):
    yield lambda: name(lambda x: 2 * x, [lambda x: x + 1, lambda x: x + 3], jnp.array(1.0))
    yield lambda: name(lambda x: 2 * x, [], jnp.array(1.0))
    yield lambda: name(fn=lambda x: 2 * x, intermediates=[jnp.sin], init=jnp.array(1.0))
    yield lambda: name(lambda x: (x, x), [], 1.0)
    yield lambda: jax.vmap(lambda x: name(lambda x: 2 * x, [lambda x: x + 1], x))(ONE)


@calls("internal.hashable_partition", "internal.hashable_combine")
def hashable(name, eqx):
    divide = getattr(eqx.internal, "hashable_partition", None)
    join = getattr(eqx.internal, "hashable_combine", None)
    tree = {"a": ONE, "b": "text", "c": [1, None]}
    yield lambda: join(*divide(tree, eqx.is_array))
    yield lambda: isinstance(hash(divide(tree, eqx.is_array)[1]), int)
    yield lambda: jax.tree.leaves(divide(tree, eqx.is_array)[0])
    yield lambda: divide([[1]], eqx.is_array)[1] == divide([[1]], eqx.is_array)[1]
    yield lambda: divide(pytree=tree, filter_fn=eqx.is_array)[0]
    yield lambda: divide(tree, True)
    yield lambda: join(1, 2)


@calls("internal.left_broadcast_to")
def left_broadcast_to(name, eqx):
    yield name, ONE, (2, 3)
    yield name, ONE, (2,)
    yield name, jnp.array(1.0), (2, 3)
    yield name, ONE, (3, 2)
    yield name, ONE, ()
    yield lambda: name(arr=ONE, shape=(2, 1))
    yield name, np.ones(2), (2, 3)


@calls("internal.closure_to_pytree")
def closure_to_pytree(name, eqx):
    def made(x):
        def fn(y):
            return x * y

        return fn

    yield lambda: name(made(ONE))(3.0)
    yield lambda: jax.tree.leaves(name(made(ONE)))
    yield lambda: name(plus)(1.0)
    yield lambda: jax.jit(lambda f, y: f(y))(name(made(ONE)), 2.0)
    yield lambda: name([made(ONE), 1])[1]
    yield lambda: name(1)
    yield lambda: name(functools.partial(made(ONE)))(2.0)
    yield lambda: jax.grad(lambda f: f(2.0).sum())(name(made(ONE))) is None


@calls("internal.GetKey")
def get_key(name, eqx):
    def drawn(getkey):
        return [jax.random.key_data(getkey()).tolist() for _ in range(2)]

    yield lambda: drawn(name(5))
    yield lambda: drawn(name(seed=5))
    yield lambda: name(5).seed
    yield lambda: (getkey := name(5), getkey(), getkey.call)[2]
    yield lambda: repr(name(5))
    yield lambda: isinstance(hash(name(5)), int)
    yield lambda: name(5) == name(5)
    yield lambda: jax.dtypes.issubdtype(name(5)().dtype, jax.dtypes.prng_key)
    yield lambda: name("text")


@calls("internal.ContainerMeta")
def container_meta(name, eqx):
    def made():
        class Items(metaclass=name):
            first = "a"
            second = "b"

        return Items

    yield lambda: made().second
    yield lambda: made()[1]
    yield lambda: len(made())
    yield lambda: made()[5]


@calls("internal.TreeWLCustom")
def tree_wl_custom(name, eqx):
    def text(x, **options):
        settings = {
            "truncate_leaf": lambda x: False,
            "short_arrays": True,
            "struct_as_array": False,
        }
        return wl.pformat(x, custom=name(**{**settings, **options}))

    yield text, [ONE, "a", plus]
    yield lambda: text([ONE], short_arrays=False)
    yield lambda: text([jax.ShapeDtypeStruct((2,), "int8")], struct_as_array=True)
    yield lambda: text([ONE, [1]], truncate_leaf=lambda x: x == [1])
    yield name


@calls("internal.AbstractProgressMeter", "internal.NoProgressMeter", "internal.TextProgressMeter")
def meters(name, eqx):
    def run(meter, steps=(0.1, 0.5, 1.0)):
        state = meter.init()
        for step in steps:
            state = meter.step(state, jnp.array(step))
        meter.close(state)
        return len(jax.tree.leaves(state)) >= 0

    yield lambda: run(name())
    yield lambda: jax.jit(lambda x: run(name(), (x,)))(jnp.array(0.5))
    yield lambda: name(minimum_increase=0.1).minimum_increase
    yield lambda: issubclass(name, eqx.Module)
    yield lambda: name[int]
    yield lambda: name().step("text", "text")


@calls("internal.TqdmProgressMeter")
def tqdm_meter(name, eqx):
    yield lambda: name(refresh_steps=5).refresh_steps
    yield lambda: name(5) is None
    yield lambda: issubclass(name, eqx.Module)
    yield lambda: name(wrong=5)


@calls("internal.MaybeBuffer")
def maybe_buffer(name, eqx):
    yield lambda: isinstance(ONE, name[jax.Array])
    yield lambda: isinstance(1, name[jax.Array])
    yield lambda: isinstance(1, name[int])
    yield lambda: name[int] is None


@calls("internal.to_onnx")
def to_onnx(name, eqx):
    yield lambda: name(jnp.sin)
    yield lambda: name(fn=jnp.sin)
    yield lambda: callable(name(jnp.sin))


@calls("internal.noinline")
def noinline(name, eqx):
    yield lambda: name(plus)(ONE)
    yield lambda: name(plus)(ONE, 2)
    yield lambda: name(plus)(1.0)
    yield lambda: name(lambda x: (x, "text"))(ONE)
    yield lambda: jax.jit(lambda x: name(plus)(x))(ONE)
    yield lambda: jax.grad(lambda x: name(jnp.sin)(x))(1.0)
    yield lambda: jax.jvp(name(jnp.sin), (1.0,), (1.0,))
    yield lambda: jax.vmap(name(plus))(ONE)
    yield lambda: name(plus, abstract_fn=plus)(ONE)
    yield lambda: name(fn=plus)(ONE)
    yield lambda: jax.jit(name(plus))(ONE)
    yield lambda: eqx.filter_jit(name(plus))(ONE)
    yield lambda: name(plus).__name__
    yield lambda: name(lambda x: x.missing)(ONE)
    yield lambda: name(1)
    yield lambda: pickle.dumps(name(plus)) is None
