"""`==` by value; hash by structure, shapes and dtypes, so that JAX can use modules as functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import Module, filter_jit


class Cell(Module):
    w: jax.Array
    act: Any = jnp.tanh
    name: str = "cell"

    def __call__(self, carry, x):
        carry = self.act(self.w * carry + x)
        return carry, carry

    def apply(self, x):
        return self.act(self.w * x)


class Layer(Module):
    w: Any
    act: Any = jax.nn.relu

    def __call__(self, x):
        return self.act(self.w * x)


def test_equal_by_value():
    assert Layer(jnp.ones(2)) == Layer(jnp.ones(2))
    assert Layer(np.ones(2)) == Layer(np.ones(2))
    assert Layer(jnp.ones(2)) != Layer(jnp.zeros(2))
    assert Layer(jnp.ones(2)) != Layer(jnp.ones(3))
    assert Layer(jnp.ones(2), jnp.tanh) != Layer(jnp.ones(2))
    assert Layer(1) != Layer(1.0)
    assert Layer(jnp.ones(2)) != "something else"

    class Sub(Layer):
        pass

    assert Sub(jnp.ones(2)) != Layer(jnp.ones(2))


def test_a_module_equals_itself_whatever_it_holds():
    nan = Layer(jnp.array([jnp.nan]))
    assert nan == nan
    assert nan == jax.tree.map(lambda x: x, nan)
    assert nan in [nan]


def test_equal_modules_have_equal_hashes():
    for one, two in (
        (Layer(jnp.ones(2)), Layer(jnp.ones(2))),
        (Layer(np.ones(2)), Layer(np.ones(2))),
        (Layer([jnp.ones(2), 1.5]), Layer([jnp.ones(2), 1.5])),
        (Layer(jax.random.key(1)), Layer(jax.random.key(1))),
        (Layer(jax.ShapeDtypeStruct((2,), "f4")), Layer(jax.ShapeDtypeStruct((2,), "f4"))),
    ):
        assert one == two
        assert hash(one) == hash(two)
        assert {one: "found"}[two] == "found"
    assert hash(Layer(jnp.ones(2))) != hash(Layer(jnp.ones(3)))


def test_modules_with_other_values_are_other_functions_while_one_traces():
    cells = [Cell(jnp.full(2, w)) for w in (0.5, 1.5)]
    x, xs = jnp.ones(2), jnp.ones((3, 2))

    def run(x):
        scans = [jax.lax.scan(cell, x, xs)[0] for cell in cells]
        methods = [jax.jit(cell.apply)(x) for cell in cells]
        return scans, methods

    right = run(x)
    for got in (jax.jit(run)(x), jax.tree.map(lambda a: a[0], jax.vmap(run)(x[None]))):
        assert all(jax.tree.leaves(jax.tree.map(jnp.allclose, got, right)))
    assert not jnp.allclose(right[0][0], right[0][1])


def test_weak_types_make_other_functions():
    weak, strong = Layer(jnp.asarray(2.0)), Layer(jnp.asarray(2.0, jnp.float32))
    x = jnp.ones(2, jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        assert [jax.jit(m)(x).dtype for m in (weak, strong)] == [jnp.bfloat16, jnp.float32]
        assert weak != strong


def test_modules_on_different_devices_are_compared():
    one, two, other = (
        jax.device_put(Layer(jnp.full(2, value)), device)
        for value, device in zip((1.0, 1.0, 2.0), jax.devices(), strict=False)
    )
    assert one == two
    assert one != other
    assert hash(one) == hash(two)


def test_the_hash_looks_at_no_value():
    m = Layer(jnp.ones(2))
    assert hash(m) == hash(m)
    assert hash(m) == hash(jax.tree.map(lambda x: x, m))
    assert len({m, m, jax.tree.map(lambda x: x, m)}) == 1
    assert hash(Layer("a")) == hash(Layer("a"))


def test_no_value_of_an_array_is_touched():
    m = Layer(jnp.ones(2))
    other = jax.tree.map(lambda x: x, m)
    m.w.delete()
    assert hash(m) == hash(other)
    assert m == other

    def traced(x):
        a, b = Layer(x), Layer(x)
        assert a == b
        assert hash(a) == hash(b)
        assert {a: 1}[b] == 1
        return x

    jax.jit(traced)(jnp.ones(2))
    jax.vmap(traced)(jnp.ones(2))
    jax.grad(lambda x: traced(x).sum())(jnp.ones(2))


def test_modules_of_shapes_compare():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert Layer(shape) == Layer(jax.ShapeDtypeStruct((2,), jnp.float32))
    assert Layer(shape) != Layer(jax.ShapeDtypeStruct((3,), jnp.float32))


class Unhashable(Module, layout="fields"):
    w: Any

    def twice(self):
        return 2 * self.w


def test_methods_of_modules_without_a_hash_compare():
    assert Unhashable({1}).twice == Unhashable({1}).twice
    assert Unhashable({1}).twice != Unhashable({2}).twice


class Data(Module):
    w: Any

    def twice(self):
        return 2 * self.w


def test_equality_of_data_under_jit_is_traced():
    assert bool(jax.jit(lambda a, b: a == b)(Data(jnp.ones(2)), Data(jnp.ones(2))))
    assert not bool(jax.jit(lambda a, b: a == b)(Data(jnp.ones(2)), Data(jnp.zeros(2))))


@pytest.mark.parametrize("function", [lambda x: Layer(x), lambda x: Data(x).twice])
def test_functions_over_traced_arrays_are_equal_if_the_arrays_are_the_same(function):
    """JAX's caches compare functions whose hashes differ, and need an answer of Python."""

    @jax.jit
    def traced(x, y):
        assert (function(x) == function(x)) is True
        assert (function(x) == function(y)) is False
        assert hash(function(x)) == hash(function(x))
        return x

    traced(jnp.ones(2), jnp.ones(2))


def test_a_module_is_a_function_to_jit_and_two_of_them_are_two():
    x = jnp.array([2.0, -2.0])
    one, two = Layer(jnp.ones(2)), Layer(3 * jnp.ones(2))
    assert jax.jit(one)(x).tolist() == [2, 0]
    assert jax.jit(two)(x).tolist() == [6, 0]
    assert jax.jit(one)(x).tolist() == [2, 0]
    assert filter_jit(two)(x).tolist() == [6, 0]


def test_modules_as_functions_of_every_transformation():
    cell, layer, x = Cell(jnp.ones(())), Layer(jnp.ones(2)), jnp.ones(2)
    carry, ys = jax.lax.scan(cell, jnp.zeros(()), jnp.arange(3.0))
    assert ys.shape == (3,)
    assert jax.lax.cond(True, layer, Layer(jnp.zeros(2)), x).tolist() == [1, 1]
    assert jax.lax.switch(1, [layer, Layer(5 * jnp.ones(2))], x).tolist() == [5, 5]
    assert jax.vmap(layer)(jnp.ones((3, 2))).shape == (3, 2)
    assert jax.checkpoint(layer)(x).tolist() == [1, 1]
    assert jax.grad(lambda x: layer(x).sum())(x).tolist() == [1, 1]
    assert jax.jacfwd(layer)(x).shape == (2, 2)
    assert jax.linearize(layer, x)[0].tolist() == [1, 1]
    assert jax.eval_shape(layer, x).shape == (2,)
    assert jax.make_jaxpr(layer)(x).eqns
    assert jax.lax.fori_loop(0, 2, lambda i, y: layer(y), x).tolist() == [1, 1]


TRANSFORMS = {
    "checkpoint": lambda f: jax.checkpoint(f),
    "jit": lambda f: jax.jit(f),
    "filter_jit": lambda f: filter_jit(f),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "cond": lambda f: lambda x: jax.lax.cond(True, f, f, x),
    "remat of jit": lambda f: jax.checkpoint(jax.jit(f)),
    "vmap": lambda f: jax.vmap(f, in_axes=0),
}


@pytest.mark.parametrize("wrap", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.sample(6)
def test_traced_modules_as_functions(wrap, leaks):
    """The module that is the function holds tracers: it must hash and compare, and nothing may leak."""

    def loss(w):
        layer = Layer(w, jnp.tanh) if wrap is not TRANSFORMS["vmap"] else Layer(w[0], jnp.tanh)
        return jnp.sum(wrap(layer)(jnp.ones(2)))

    def reference(w):
        layer = Layer(w, jnp.tanh) if wrap is not TRANSFORMS["vmap"] else Layer(w[0], jnp.tanh)
        out = layer(jnp.ones(2))
        return jnp.sum(layer(out) if wrap is TRANSFORMS["scan"] else out)

    w = jnp.array([0.3, 0.7])

    def check():
        assert jnp.allclose(jax.grad(loss)(w), jax.grad(reference)(w), atol=1e-6)
        assert jnp.allclose(jax.jit(jax.grad(loss))(w), jax.grad(reference)(w), atol=1e-6)
        assert jnp.allclose(jax.jacfwd(loss)(w), jax.grad(reference)(w), atol=1e-6)
        assert jnp.allclose(jax.vmap(loss)(jnp.stack([w, w])), reference(w), atol=1e-6)

    if leaks:
        with jax.checking_leaks():
            check()
    else:
        check()


def test_traced_methods_as_functions():
    def loss(w):
        cell = Cell(w)
        out, _ = jax.lax.scan(cell, jnp.zeros(()), jnp.arange(3.0))
        return out + jax.checkpoint(cell.apply)(1.0)

    def reference(w):
        c = jnp.zeros(())
        for x in range(3):
            c = jnp.tanh(w * c + x)
        return c + jnp.tanh(w)

    with jax.checking_leaks():
        assert jnp.allclose(jax.grad(loss)(0.5), jax.grad(reference)(0.5), atol=1e-6)
        assert jnp.allclose(
            jax.vmap(jax.grad(loss))(jnp.full(2, 0.5)), jax.grad(reference)(0.5), atol=1e-6
        )


def test_a_new_module_in_the_place_of_a_dead_one_is_not_taken_for_it():
    for value in range(20):
        layer = Layer(jnp.full(2, float(value)))
        assert jax.jit(layer)(jnp.ones(2)).tolist() == [value, value]
        assert filter_jit(layer)(jnp.ones(2)).tolist() == [value, value]
        del layer


def test_the_fields_layout_hashes_too():
    class F(Module, layout="fields"):
        f: Any
        n: Any = 1

    m = F(jnp.tanh)
    assert hash(m) == hash(jax.tree.map(lambda x: x, m))
    assert F(jnp.tanh) == F(jnp.tanh)
