"""`filter_closure_convert` and `closure_to_pytree`."""

import copy
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal.transforms import closure_to_pytree, filter_closure_convert

X = jnp.array([1.0, 2.0])
W = jnp.array([3.0, 0.5])
SHAPE = jax.ShapeDtypeStruct((2,), jnp.float32)


class Scale(vernal.Module):
    by: jax.Array
    fn: Any = None

    def __call__(self, x):
        return self.by * (x if self.fn is None else self.fn(x))

    def plus(self, x):
        return self.by + x


def scale_by(a):
    def fn(x, tag="plain"):
        return a * x, tag

    return fn


def close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def test_what_a_function_closes_over_are_children():
    count, key, numbers = jnp.array([2, 3]), jax.random.key(0), np.array([1.0, 5.0], np.float32)
    scalar = jnp.float32(4.0)

    weight = W

    def fn(x, tag):
        noise = jax.random.normal(key, (2,))
        return weight * x + count.astype(jnp.float32) * noise + numbers * x * scalar, tag

    converted = filter_closure_convert(fn, SHAPE, "a")
    leaves = jax.tree.leaves(converted)
    assert any(leaf is W for leaf in leaves) and any(leaf is count for leaf in leaves)
    assert any(leaf is key for leaf in leaves) and any(leaf is scalar for leaf in leaves)
    assert len(leaves) == 5 and all(isinstance(leaf, jax.Array) for leaf in leaves)
    assert converted(X, "a")[1] == "a"
    close(converted(X, "a")[0], fn(X, "a")[0])
    close(jax.jit(lambda f, x: f(x, "a")[0])(converted, X), fn(X, "a")[0])
    assert converted.__name__ == "fn"


def test_structs_hold_shapes_and_survive_every_boundary():
    weight = W + 0

    def fn(tree, *, scale):
        return {"y": weight * tree["x"] * scale, "tag": tree["tag"]}

    args, kwargs = ({"x": X, "tag": "t"},), {"scale": 2.0}
    converted = filter_closure_convert(fn, *args, **kwargs)
    expected = ({"x": SHAPE, "tag": "t"},), {"scale": 2.0}
    out = {"y": SHAPE, "tag": "t"}
    inside = []

    def look(f):
        inside.append((f.in_struct, f.out_struct))
        return f

    after = [
        converted,
        look(converted),
        jax.jit(look)(converted),
        jax.eval_shape(look, converted),
        jax.tree.map(lambda x: x, converted),
        jax.lax.while_loop(lambda f: False, look, converted),
        jax.lax.scan(lambda f, _: (look(f), None), converted, None, length=2)[0],
        vernal.filter_jit(look)(converted),
        jax.vmap(look, in_axes=None, out_axes=None, axis_size=2)(converted),
        vernal.filter_grad(lambda f: jnp.sum(look(f)(*args, **kwargs)["y"]))(converted),
    ]
    for f in after:
        inside.append((f.in_struct, f.out_struct))
    assert all(structs == (expected, out) for structs in inside) and len(inside) > 14
    close(after[2](*args, **kwargs)["y"], 2.0 * W * X)


def test_other_values_may_come_of_any_weakness():
    converted = filter_closure_convert(scale_by(W), jnp.asarray(1.0))
    close(converted(jnp.float32(2.0))[0], 2.0 * W)
    close(converted(jnp.asarray(2.0))[0], 2.0 * W)
    close(converted(np.float32(2.0))[0], 2.0 * W)
    assert not converted.out_struct[0].weak_type
    half = filter_closure_convert(
        scale_by(jnp.asarray(2.0)), jax.ShapeDtypeStruct((), jnp.bfloat16)
    )
    assert half.out_struct[0].dtype == jnp.bfloat16


MISMATCHES = {
    "shape": (
        lambda f: f({"x": [jnp.ones(3)]}),
        r"args\[0\]\['x'\]\[0\]: expected f32\[2\].*got f32\[3\]",
    ),
    "dtype": (
        lambda f: f({"x": [jnp.ones(2, int)]}),
        r"args\[0\]\['x'\]\[0\]: expected f32\[2\].*got i32\[2\]",
    ),
    "structure": (lambda f: f({"x": (X,)}), r"args\[0\]\['x'\]: expected list.*got tuple"),
    "number": (lambda f: f({"x": [1.0]}), r"args\[0\]\['x'\]\[0\]: expected f32\[2\].*got 1.0"),
    "missing": (lambda f: f(), r"args\[0\]: expected .*got nothing"),
    "static": (lambda f: f({"x": [X]}, tag="b"), "kwargs.*: expected 'a', got 'b'"),
    "static of another type": (lambda f: f({"x": [X]}, tag=1), "kwargs.*: expected 'a', got 1"),
}


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("hides", [True, False])
def test_a_mismatch_is_told_by_path(name, hides):
    call, text = MISMATCHES[name]

    weight = W + 0 if hides else 1.0

    def fn(tree, tag="a"):
        return tree["x"][0] * weight

    converted = filter_closure_convert(fn, {"x": [X]}, tag="a")
    close(converted({"x": [2.0 * X]}, tag="a"), fn({"x": [2.0 * X]}))
    with pytest.raises(ValueError, match=f"(?s)`fn` was converted for different arguments.*{text}"):
        call(converted)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="filter_closure_convert needs a function"):
        inspect.unwrap(filter_closure_convert)(X, X)


def global_arrays(x):
    return W * x


WITHOUT_HIDDEN_ARRAYS = {
    "plain": lambda x: jnp.sin(x),
    "global": global_arrays,
    "of jax": jnp.sin,
    "jitted": jax.jit(lambda x: x),
    "numbers": (lambda a: lambda x: a * x)(2.0),
    "module": Scale(W, jax.nn.relu),
    "method": Scale(W, jnp.tanh).plus,
    "vernal partial": vernal.Partial(jnp.multiply, W),
    "layer": vernal.nn.MLP(2, 2, 4, 1, key=jax.random.key(0)),
}


@pytest.mark.parametrize("name", WITHOUT_HIDDEN_ARRAYS)
def test_a_function_that_hides_no_array_is_converted_alike(name):
    fn = WITHOUT_HIDDEN_ARRAYS[name]
    converted = filter_closure_convert(fn, SHAPE)
    close(converted(X), fn(X))
    assert converted.out_struct.shape == (2,) and converted.in_struct == ((SHAPE,), {})


@pytest.mark.parametrize("hides", [True, False])
def test_what_is_bound_anew_later_makes_no_difference(hides):
    weight = W + 0 if hides else 1.0
    k = 1.0

    def fn(x):
        return weight * x * k

    before = filter_closure_convert(fn, X)
    k = 3.0
    close(before(X), weight * X)
    close(filter_closure_convert(fn, X)(X), 3.0 * weight * X)


def test_it_is_traced_once():
    def fn(x):
        traced.append(x)
        return x

    traced: list[Any] = []
    globals()["_traced"] = traced
    converted = filter_closure_convert(fn, X)
    assert len(traced) == 1
    close(converted(X), X)
    assert converted.out_struct == SHAPE and len(traced) == 1


class Holder:
    def __init__(self, a):
        self.a = a

    def method(self, x):
        return self.a * x


def in_an_object(a):
    holder = Holder(a)
    return lambda x: holder.a * x


HIDING = {
    "closure": lambda a: lambda x: a * x,
    "default": lambda a: lambda x, a=a: a * x,
    "partial": lambda a: functools.partial(jnp.multiply, a),
    "filter_jit": lambda a: vernal.filter_jit(lambda x: a * x),
    "jax.jit": lambda a: jax.jit(lambda x: a * x),
    "object": in_an_object,
    "method of an object": lambda a: Holder(a).method,
    "closure over a converted function": lambda a: (lambda f: lambda x: f(x))(
        filter_closure_convert(lambda x: a * x, SHAPE)
    ),
}


@pytest.mark.parametrize("name", HIDING)
def test_hidden_arrays_are_found_and_differentiated(name):
    make = HIDING[name]
    assert jax.tree.leaves(filter_closure_convert(make(W), X))

    def ours(a):
        converted = filter_closure_convert(make(a), X)
        return jnp.sum(jax.jit(lambda f, x: f(x))(converted, 2.0 * X) ** 2)

    close(jax.grad(ours)(W), jax.grad(lambda a: jnp.sum(make(a)(2.0 * X) ** 2))(W))
    close(jax.jit(jax.grad(ours))(W), jax.grad(ours)(W))


def test_a_converted_function_is_returned_as_it_is():
    converted = filter_closure_convert(scale_by(W), X)
    assert filter_closure_convert(converted, SHAPE) is converted
    with pytest.raises(ValueError, match="was converted for different arguments"):
        filter_closure_convert(converted, X.astype(int))
    plain = filter_closure_convert(jnp.sin, X)
    assert filter_closure_convert(plain, 2 * X) is plain


def test_gradients_reach_children_and_arguments():
    weight = W + 0

    def fn(tree, power):
        return jnp.sum(weight * tree["x"] ** power)

    converted = filter_closure_convert(fn, {"x": X}, 2)
    by_consts = vernal.filter_grad(lambda f: f({"x": X}, 2))(converted)
    close(jax.tree.leaves(by_consts), [X**2])
    assert type(by_consts) is type(converted)
    by_args = jax.grad(lambda tree: converted(tree, 2))({"x": X})
    close(by_args, {"x": 2 * W * X})
    hessian = jax.hessian(lambda tree: converted(tree, 2))({"x": X})
    close(hessian["x"]["x"], jnp.diag(2 * W))


def test_tracers_of_any_transformation_are_converted():
    def fn(a, x):
        converted = filter_closure_convert(lambda y: jnp.sin(a * y), x)
        hash(converted), converted == converted
        return jnp.sum(jax.jit(lambda f, y: f(y))(converted, x))

    expected = jax.grad(lambda a, x: jnp.sum(jnp.sin(a * x)))
    xs = jnp.stack([X, W])
    with jax.checking_leaks():
        close(jax.grad(fn)(W, X), expected(W, X))
        close(jax.jit(jax.grad(fn))(W, X), expected(W, X))
        close(
            jax.vmap(jax.grad(fn), in_axes=(0, None))(xs, X), jax.vmap(expected, (0, None))(xs, X)
        )
        close(jax.jit(jax.vmap(jax.grad(fn)))(xs, xs), jax.vmap(expected)(xs, xs))
        close(jax.grad(jax.checkpoint(fn))(W, X), expected(W, X))
        primal, tangent = jax.jvp(fn, (W, X), (W, X))
        close((primal, tangent), jax.jvp(lambda a, x: jnp.sum(jnp.sin(a * x)), (W, X), (W, X)))
        total, _ = jax.lax.scan(lambda c, a: (c + fn(a, X), None), jnp.float32(0), xs)
        close(total, fn(xs[0], X) + fn(xs[1], X))


class Unlooked(np.ndarray):
    """An array whose values nobody may look at."""

    def __eq__(self, other):
        raise AssertionError("looked at")

    __hash__ = None  # type: ignore[assignment] (as arrays)

    def __bool__(self):
        raise AssertionError("looked at")


RETURNED = {
    "converted": lambda a: filter_closure_convert(scale_by(a), X),
    "converted module": lambda a: filter_closure_convert(Scale(a), X),
    "closure": lambda a: closure_to_pytree(scale_by(a)),
}


@pytest.mark.parametrize("name", RETURNED)
def test_hash_and_equality_go_by_structure_and_identity(name):
    make = RETURNED[name]
    one = make(W)
    leaves, treedef = jax.tree.flatten(one)
    again = jax.tree.unflatten(treedef, leaves)
    other = jax.tree.map(jnp.copy, one)
    assert (one == again) is True and hash(one) == hash(again)
    assert (one != again) is False
    assert (one == other) is False and hash(one) == hash(other)
    assert (one == "text") is False
    for another in RETURNED.keys() - {name}:
        assert (one == RETURNED[another](W)) is False

    def compare(f, g):
        assert (f == f, f == g, f == one) == (True, False, False)
        assert hash(f) == hash(f)
        return f

    with jax.checking_leaks():
        jax.jit(compare)(one, other)
        jax.vmap(compare)(*jax.tree.map(lambda x: x[None], (one, other)))
        vernal.filter_grad(lambda fg: jnp.sum(jax.tree.leaves(compare(*fg))[0]))((one, other))


def test_equality_looks_at_no_value():
    array = np.ones(2, np.float32).view(Unlooked)
    one, other = closure_to_pytree((scale_by(array), scale_by(array.copy())))
    assert (one == other) is False and (one == closure_to_pytree(one)) is True
    hash(one)


def test_a_new_function_is_another_one_whatever_arrays_it_captures():
    traced, held, weight = [], {"scale": 1.0}, jnp.array([3.0, 4.0])

    @jax.jit
    def call(f, x):
        traced.append(f)
        return f(x)

    for make in (
        lambda: lambda x: weight * x * held["scale"],
        lambda: functools.partial(lambda w, x: w * x * held["scale"], weight),
        lambda: lambda x, w=weight: w * x * held["scale"],
    ):
        for scale in (1.0, 5.0, 1.0):
            held["scale"] = scale
            close(call(closure_to_pytree(make()), X), weight * X * scale)
    assert len(traced) == 9
    kept = closure_to_pytree(lambda x: weight * x)
    for factor in (1.0, 2.0, 3.0):
        close(call(jax.tree.map(lambda w, factor=factor: factor * w, kept), X), factor * weight * X)
    assert len(traced) == 10


def test_fresh_optimisers_of_other_rates_have_one_structure():
    structures = {
        jax.tree.structure(closure_to_pytree(optax.adam(jnp.float32(rate), b1=0.8)))
        for rate in (1e-3, 1e-2, 1.0)
    }
    assert len(structures) == 1
    other = jax.tree.structure(closure_to_pytree(optax.adam(jnp.float32(1e-3), b1=0.9)))
    assert other not in structures


def test_only_closures_and_callables_that_hold_arrays_are_replaced():
    plain, text = global_arrays, "text"
    tree = {"f": plain, "g": scale_by(W), "h": [text, W, jnp.sin]}
    new = closure_to_pytree(tree)
    assert new["f"] is plain and new["h"] is tree["h"] and new["g"] is not tree["g"]
    assert [leaf is W for leaf in jax.tree.leaves(new["g"])] == [True]
    assert closure_to_pytree(text) is text and closure_to_pytree(Scale(W)).by is W
    assert closure_to_pytree(new)["g"] is new["g"]


def test_a_closure_keeps_name_and_signature():
    fn = closure_to_pytree(scale_by(W))
    assert fn.__name__ == "fn" and str(inspect.signature(fn)) == "(x, tag='plain')"
    assert fn.__wrapped__ is fn.__wrapped__


def test_partials_methods_and_jitted_functions_become_pytrees():
    holder = Holder(W)
    for fn in (
        functools.partial(jnp.multiply, W),
        jax.tree_util.Partial(lambda x: W2 * x) if (W2 := W + 0) is not None else None,
        holder.method,
        jax.jit(lambda x, a=W: a * x),
        vernal.filter_jit(lambda x, a=W: a * x),
    ):
        new = closure_to_pytree(fn)
        assert len(jax.tree.leaves(new)) == 1
        close(jax.jit(lambda f, x: f(x))(new, X), W * X)
        doubled = jax.tree.map(lambda x: 2 * x, new)
        close(doubled(X), 2 * W * X)


def test_an_optimiser_is_one_program_for_all_learning_rates():
    traced = []
    params = {"w": X}

    @jax.jit
    def step(optimiser, params, state):
        traced.append(optimiser)
        updates, state = optimiser.update({"w": W}, state, params)
        return optax.apply_updates(params, updates), state

    with jax.numpy_dtype_promotion("standard"):
        for make in (optax.adam, optax.sgd):
            traced.clear()
            for rate in (1e-3, 1e-2, 0.1):
                plain = make(rate)
                optimiser = closure_to_pytree(make(jnp.array(rate)))
                assert type(optimiser) is type(plain)
                arrays = [x for x in jax.tree.leaves(optimiser) if vernal.is_array(x)]
                # Optax keeps the negative of it.
                assert [float(x) for x in arrays] == [-np.float32(rate)]
                new, _ = step(optimiser, params, optimiser.init(params))
                updates, _ = plain.update({"w": W}, plain.init(params), params)
                close(new, optax.apply_updates(params, updates))
            assert len(traced) == 1, make


def test_the_learning_rate_itself_is_learnt():
    def after(optimiser):
        updates, _ = optimiser.update(W, optimiser.init(X), X)
        return jnp.sum(optax.apply_updates(X, updates) ** 2)

    optimiser = closure_to_pytree(optax.sgd(jnp.array(0.1)))
    gradient = vernal.filter_grad(after)(optimiser)
    # What Optax keeps is the negative of the rate.
    arrays = [x for x in jax.tree.leaves(gradient) if vernal.is_array(x)]
    close(arrays, [jnp.sum(2 * W * (X - 0.1 * W))])


def test_conversion_keeps_a_sharded_array_sharded():
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(16.0), jax.P("data"))
        w = jax.device_put(jnp.ones(16), jax.P("data"))
        converted = filter_closure_convert(lambda x: jnp.sin(w * x), x)
        program = jax.jit(lambda f, x: f(x)).lower(converted, x).compile()
        assert "all-gather" not in program.as_text()
        out = program(converted, x)
        assert out.sharding.spec == jax.P("data")
        close(out, jnp.sin(w * x))
        fn = closure_to_pytree(lambda x: w * x)
        assert jax.jit(lambda f, x: f(x))(fn, x).sharding.spec == jax.P("data")


def test_functions_taken_apart_can_be_copied():
    tree = closure_to_pytree({"f": scale_by(jnp.array(2.0))})
    copied = copy.deepcopy(tree)
    assert jax.tree.structure(copied) == jax.tree.structure(tree)
    assert float(copied["f"](3.0)[0]) == 6.0


def test_a_tree_of_axes_like_a_converted_function_is_not_a_function():
    fn = closure_to_pytree(functools.partial(jnp.dot, jnp.ones(3)))
    axes = vernal.tree_at(".values", fn, None)
    with pytest.raises(AttributeError, match="a tree in the structure of this function"):
        axes(jnp.ones(3))
    assert not hasattr(axes, "__name__")
    # What looks for hidden arrays meets it among what functions close over.
    assert vernal.Static(lambda: axes).value() is axes


def test_names_of_a_users_objects_are_not_computed():
    class Named:
        @property
        def __name__(self):
            raise RuntimeError("computed")

        def __call__(self, x):
            return 2 * x

    named = Named()
    assert vernal.filter_jit(lambda f, x: f(x))(named, jnp.ones(())) == 2
    assert isinstance(closure_to_pytree(lambda x, f=named: f(x))(1), int)
