"""Surgery on trees, comparing them, printing them."""

import io
from contextlib import redirect_stdout

import jax
import jax.numpy as jnp
import numpy as np

from .registry import calls

KEY = jax.random.key(0)


@calls("tree_at")
def tree_at(name, eqx):
    class Pair(eqx.Module):
        left: jax.Array
        right: object

        def __check_init__(self):
            if self.right == "refused":
                raise ValueError("refused")

    class Named(eqx.Module):
        weight: jax.Array
        name: str = eqx.field(static=True)

    pair = Pair(jnp.ones(2), [1, None])
    yield lambda: name(lambda p: p.left, pair, jnp.zeros(3))
    yield lambda: name(lambda p: p.left, pair, replace="anything")
    yield lambda: name(lambda p: p.left, pair, replace_fn=lambda x: x + 1)
    yield lambda: name(lambda p: p.right, pair, None)
    yield lambda: name(lambda p: p.right, pair, "refused")
    yield lambda: name(lambda p: p.right[1], pair, 5)
    yield lambda: name(lambda p: p.right[1], pair, 5, is_leaf=lambda x: x is None)
    yield lambda: name(lambda p: (p.right[0], p.left), pair, (3, 4))
    yield lambda: name(lambda p: (p.right[0], p.left), pair, replace_fn=lambda x: (x, x))
    yield lambda: name(lambda p: [p.right[0], p.left], pair, [3, 4])
    yield lambda: name(lambda p: {"a": p.right[0], "b": p.left}, pair, {"a": 3, "b": 4})
    yield lambda: name(lambda p: (p.right[0], p.left), pair, (3,))
    yield lambda: name(lambda p: (p.right[0], p.left), pair, 3)
    yield lambda: name(lambda t: t[0], ({"a": 1}, 2), {"b": 3, "c": 4})
    yield lambda: name(lambda t: t, 1, 2)
    yield lambda: name(lambda t: t, [1, 2], 3)
    yield lambda: name(lambda t: (), [1, 2], ())
    yield lambda: name(lambda t: t[1], [(), ()], 1)
    yield lambda: name(lambda t: t[0], [[], 1], 2)
    yield lambda: name(lambda t: 3, [1, 2], 4)
    yield lambda: name(lambda t: t[0] + 1, [1, 2], 4)
    yield lambda: name(lambda t: t[5], [1, 2], 4)
    yield lambda: name(lambda t: t.missing, pair, 4)
    yield lambda: name(lambda t: t[0], [1, 2])
    yield lambda: name(lambda t: t[0], [1, 2], 3, lambda x: x)
    yield lambda: name(lambda m: m.name, Named(jnp.ones(2), "a"), "b")
    yield lambda: name(lambda t: (t[0], t[0]), [1, 2], (5, 6))
    yield lambda: name(lambda t: (t[0], t[0][0]), [[1], 2], (5, 6))
    yield lambda: name(lambda t: [x for x in t], [1, 2, 3], [4, 5, 6])
    yield lambda: name(lambda t: t[0], [1, 1], 7)
    yield lambda: name(lambda t: t[1], [pair.left, pair.left], 7)
    yield lambda: name(lambda m: m.weight, eqx.nn.Linear(2, 1, key=KEY), jnp.ones((1, 2)))
    yield lambda: name(where=lambda t: t[0], pytree=[1], replace=2)
    yield lambda: jax.jit(lambda x: name(lambda p: p.left, pair, x).left)(jnp.ones(3))


@calls("tree_equal")
def tree_equal(name, eqx):
    one = jnp.ones(2)
    for a, b in (
        (1, 1),
        (1, 1.0),
        (1, True),
        ("a", "a"),
        ("a", "b"),
        (None, None),
        ([1], (1,)),
        ({"a": 1}, {"a": 1}),
        ({"a": 1}, {"b": 1}),
        (one, one),
        (one, np.ones(2, "float32")),
        (np.ones(2), np.ones(2)),
        (np.ones(2), np.ones(2, int)),
        (np.ones(2), np.zeros(2)),
        (np.float32(1), np.float32(1)),
        (np.float32(1), 1.0),
        (one, jnp.ones(3)),
        (one, jnp.ones(2, int)),
        (one, jnp.zeros(2)),
        (one, [one]),
        (jnp.array(1.0), 1.0),
        (jnp.array(1.0), jnp.array(1.0, jnp.float32)),
        (jnp.array(jnp.nan), jnp.array(jnp.nan)),
        (float("nan"), float("nan")),
        (KEY, KEY),
        (KEY, jax.random.key(1)),
        (jnp.tanh, jnp.tanh),
        (len, max),
        (eqx.nn.PReLU(), eqx.nn.PReLU()),
        (eqx.nn.PReLU(), eqx.nn.PReLU(0.5)),
        (object, object),
        ([], []),
    ):
        yield name, a, b
        yield lambda a=a, b=b: name(a, b, typematch=True)
    yield lambda: name(jnp.ones(2), jnp.ones(2) + 1e-3, rtol=1e-2)
    yield lambda: name(jnp.ones(2), jnp.ones(2) + 1e-3, atol=1e-4)
    yield lambda: name(1.0, 1.001, rtol=1e-2)
    yield lambda: name(np.ones(2), np.ones(2) + 1e-3, atol=1e-2)
    yield lambda: name(jnp.ones(2, int), jnp.ones(2, int), rtol=1e-2)
    yield name, one
    yield name
    yield name, one, one, one
    yield name, one, one, jnp.zeros(2)
    yield lambda: jax.jit(lambda x: name(x, x))(one)
    yield lambda: bool(name([1, "a", one], [1, "a", one]))


@calls("tree_check")
def tree_check(name, eqx):
    shared, loop = [1], []
    loop.append(loop)
    around = {"a": [1]}
    around["a"].append(around)
    yield name, [1, 2]
    yield name, [1, [], [], (), ()]
    yield name, [shared, shared]
    yield name, loop
    yield name, around
    yield name, [None, None]
    yield lambda: name([one := jnp.ones(2), one])
    yield name, 1
    yield lambda: name([layer := eqx.nn.Identity(), layer])
    yield lambda: name([layer := eqx.nn.PReLU(), layer])
    yield lambda: name(pytree=[1])


@calls("tree_flatten_one_level")
def tree_flatten_one_level(name, eqx):
    loop = []
    loop.append(loop)
    for tree in ([1, [2]], (), {"b": (1,), "a": 2}, 1, None, [None], eqx.nn.PReLU()):
        yield name, tree
    yield lambda: (lambda children, treedef: treedef.unflatten(children))(*name([1, [2]]))
    yield name, loop
    yield name, [loop]
    yield lambda: name(pytree=[1])


def function(x):
    return x


@calls("tree_pformat")
def tree_pformat(name, eqx):
    class Model(eqx.Module):
        weight: jax.Array
        children: list
        name: str = eqx.field(static=True)

    model = Model(jnp.ones((2, 3)), [1, function, np.ones(3), None], "text")
    things = (
        *(1, 1.5, "a", None, True, [], (), (1,), {}, {"a": 1}, {1, 2}, object, Model),
        *(jnp.ones(2), np.ones(2), np.float32(1), jnp.array(1.0), jnp.ones((), "bfloat16"), KEY),
        *(
            jnp.ones(2, bool),
            jnp.ones(2, complex),
            jnp.ones(2, "uint8"),
            jax.ShapeDtypeStruct((2,), "int8"),
        ),
        *(function, len, jnp.tanh, jax.jit(function), jax.nn.relu, lambda x: x, model, [model] * 3),
        *(jax.tree_util.Partial(function, 1), jnp.float32, np.dtype("int8"), slice(1, 2), 1j),
    )
    for thing in things:
        yield name, thing
    yield lambda: name(model, width=20)
    yield lambda: name(model, width=20, indent=4)
    yield lambda: name(model, short_arrays=False)
    yield lambda: name(jax.ShapeDtypeStruct((2,), "int8"), struct_as_array=True)
    yield lambda: name(model, truncate_leaf=lambda x: isinstance(x, list))
    yield lambda: name(model, truncate_leaf=lambda x: isinstance(x, Model))
    yield lambda: name(pytree=1)
    yield lambda: name(model, 20)
    yield lambda: name(model, wrong=1)
    yield lambda: repr(model)
    yield lambda: repr(eqx.nn.PReLU())
    yield lambda: jax.jit(lambda x: name(x) == "f32[2]")(jnp.ones(2))


def printed(call):
    with redirect_stdout(io.StringIO()) as text:
        call()
    return text.getvalue()


@calls("tree_pprint")
def tree_pprint(name, eqx):
    yield lambda: printed(lambda: name([1, jnp.ones(2)]))
    yield lambda: printed(lambda: name({"a": jnp.ones(2)}, short_arrays=False))
    yield lambda: printed(lambda: name(pytree=[1, 2, 3], width=3))
    yield name, 1
    yield name
    yield lambda: name(1, wrong=1)


@calls("tree_inference", "nn.inference_mode")
def inference_mode(name, eqx):
    class Model(eqx.Module):
        drop: object
        inference: bool = False
        weight: float = 1.0

    drop = eqx.nn.Dropout(0.5)
    for value in (True, False):
        yield lambda value=value: name(drop, value).inference
        yield lambda value=value: name(Model(drop, not value), value).drop.inference
        yield lambda value=value: name(Model(drop, not value), value).inference
    yield lambda: name(drop).inference
    yield lambda: name([drop, 1, jnp.ones(2)])[0].inference
    yield lambda: name(pytree=drop, value=True).inference
    yield lambda: name(eqx.nn.Sequential([eqx.nn.Identity(), drop])).layers[1].inference
    yield name, 1
    yield name, [jnp.ones(2)]
    yield lambda: name(drop)(jnp.ones(2))
    yield lambda: name(drop, value=False)(jnp.ones(2))
