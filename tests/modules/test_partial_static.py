"""`Partial` and `Static`."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import Partial, Static, filter_jit


def collect(*args, **kwargs):
    return args, kwargs


def test_stored_arguments_come_first():
    assert Partial(collect, 1, a=2)(3, b=4) == ((1, 3), {"a": 2, "b": 4})
    assert Partial(collect)() == ((), {})


def test_a_keyword_cannot_be_given_twice():
    with pytest.raises(
        TypeError, match=r"keyword argument `a` was given twice[\s\S]*stored ones: a, b"
    ):
        Partial(collect, a=1, b=2)(a=3)


def test_a_keyword_may_be_called_like_our_own_parameters():
    assert Partial(collect, func=1, args=2, keywords=3)() == (
        (),
        {"func": 1, "args": 2, "keywords": 3},
    )
    with pytest.raises(TypeError, match="missing .* argument: 'func'"):
        Partial()


def test_arrays_in_a_partial_are_traced_and_trained():
    p = Partial(jnp.multiply, jnp.ones(2))
    assert len(jax.tree.leaves(p)) == 1
    grads = jax.grad(lambda p: jnp.sum(p(3.0)))(p)
    assert (grads.args[0] == 3).all()
    count = []
    f = filter_jit(lambda p: count.append(1) or p(2.0))
    f(Partial(jnp.multiply, jnp.ones(2)))
    assert (f(Partial(jnp.multiply, jnp.zeros(2))) == 0).all()
    assert len(count) == 1


def test_partials_compare_by_value():
    x = jnp.ones(2)
    assert Partial(collect, x, a="b") == Partial(collect, jnp.ones(2), a="b")
    assert Partial(collect, x) != Partial(collect, jnp.zeros(2))
    assert Partial(collect, 1) != Partial(collect, 1.0)
    assert Partial(collect, x) != Partial(copy.copy, x)


def test_a_partial_of_a_partial_and_of_a_method():
    inner = Partial(collect, 1)
    assert Partial(inner, 2)(3) == ((1, 2, 3), {})
    assert Partial(Static("text").__repr__)()


def test_a_partial_maps_scans_and_pickles():
    p = Partial(jnp.multiply, jnp.array([1.0, 2.0]))
    assert jax.vmap(p)(jnp.ones((3, 2))).shape == (3, 2)
    again = pickle.loads(pickle.dumps(p))
    assert jax.tree.structure(again) == jax.tree.structure(p)
    assert again.func is jnp.multiply


@pytest.mark.parametrize(
    "value",
    ["text", 1, None, [1, "a"], {"k": (1, 2.0)}, jnp.tanh, np.ones(2), frozenset({1}), Static(1)],
)
def test_static_holds_anything_without_leaves(value):
    s = Static(value)
    assert jax.tree.leaves(s) == []
    assert type(s.value) is type(value)
    assert jax.tree.structure(s) == jax.tree.structure(Static(value))
    assert jax.jit(lambda s: s)(s) == s
    assert hash(s) == hash(Static(value))


def test_statics_compare_leaf_by_leaf_and_exactly():
    assert Static(np.ones(2)) == Static(np.ones(2))
    assert Static(np.ones(2)) != Static(np.zeros(2))
    assert Static([1, "a"]) == Static([1, "a"])
    for a, b in [(1, 1.0), (1, True), (0.0, -0.0), ([1], (1,)), ("a", "b"), ([1], [1, 2])]:
        assert Static(a) != Static(b)
        assert jax.tree.structure(Static(a)) != jax.tree.structure(Static(b))
    x = jnp.ones(2)
    assert Static(x) == Static(x)
    assert Static(x) != Static(jnp.ones(2))


def test_static_refuses_what_can_change():
    for value in ({1}, [{1}], np.array([[1]], object), bytearray(b"a")):
        with pytest.raises(
            ValueError, match=r"this value can change in place[\s\S]*\.value[\s\S]* of .*Static"
        ):
            Static(value)
    array = np.ones(2)
    kept = Static(array)
    array[0] = 5.0
    assert kept == Static(np.ones(2)) and kept.value[0] == 1.0


def test_static_passes_through_scan_cond_vmap_and_grad():
    s = Static(("activation", jnp.tanh))
    (carry, again), _ = jax.lax.scan(lambda c, _: (c, None), (jnp.ones(1), s), None, length=2)
    assert again == s
    assert jax.lax.cond(True, lambda s: s, lambda s: s, s) == s
    assert jax.vmap(lambda s, x: (s, x), out_axes=(None, 0))(s, jnp.ones(2))[0] == s
    assert jax.grad(lambda t: t[1].sum())((s, jnp.ones(2)))[0] == s


@pytest.mark.parametrize("value", [jax.nn.relu, [jax.nn.gelu, {"k": jnp.add}], "text"])
@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_statics_copy_and_pickle(value, again):
    s = Static(value)
    assert again(s) == s
    assert jax.tree.structure(again(s)) == jax.tree.structure(s)


def test_a_change_of_a_static_value_compiles_again():
    count = []
    f = jax.jit(lambda s: count.append(s.value))
    for value in ("a", "b", "a", ["a"], ["a"]):
        f(Static(value))
    assert count == ["a", "b", ["a"]]


def test_a_traced_value_is_no_structure():
    with pytest.raises(ValueError, match=r"a traced value cannot be structure(.|\n)*value\['a'\]"):
        jax.jit(lambda x: Static({"a": x}))(1.0)


def test_arrays_in_it_compare_by_identity_and_put_nothing_into_a_program():
    one, same = jnp.ones(()), jnp.ones(())
    assert Static(one) == Static(one) and Static(one) != Static(same)
    assert Static([one]).value[0] is one
    program = jax.make_jaxpr(lambda x: (x, Static(one) == Static(same))[0])(1.0)
    assert not program.jaxpr.eqns


def test_a_call_with_one_of_many_looks_at_one():
    assert len({hash(jax.tree.structure(Static(i))) for i in range(8)} | {0}) > 1
