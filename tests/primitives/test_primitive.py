"""Primitives with arbitrary arguments, and primitives whose batching rule is derived.

Most tests are run on the installed Equinox as well, which has helpers of the same names: rules written for them must
work here unchanged.
"""

from functools import partial

import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import vernal.primitives
from vernal.primitives import (
    create_vprim,
    filter_primitive_batching,
    filter_primitive_bind,
    filter_primitive_def,
    filter_primitive_jvp,
    filter_primitive_transpose,
    materialise_zeros,
)

LIBRARIES = {"vernal": vernal.primitives, "equinox": equinox.internal}


def both(test):
    return pytest.mark.parametrize("lib", LIBRARIES.values(), ids=LIBRARIES.keys())(test)


def assert_close(got, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), got, expected)


def primitive(name, impl, **rules):
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(impl)
    made.def_abstract_eval(rules.get("abstract", impl))
    mlir.register_lowering(made, mlir.lower_fun(impl, multiple_results=True))
    return made


# A linear solver with its own derivatives, as a library would write it: the operator is a tree with a function, a
# matrix and None in it, beside options that are no arrays.


def make_solve(lib):
    bind = lib.filter_primitive_bind

    def impl(operator, vector, options):
        matrix = operator["scale"](operator["matrix"])
        out = jnp.linalg.solve(matrix, vector[..., None])[..., 0]
        return {"value": out, "name": options["name"], "none": None, "count": jnp.array(1)}

    def abstract(operator, vector, options):
        assert isinstance(vector, jax.core.ShapedArray)
        assert isinstance(operator["matrix"], jax.core.ShapedArray)
        spec = jax.ShapeDtypeStruct(vector.shape, vector.dtype)
        count = jax.core.ShapedArray((), jnp.int32)
        out = jax.eval_shape(lambda x: x, spec)
        out = jax.core.ShapedArray(out.shape, out.dtype)
        return {"value": out, "name": options["name"], "none": None, "count": count}

    def jvp(primals, tangents):
        operator, vector, options = primals
        t_operator, t_vector, t_options = tangents
        assert jax.tree.leaves(t_options) == []
        assert t_operator["scale"] is None
        out = bind(solve_p, operator, vector, options)
        parts = [] if t_vector is None else [t_vector]
        if t_operator["matrix"] is not None:
            parts.append(-operator["scale"](t_operator["matrix"]) @ out["value"])
        # Linear in what is solved for, so that it can be transposed.
        t_out = bind(solve_p, operator, sum(parts), options)
        return out, {"value": t_out["value"], "name": None, "none": None, "count": None}

    def transpose(inputs, cotangents):
        operator, vector, options = inputs
        assert isinstance(vector, ad.UndefinedPrimal)
        nothing = jax.tree.map(lambda _: None, (operator, options))
        transposed = {**operator, "matrix": operator["matrix"].T}
        if cotangents["value"] is None:
            return nothing[0], None, nothing[1]
        solved = bind(solve_p, transposed, cotangents["value"], options)["value"]
        return nothing[0], solved, nothing[1]

    solve_p = lib.create_vprim(
        "solve",
        lib.filter_primitive_def(impl),
        lib.filter_primitive_def(abstract),
        lib.filter_primitive_jvp(jvp),
        lib.filter_primitive_transpose(transpose),
    )

    def solve(matrix, vector):
        operator = {"matrix": matrix, "scale": jnp.negative, "none": None}
        out = bind(solve_p, operator, -vector, {"name": "lu", "tolerance": 1e-3})
        assert out["name"] == "lu"
        assert out["none"] is None
        return out["value"] * out["count"].astype(vector.dtype)

    return solve


def plain_solve(matrix, vector):
    return jnp.linalg.solve(matrix, vector[:, None])[:, 0]


def problem(key, matrices=(), vectors=()):
    a, b = jax.random.split(key)
    matrix = jax.random.normal(a, (*matrices, 2, 2)) + 3 * jnp.eye(2)[(None,) * len(matrices)]
    return matrix, jax.random.normal(b, (*vectors, 2))


def loss_of(solve):
    return lambda matrix, vector: jnp.sum(jnp.sin(solve(matrix, vector)))


DERIVATIVES = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad of one": lambda f: jax.grad(f, 1),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, tuple(map(jnp.cos, args))),
    "hessian": lambda f: jax.hessian(f, 1),
    "grad of grad": lambda f: jax.grad(lambda *a: jnp.sum(jax.grad(f)(*a) ** 2), (0, 1)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@both
@pytest.mark.sample(6)
def test_a_solver_has_every_derivative(lib, derivative, getkey):
    args = problem(getkey())
    of = DERIVATIVES[derivative]
    with jax.checking_leaks():
        got = jax.jit(of(loss_of(make_solve(lib))))(*args)
    assert_close(got, jax.jit(of(loss_of(plain_solve)))(*args))


@pytest.mark.parametrize("derivative", ["grad", "grad of one", "jvp", "hessian"])
@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)])
@both
@pytest.mark.sample(6)
def test_a_solver_can_be_mapped_over_any_argument(lib, derivative, axes, getkey):
    args = problem(getkey(), (3,) * (axes[0] == 0), (3,) * (axes[1] == 0))
    of = DERIVATIVES[derivative]
    got = jax.jit(jax.vmap(of(loss_of(make_solve(lib))), axes))(*args)
    assert_close(got, jax.jit(jax.vmap(of(loss_of(plain_solve)), axes))(*args))


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None)])
@both
@pytest.mark.sample(3)
def test_the_gradient_of_a_mapped_solver_is_summed_over_the_batch(lib, axes, getkey):
    args = problem(getkey(), (3,) * (axes[0] == 0), (3,) * (axes[1] == 0))

    def total(solve):
        return lambda *args: jnp.sum(jax.vmap(loss_of(solve), axes)(*args))

    got = jax.grad(total(make_solve(lib)), (0, 1))(*args)
    assert_close(got, jax.grad(total(plain_solve), (0, 1))(*args))


@both
def test_maps_nest_with_axes_anywhere(lib, getkey):
    matrix, vector = problem(getkey(), (2, 3), (3,))
    matrix = jnp.moveaxis(matrix, 1, -1)

    def total(solve):
        inner = jax.vmap(loss_of(solve), in_axes=(-1, 0))
        return lambda *args: jnp.sum(jax.vmap(inner, in_axes=(0, None))(*args))

    got = jax.grad(total(make_solve(lib)), (0, 1))(matrix, vector)
    assert_close(got, jax.grad(total(plain_solve), (0, 1))(matrix, vector))


@both
def test_a_solver_inside_scan_cond_and_checkpoint(lib, getkey):
    args = problem(getkey())

    def chained(solve):
        def step(vector, _):
            return jax.lax.cond(vector[0] > -100, solve, lambda m, v: v, args[0], vector), None

        return lambda matrix, vector: jnp.sum(
            jax.lax.scan(jax.checkpoint(step), vector, None, length=2)[0] ** 2
        )

    got = jax.grad(chained(make_solve(lib)), 1)(*args)
    assert_close(got, jax.grad(chained(plain_solve), 1)(*args))


def test_a_mapped_primitive_is_one_equation():
    solve = make_solve(vernal.primitives)
    jaxpr = jax.make_jaxpr(jax.vmap(jax.vmap(solve)))(*problem(jax.random.key(0), (2, 3), (2, 3)))
    assert [str(e.primitive) for e in jaxpr.eqns].count("vprim") == 1
    assert "rules=vmap(vmap(solve))" in str(jaxpr)


def test_what_is_not_mapped_stays_unmapped():
    """Forward-mode Jacobians map only the tangents, and insist that values are not mapped."""
    solve = make_solve(vernal.primitives)
    matrix, vector = problem(jax.random.key(0))
    got = jax.jacfwd(jax.jacfwd(loss_of(solve), 1), 1)(matrix, vector)
    assert_close(got, jax.hessian(loss_of(plain_solve), 1)(matrix, vector))
    mapped = jax.vmap(lambda x: (x, solve(matrix, vector)), out_axes=(0, None))
    assert_close(mapped(jnp.ones(3))[1], plain_solve(matrix, vector))


def make_scaled_sum():
    """x - mean of x over the axis "batch", by its name."""

    def jvp(primals, tangents):
        return centre.bind(*primals), centre.bind(*tangents)

    centre = create_vprim(
        "centre",
        lambda x: [x - jax.lax.pmean(x, "batch")],
        lambda x: [x],
        jvp,
        lambda cts, x: centre.bind(*cts),
    )
    return lambda x: centre.bind(x)[0]


def test_a_rule_may_use_the_name_of_the_mapped_axis():
    x, ct = jnp.arange(3.0), jnp.array([1.0, -2.0, 5.0])
    fn = jax.vmap(make_scaled_sum(), axis_name="batch")
    expected = jax.vmap(lambda x: x - jax.lax.pmean(x, "batch"), axis_name="batch")
    assert_close(fn(x), expected(x))
    assert_close(jax.vjp(fn, x)[1](ct), jax.vjp(expected, x)[1](ct))


@pytest.mark.parametrize("jit", [False, True])
def test_a_sharded_batch_stays_where_it_is(jit):
    def jvp(primals, tangents):
        return cube.bind(*primals), [3 * primals[0] ** 2 * tangents[0]]

    cube = create_vprim("cube", lambda x: [x**3], lambda x: [x], jvp, lambda cts, x: [None])
    x = np.arange(16, dtype=np.float32).reshape(8, 2)
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        sharded = jax.device_put(x, P("data"))
        fn = jax.vmap(lambda x: cube.bind(x)[0])
        grad = jax.grad(lambda x: jnp.sum(fn(x)))
        fn, grad = (jax.jit(fn), jax.jit(grad)) if jit else (fn, grad)
        for got, expected in [(fn(sharded), x**3), (grad(sharded), 3 * x**2)]:
            assert jax.typeof(got).sharding.spec == P("data", None)
            assert_close(jax.device_get(got), expected)


def test_a_mapped_primitive_inside_shard_map():
    solve = make_solve(vernal.primitives)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    args = problem(jax.random.key(1), (4,), (4,))
    specs = (P("data"), P("data"))

    def total(solve):
        def per_device(matrix, vector):
            return jax.lax.psum(jnp.sum(jax.vmap(loss_of(solve))(matrix, vector)), "data")

        return jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)

    expected = jax.vmap(loss_of(plain_solve))(*args).sum()
    assert_close(jax.jit(total(solve))(*args), expected)


# One primitive that returns what it was given, to see what each kind of rule is given.

ARGS = (
    jnp.ones(()),
    np.ones(2, np.float32),
    1,
    2.0,
    True,
    "text",
    None,
    np.float32(3),
    {"array": jnp.arange(3), "function": jnp.sin},
)


@both
def test_arrays_are_traced_and_all_the_rest_is_passed_as_it_is(lib):
    seen = []

    def impl(*args):
        seen.append(args)
        return args

    echo_p = primitive("echo", lib.filter_primitive_def(impl))
    out = lib.filter_primitive_bind(echo_p, *ARGS)
    assert jax.tree.structure(out) == jax.tree.structure(ARGS)
    assert out[2:7] == ARGS[2:7]
    assert out[8]["function"] is jnp.sin
    assert_close([out[0], out[1], out[7], out[8]["array"]], [1.0, np.ones(2), 3.0, np.arange(3)])

    # Under jit, everything that is an array is one that has no value yet.
    jaxpr, spec = jax.make_jaxpr(
        lambda *x: lib.filter_primitive_bind(echo_p, *x, *ARGS[2:])[1], return_shape=True
    )(*ARGS[:2])
    assert (spec.shape, spec.dtype) == ((2,), jnp.float32)
    assert [str(e.primitive) for e in jaxpr.eqns] == ["echo"]
    abstract = seen[-1]
    arrays = [abstract[i] for i in (0, 1, 7)] + [abstract[8]["array"]]
    assert all(isinstance(x, jax.core.ShapedArray) for x in arrays)
    assert abstract[2:7] == ARGS[2:7]


@both
def test_an_abstract_result_may_be_a_shape_and_dtype(lib):
    def abstract(x):
        return {"x": jax.core.ShapedArray(x.shape, x.dtype), "text": "text"}

    p = primitive(
        "named",
        lib.filter_primitive_def(lambda x: {"x": x, "text": "text"}),
        abstract=lib.filter_primitive_def(abstract),
    )
    out = []
    x = jax.jit(lambda x: out.append(lib.filter_primitive_bind(p, x)) or out[-1]["x"])(jnp.ones(2))
    assert out[0]["text"] == "text"
    assert_close(x, np.ones(2))


def test_an_abstract_result_may_be_a_shape_dtype_struct():
    p = primitive(
        "doubled",
        filter_primitive_def(lambda f, x: (f(x), "text")),
        abstract=filter_primitive_def(lambda f, x: (jax.eval_shape(f, x), "text")),
    )
    x, text = jax.jit(lambda x: filter_primitive_bind(p, jnp.negative, x)[:1])(jnp.ones(2)), "text"
    assert_close(x[0], -np.ones(2))
    assert filter_primitive_bind(p, jnp.negative, jnp.ones(2))[1] == text


@both
def test_equal_calls_do_not_share_their_results(lib):
    """Two calls that only differ in what they return beside arrays."""
    p = primitive("same", lib.filter_primitive_def(lambda x, text: (x, text)))

    @jax.jit
    def f(x):
        first, one = lib.filter_primitive_bind(p, x, "a")
        second, two = lib.filter_primitive_bind(p, first, "b")
        assert (one, two) == ("a", "b")
        return second

    assert f(jnp.ones(())) == 1.0


@both
def test_a_jvp_rule_is_told_what_has_no_tangent(lib):
    seen = []

    def rule(primals, tangents):
        seen.append(tangents)
        return (primals[0] * 2, "text", primals[8]), (
            tangents[0] * 2,
            None,
            {"array": None, "function": None},
        )

    p = primitive("doubled", lib.filter_primitive_def(lambda *a: (a[0] * 2, "text", a[8])))
    ad.primitive_jvps[p] = lib.filter_primitive_jvp(rule)

    def f(x):
        out = lib.filter_primitive_bind(p, x, *ARGS[1:])
        assert out[1] == "text"
        return out[0]

    assert jax.jvp(f, (1.0,), (1.0,)) == (2.0, 2.0)
    assert seen == [
        (1.0, None, None, None, None, None, None, None, {"array": None, "function": None})
    ]


@both
def test_a_transposition_rule_is_told_what_to_transpose(lib):
    seen = []

    def rule(inputs, cotangents):
        seen.append((inputs, cotangents))
        return (3 * cotangents["a"], None, None)

    p = primitive(
        "both",
        lib.filter_primitive_def(lambda x, y, text: {"a": x, "b": y, "text": text}),
    )
    ad.primitive_transposes[p] = lib.filter_primitive_transpose(rule)

    def f(x):
        return lib.filter_primitive_bind(p, x, jnp.full(2, 2.0), "text")["a"]

    assert jax.linear_transpose(f, 1.0)(1.0) == (3.0,)
    ((x, y, text), cotangents) = seen[0]
    assert isinstance(x, ad.UndefinedPrimal)
    assert_close(y, np.full(2, 2.0))
    assert text == "text"
    assert cotangents == {"a": 1.0, "b": None, "text": None}


@both
def test_a_transposition_rule_may_ask_for_zeros(lib):
    p = primitive("both", lib.filter_primitive_def(lambda x, y, text: {"a": x, "b": y, "t": text}))

    @lib.filter_primitive_transpose(materialise_zeros=True)
    def rule(inputs, cotangents):
        # Written without a thought for zeros, or for what was asked.
        return (cotangents["a"], cotangents["b"] + 0.0, None)

    ad.primitive_transposes[p] = rule

    def f(x):
        return lib.filter_primitive_bind(p, x, jnp.full(2, 2.0), "text")["a"]

    assert jax.linear_transpose(f, 1.0)(1.0) == (1.0,)


@both
def test_a_batching_rule_is_told_the_axes(lib):
    seen = []

    def rule(primals, axes):
        seen.append(axes)
        x, y, text = primals
        return (x, y, text), (axes[0], None, None)

    p = primitive("pair", lib.filter_primitive_def(lambda *args: args))
    batching.primitive_batchers[p] = lib.filter_primitive_batching(rule)
    y = jnp.ones(2)
    x, y = jax.vmap(
        lambda x: lib.filter_primitive_bind(p, x, y, "text")[:2], in_axes=1, out_axes=(1, None)
    )(jnp.arange(6.0).reshape(2, 3))
    assert_close(x, np.arange(6.0).reshape(2, 3))
    assert_close(y, np.ones(2))
    assert seen == [(1, None, None)]


def test_a_batching_rule_may_be_told_of_the_axis_itself():
    def rule(axis, primals, axes):
        return (primals[0], f"{axis.size} of {axis.name}"), (axes[0], None)

    p = primitive("described", filter_primitive_def(lambda x: (x, "one")))
    batching.fancy_primitive_batchers[p] = filter_primitive_batching(rule)
    said = []

    def f(x):
        x, text = filter_primitive_bind(p, x)
        said.append(text)
        return x

    jax.vmap(f, axis_name="batch")(jnp.ones(3))
    assert said == ["3 of batch"]


def test_a_rule_that_is_not_wrapped_may_answer():
    p = primitive("passed", filter_primitive_def(lambda x, text: (x, text)))
    batching.primitive_batchers[p] = lambda args, dims, **params: ([2 * args[0]], dims)
    said = []

    def f(x):
        x, text = filter_primitive_bind(p, x, "text")
        said.append(text)
        return x

    assert_close(jax.vmap(f)(jnp.ones(3)), np.full(3, 2.0))
    assert said == ["text"]


@pytest.mark.parametrize(
    "tangents, text",
    [
        ((None,), "tangents that do not match the result"),
        ((1.0, "text"), "1 for leaves that are not arrays"),
    ],
    ids=["structure", "stray"],
)
def test_tangents_that_do_not_fit_are_refused(tangents, text):
    p = primitive("pair", filter_primitive_def(lambda x: (x, "text")))
    ad.primitive_jvps[p] = filter_primitive_jvp(lambda primals, _: ((primals[0], "text"), tangents))
    with pytest.raises(TypeError, match=text):
        jax.jvp(lambda x: filter_primitive_bind(p, x)[0], (1.0,), (1.0,))


def test_cotangents_that_do_not_fit_are_refused():
    p = primitive("pair", filter_primitive_def(lambda x, text: (x, text)))
    ad.primitive_transposes[p] = filter_primitive_transpose(lambda inputs, cts: cts[0])
    with pytest.raises(TypeError, match="cotangents that do not match the arguments"):
        jax.linear_transpose(lambda x: filter_primitive_bind(p, x, "text")[0], 1.0)(1.0)


def test_axes_that_do_not_fit_are_refused():
    p = primitive("pair", filter_primitive_def(lambda x: (x, "text")))
    rule = filter_primitive_batching(lambda primals, axes: ((primals[0], "text"), axes[0]))
    batching.primitive_batchers[p] = rule
    with pytest.raises(TypeError, match="axes that do not match the result"):
        jax.vmap(lambda x: filter_primitive_bind(p, x)[0])(jnp.ones(3))


@pytest.mark.parametrize(
    "primal",
    [jnp.ones(2), np.ones(2, np.float32), np.float32(1), 1.0, jnp.arange(2), 3, True, "text", None],
    ids=str,
)
def test_zeros_are_made_for_what_has_tangents(primal):
    got = materialise_zeros(primal, None)
    expected = equinox.internal.materialise_zeros(primal, None)
    assert (got is None) == (expected is None)
    if got is not None:
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert not np.any(got) or got.dtype == jax.dtypes.float0


def test_a_tangent_that_is_there_is_left_alone():
    tangent, spec = jnp.ones(2), jax.ShapeDtypeStruct((2,), jnp.float32)
    assert materialise_zeros(tangent, tangent) is tangent
    assert materialise_zeros(spec, None) is None
    assert_close(materialise_zeros(spec, None, allow_struct=True), np.zeros(2))
