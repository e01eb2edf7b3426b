"""`filter_cond` and `filter_switch`."""

import functools
import gc
import inspect
import re
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import error_if, filter_cond, filter_switch
from vernal.loops import while_loop
from vernal.runtime import RuntimeCheckError


class Scale(vernal.Module):
    by: jax.Array
    activation: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.by * x)

    def negative(self, x: jax.Array) -> jax.Array:
        return -self.by * x


def close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


PREDICATES = {
    "python": (True, False),
    "numpy": (np.bool_(True), np.array(False)),
    "jax": (jnp.array(True), jnp.array(False)),
}


@pytest.mark.parametrize("kind", PREDICATES)
def test_it_agrees_with_jax(kind, getkey):
    x = jax.random.normal(getkey(), (3,))
    y = jax.random.normal(getkey(), (3,))

    def true_fn(x, y):
        return x + y, {"a": x}

    def false_fn(x, y):
        return x * y, {"a": y}

    for pred in PREDICATES[kind]:
        for args in ((pred, true_fn, false_fn, x, y),):
            close(filter_cond(*args), jax.lax.cond(*args))
            close(vernal.filter_jit(filter_cond)(*args), jax.lax.cond(*args))


@pytest.mark.parametrize("index", [-7, 0, 1, 2, 9, np.int32(1), jnp.array(2), jnp.array(-3)])
def test_the_index_is_clamped_as_jax_does(index):
    branches = [lambda x: x, lambda x: 2 * x, lambda x: x**2]
    x = jnp.array(3.0)
    close(filter_switch(index, branches, x), jax.lax.switch(index, branches, x))
    close(filter_switch(index, tuple(branches[:1]), x), x)


@pytest.mark.parametrize(
    ("index", "at", "count"),
    [
        *[(jnp.uint32(n), -1, 3) for n in (2**31, 2**32 - 1)],
        *[(n, -1, 3) for n in (2**40, 2**70, np.array(2**40), np.array(2**64 - 1, np.uint64))],
        *[(n, 0, 3) for n in (-(2**40), -(2**70), np.array(-(2**40)))],
        # More branches than the dtype can count.
        *[(jnp.array(n, jnp.int4), n, 10) for n in (0, 3)],
        *[(jnp.array(n, jnp.uint4), n, 20) for n in (0, 3)],
        *[(jnp.array(n, jnp.int8), n, 130) for n in (0, 3)],
    ],
)
@pytest.mark.sample(3)
def test_an_index_of_any_size_and_dtype_is_clamped(index, at, count):
    branches = [lambda x, k=k: k * x for k in range(count)]
    assert filter_switch(index, branches, jnp.array(1)) == range(count)[at]
    if isinstance(index, jax.Array):
        got = jax.vmap(lambda i: filter_switch(i, branches, jnp.array(1)))(index[None])
        assert got.tolist() == [range(count)[at]]


def test_operands_and_results_are_arbitrary_objects(getkey):
    model = Scale(jax.random.normal(getkey(), (3,)), jnp.tanh)
    marker = object()

    def true_fn(model, tag, fn):
        return vernal.tree_at(lambda m: m.by, model, fn(model.by)), tag, marker, None

    def false_fn(model, tag, fn):
        return model, tag, marker, None

    for pred in (True, False):
        out, tag, mark, nothing = filter_cond(
            jnp.array(pred), true_fn, false_fn, model, "t", jnp.sin
        )
        assert type(out) is Scale and out.activation is jnp.tanh
        assert tag == "t" and mark is marker and nothing is None
        close(out.by, jnp.sin(model.by) if pred else model.by)


def test_branches_are_modules_methods_partials_and_closures(getkey):
    x = jax.random.normal(getkey(), (3,))
    model = Scale(jnp.array(2.0), jnp.tanh)
    theirs = eqx.nn.Lambda(jnp.cos)
    branches = [model, model.negative, functools.partial(jnp.multiply, x), theirs, jax.nn.relu]
    for i, branch in enumerate(branches):
        close(filter_switch(jnp.array(i), branches, x), branch(x))

    @jax.jit
    def closing(x, i):
        return filter_switch(i, [lambda: x, lambda: jnp.sin(x)])

    close(closing(x, 1), jnp.sin(x))


def test_gradients_reach_operands_modules_and_captured_values(getkey):
    x = jax.random.normal(getkey(), (3,))

    def ours(values, pred):
        by, x, captured = values
        model = Scale(by, jnp.tanh)
        return jnp.sum(filter_cond(pred, model, lambda x: captured * x**2, x))

    def theirs(values, pred):
        by, x, captured = values
        return jnp.sum(jax.lax.cond(pred, lambda: jnp.tanh(by * x), lambda: captured * x**2))

    values = jnp.array(0.7), x, jnp.array(3.0)
    for pred in (True, False):
        close(jax.grad(ours)(values, pred), jax.grad(theirs)(values, pred))
        jitted = jax.jit(jax.grad(ours))(values, jnp.array(pred))
        close(jitted, jax.grad(theirs)(values, pred))
        assert (
            jax.jvp(ours, (values, pred), (values, np.zeros((), jax.dtypes.float0)))[1].shape == ()
        )


def test_a_mapped_predicate_selects(getkey):
    x = jax.random.normal(getkey(), (5,))
    fn = vernal.filter_vmap(lambda x: filter_cond(x > 0, jnp.sin, lambda x: x**2, x))
    close(fn(x), jnp.where(x > 0, jnp.sin(x), x**2))
    index = jnp.array([0, 1, 2, 9, -1])
    fn = vernal.filter_vmap(lambda i, x: filter_switch(i, [jnp.sin, jnp.cos, jnp.abs], x))
    expected = jax.vmap(lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos, jnp.abs], x))(index, x)
    close(fn(index, x), expected)


def test_weak_types_are_promoted():
    def strong(x):
        return jnp.ones((), jnp.float32)

    for branches in ((strong, lambda x: jnp.asarray(2.0)), (lambda x: jnp.asarray(2.0), strong)):
        args = (jnp.array(True), *branches, jnp.array(1.0))
        ours, jaxs = filter_cond(*args), jax.lax.cond(*args)
        assert ours.dtype == jaxs.dtype and ours.weak_type == jaxs.weak_type


def test_the_same_functions_are_traced_once():
    traced = []

    def true_fn(x, tag):
        traced.append(tag)
        return x

    def false_fn(x, tag):
        return -x

    for _ in range(3):
        filter_cond(jnp.array(True), true_fn, false_fn, jnp.ones(2), "a")
    assert traced == ["a"]
    filter_cond(jnp.array(True), true_fn, false_fn, jnp.ones(2), "b")
    assert traced == ["a", "b"]
    vernal.clear_caches()
    filter_cond(jnp.array(True), true_fn, false_fn, jnp.ones(2), "b")
    assert traced == ["a", "b", "b"]


def test_modules_of_one_structure_are_traced_once():
    traced = []

    def activation(x):
        traced.append(1)
        return x

    for i in range(3):
        model = Scale(jnp.array(float(i)), activation)
        close(filter_cond(True, model, jnp.negative, jnp.array(2.0)), jnp.array(2.0 * i))
    assert len(traced) == 1


def test_many_structures_of_operands_do_not_pile_up():
    def branch(x, n):
        return x

    for n in range(140):
        with jax.disable_jit():
            filter_cond(True, branch, branch, jnp.ones(()), n)
    close(filter_cond(True, branch, branch, jnp.ones(()), 0), jnp.ones(()))


def test_branches_are_not_kept_alive():
    class Big:
        pass

    held = Big()
    gone = weakref.ref(held)

    def branch(x, held=held):
        return x

    filter_cond(True, branch, branch, jnp.ones(2))
    del branch, held
    jax.clear_caches()
    gc.collect()
    assert gone() is None


def test_no_tracer_outlives_its_trace():
    def branch(fn, x):
        return fn(x)

    with jax.checking_leaks():
        jax.jit(lambda x: filter_cond(True, branch, branch, lambda y: x * y, x))(jnp.ones(2))


def test_an_error_of_a_branch_is_its_own():
    def fails(x):
        raise TypeError("no, says the user")

    with pytest.raises(TypeError, match="^no, says the user"):
        filter_cond(True, fails, lambda x: x, jnp.ones(2))


def test_a_traced_size_names_the_argument():
    def fn(x, n):
        return jnp.zeros(n)

    with pytest.raises(vernal.transforms.TracedShapeError, match="(?s)`fn`.*argument `n`"):
        filter_cond(True, fn, fn, 1.0, jnp.array(3))
    with pytest.raises(TypeError, match="argument `n`"):
        filter_switch(0, [lambda n: jnp.arange(n)] * 2, jnp.array(3))


X = jnp.ones((3, 2))
WRONG = {
    "number": (lambda: filter_cond(1, jnp.sin, jnp.cos, X), "(?s)must be a scalar bool.*got: 1\n"),
    "array of ints": (
        lambda: filter_cond(jnp.array(1), jnp.sin, jnp.cos, X),
        "must be a scalar bool",
    ),
    "several": (
        lambda: filter_cond(X > 0, jnp.sin, jnp.cos, X),
        r"(?s)`pred`.*got: bool\[3,2\].*jnp.any",
    ),
    "bool index": (
        lambda: filter_switch(True, [jnp.sin], X),
        "(?s)must be a scalar integer.*`index`.*got: True",
    ),
    "float index": (
        lambda: filter_switch(jnp.array(1.0), [jnp.sin], X),
        "must be a scalar integer",
    ),
    # Unwrapped: the type checker that the tests run under would answer first.
    "not callable": (
        lambda: inspect.unwrap(filter_cond)(True, X, jnp.sin, X),
        "filter_cond needs a function",
    ),
    "not callable branch": (
        lambda: inspect.unwrap(filter_switch)(0, [jnp.sin, "cos"], X),
        "filter_switch needs a function",
    ),
    "structure": (
        lambda: filter_cond(True, lambda x: (x, x), lambda x: x, X),
        r"(?s)branches return results that do not match.*true_fn \(`<lambda>`\) and false_fn.*expected tuple",
    ),
    "shape": (
        lambda: filter_cond(True, lambda x: {"k": [x]}, lambda x: {"k": [x.T]}, X),
        r"result\['k'\]\[0\]: expected f32\[3,2\].*got f32\[2,3\]",
    ),
    "dtype": (
        lambda: filter_cond(True, lambda x: x, lambda x: x > 0, X),
        r"result: expected f32\[3,2\].*got bool\[3,2\]",
    ),
    "static": (
        lambda: filter_switch(0, [lambda x: (x, "a"), lambda x: (x, "a"), lambda x: (x, "b")], X),
        r"(?s)branches\[0\] \(`<lambda>`\) and branches\[2\].*result\[1\]: expected 'a', got 'b'",
    ),
    "number and array": (
        lambda: filter_cond(True, lambda x: 1.0, lambda x: x, X),
        r"(?s)result: expected 1.0, got f32\[3,2\].*jnp.asarray",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_by_path(case):
    call, text = WRONG[case]
    for _ in range(2):
        with pytest.raises(TypeError, match=text):
            call()


def test_no_branch_is_an_error():
    with pytest.raises(ValueError, match="filter_switch needs at least one branch"):
        filter_switch(0, [], X)


def checked(x):
    """A check in every branch, each of which fails for what the other branch is for."""
    return filter_cond(
        x >= 0,
        lambda x: jnp.sqrt(error_if(x, x < 0, "not for the negative")),
        lambda x: error_if(2 * x, x >= 0, "only for the negative"),
        x,
    )


def inside_of(wrap):
    return lambda x: filter_switch(
        (x < 0).astype(int), [wrap(lambda x: error_if(x, x < 0, "negative")), jnp.sin], x
    )


@pytest.mark.parametrize(
    "fn",
    [
        checked,
        inside_of(lambda f: f),
        inside_of(jax.jit),
        inside_of(jax.checkpoint),
        inside_of(lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0]),
        inside_of(
            lambda f: (
                lambda x: while_loop(
                    lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1])), (0, x), kind="checkpointed"
                )[1]
            )
        ),
        inside_of(lambda f: lambda x: filter_cond(x < 1, f, f, x)),
    ],
)
@pytest.mark.sample(3)
def test_checks_see_only_the_elements_that_take_their_branch(fn):
    xs = jnp.array([4.0, -1.0, 0.25])
    for of_one in (fn, jax.grad(fn), lambda x: jax.jvp(fn, (x,), (x,))[1]):
        expected = jnp.stack([of_one(x) for x in xs])
        close(jax.vmap(of_one)(xs), expected)
        close(vernal.filter_jit(jax.vmap(of_one))(xs), expected)
        close(jax.vmap(jax.vmap(of_one))(xs[:, None])[:, 0], expected)


@pytest.mark.parametrize("batched", [True, False])
def test_checks_in_a_branch_that_is_taken_fail(batched):
    def fn(x):
        return filter_cond(x > 1, lambda x: error_if(x, x > 3, "too large"), jnp.sin, x)

    text = "too large\n  at batch index (2,) (1 of 3)" if batched else "too large"
    with pytest.raises(RuntimeCheckError, match=re.escape(text)):
        jax.block_until_ready(
            vernal.filter_jit(jax.vmap(fn) if batched else fn)(
                jnp.array([0.4, 2.0, 4.0]) if batched else jnp.array(4.0)
            )
        )
