"""What the words of the table in `docs/from-equinox.md` promise beyond what `test_calls.py` compares."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal import nn
from vernal.compat import equinox as compat
from vernal.compat._differences import public_names

KEY = jax.random.key(0)
CLAIMS = {}


def claim(*names):
    """Marks a function as the test of what the table says of these names."""

    def decorate(function):
        CLAIMS.update(dict.fromkeys(names, function))
        return function

    return decorate


@claim("Module", "Partial", "static_field", "field", "filter_grad", "filter_value_and_grad")
def only_trainable_arrays_are_leaves_and_have_gradients():
    class Model(vernal.Module):
        weight: jax.Array
        activation: object
        buffer: jax.Array = vernal.field(trainable=False)
        name: str = vernal.field(static=True, default="model")

    model = Model(jnp.ones(2), jnp.tanh, jnp.ones(2))
    assert len(jax.tree.leaves(model)) == 2

    def loss(model, x):
        return jnp.sum(model.activation(model.weight * x) + model.buffer)

    plain = jax.jit(jax.grad(loss))(model, jnp.ones(2))
    last, _ = jax.lax.scan(lambda m, x: (m, loss(m, x)), model, jnp.ones((3, 2)))
    assert jax.tree.structure(plain) == jax.tree.structure(last) == jax.tree.structure(model)
    assert jax.tree.leaves(optax.sgd(1.0).init(model)) == []
    value, gradient = vernal.filter_value_and_grad(loss)(model, jnp.ones(2))
    assert gradient.buffer == vernal.NoGradient() and value.shape == ()
    np.testing.assert_allclose(gradient.weight, plain.weight)
    of_x = vernal.filter_grad(loss, wrt="x")(model, jnp.ones(2))
    np.testing.assert_allclose(of_x, plain.weight)
    assert jax.tree.leaves(vernal.Partial(loss, model.weight, "a")) == [model.weight]


@claim("filter_vjp", "filter_jacfwd", "filter_jacrev", "filter_hessian", "combine")
def what_is_not_differentiated_is_marked_and_in_compat_none():
    def f(tree):
        return tree["x"] ** 2 * tree["n"]

    tree = {"x": jnp.array(3.0), "n": 2}
    for room, missing in ((vernal, vernal.NoGradient()), (compat, None)):
        assert room.filter_grad(f)(tree) == {"x": 12.0, "n": missing}
        assert room.filter_value_and_grad(f)(tree) == (18.0, {"x": 12.0, "n": missing})
        assert room.filter_vjp(f, tree)[1](jnp.array(1.0)) == ({"x": 12.0, "n": missing},)
        out, pullback, aux = room.filter_vjp(lambda tree: (f(tree), "aux"), tree, has_aux=True)
        assert (out, pullback(jnp.array(1.0))[0]["n"], aux) == (18.0, missing, "aux")
        for jacobian in (room.filter_jacfwd, room.filter_jacrev):
            assert jacobian(f)(tree) == {"x": 12.0, "n": missing}
        assert room.filter_hessian(f)(tree)["x"] == {"x": 4.0, "n": missing}
        # As a decorator with options, which keeps the name.
        decorated = room.filter_grad(has_aux=True)(lambda tree: (f(tree), "aux"))
        assert decorated(tree) == ({"x": 12.0, "n": missing}, "aux")
        assert room.filter_grad(f).__name__ == "f"
        assert room.combine({"x": None, "n": missing}, tree) == tree


@claim("apply_updates")
def updates_that_do_not_fit_are_named():
    with pytest.raises(TypeError, match=r"updates\['x'\]"):
        vernal.apply_updates({"x": jnp.ones(2)}, {"x": jnp.ones(3)})
    half, ones = jnp.ones(2, jnp.bfloat16), jnp.ones(2)
    with jax.numpy_dtype_promotion("standard"):
        assert vernal.apply_updates(half, ones).dtype == jnp.bfloat16
        assert compat.apply_updates(half, ones).dtype == jnp.float32


@claim("EquinoxRuntimeError", "EquinoxTracetimeError", "tree_inference", "StrictConfig")
def names_are_those_of_vernal():
    assert compat.EquinoxRuntimeError is vernal.runtime.RuntimeCheckError
    assert compat.EquinoxTracetimeError is vernal.runtime.RuntimeCheckError
    assert compat.tree_inference is nn.inference_mode

    class Base(vernal.Module, strict=True):
        def method(self):
            return 1

    assert Base().method() == 1
    with pytest.raises(TypeError, match="final"):
        type("Derived", (Base,), {"method": lambda self: 2}, strict=True)


@claim("error_if", "branched_error_if")
def checks_name_the_elements_and_the_place():
    def positive(x):
        return compat.error_if(x, x < 0, "it is negative")

    with pytest.raises(compat.EquinoxRuntimeError, match="it is negative") as caught:
        vernal.filter_jit(jax.vmap(positive))(jnp.array([1.0, -1.0, 2.0, -3.0]))
    assert "(1,), (3,)" in str(caught.value) and "test_differences.py" in str(caught.value)
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = vernal.filter_jit(
        jax.shard_map(positive, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i"))
    )
    np.testing.assert_array_equal(spread(jnp.ones(8)), 1.0)
    with pytest.raises(compat.EquinoxRuntimeError, match="it is negative"):
        spread(-jnp.ones(8))

    def choose(i):
        return compat.branched_error_if(i, i >= 0, i, ["first", "second"])

    with pytest.raises(compat.EquinoxRuntimeError, match="second"):
        vernal.filter_jit(choose)(jnp.array(1))
    with pytest.raises(compat.EquinoxRuntimeError, match="5"):
        vernal.filter_jit(choose)(jnp.array(5))


@claim("filter_jit")
def library_functions_are_compared_by_value():
    step = vernal.filter_jit(lambda opt, x: opt.update(x, opt.init(x))[0])
    for _ in range(3):
        assert step(optax.sgd(2.0), jnp.ones(())) == -2.0
    assert step.trace_count == 1
    step(optax.sgd(2.0), jnp.ones(2))
    assert "f32[2]" in str(step.explain())
    cast = vernal.filter_jit(lambda x, dtype: x.astype(dtype))
    for dtype in (jnp.int8, np.int8):
        assert cast(jnp.ones(2), dtype).dtype == dtype
    assert cast.trace_count == 2


@claim("filter_custom_jvp", "filter_custom_vjp", "filter_closure_convert")
def rules_are_right_for_what_is_not_differentiated_and_may_close_over_tracers():
    def gradient(scale, x):
        @vernal.filter_custom_jvp
        def product(x, y):
            return scale * x * y

        @product.def_jvp
        def rule(primals, tangents):
            (x, y), (x_dot, y_dot) = primals, tangents
            return scale * x * y, scale * (x_dot * y + x * y_dot)

        converted = vernal.filter_closure_convert(lambda x: product(x, jnp.array(3.0)), x)
        assert hash(converted) == hash(converted)
        return jax.grad(converted)(x)

    assert jax.jit(gradient)(jnp.array(2.0), jnp.array(5.0)) == 6.0

    @vernal.filter_custom_vjp
    def triple(x):
        return 3 * x

    triple.def_fwd(lambda perturbed, x: (3 * x, None))
    triple.def_bwd(lambda residuals, gradient, perturbed, x: 3 * gradient)
    assert jax.grad(triple)(1.0) == 3.0


@claim("filter_eval_shape")
def a_traced_value_in_a_shape_is_named():
    with pytest.raises(TypeError, match="length"):
        vernal.filter_eval_shape(lambda length: jnp.zeros(length), jnp.array(2))


@claim("tree_at")
def surgery_reaches_structure():
    assert vernal.tree_at(lambda d: d.p, nn.Dropout(0.5), 0.1).p == 0.1
    pair = [jnp.ones(1), jnp.ones(1)]
    with pytest.raises(ValueError, match="twice"):
        vernal.tree_at(lambda t: (t[0], t[0]), pair, (1, 2))


@claim("tree_serialise_leaves", "tree_deserialise_leaves")
def files_say_what_does_not_fit(tmp_path):
    tree = {"weight": jnp.ones(2), "key": KEY}
    vernal.save(tmp_path / "named", tree)
    back = vernal.load(tmp_path / "named", jax.eval_shape(lambda: tree))
    assert (back["key"] == KEY).all() and (back["weight"] == 1).all()
    file = io.BytesIO()
    compat.tree_serialise_leaves(file, {"a": jnp.ones(1), "b": jnp.ones(2)})
    file.seek(0)
    with pytest.raises(RuntimeError, match=r"like\['a'\]"):
        compat.tree_deserialise_leaves(file, {"a": jnp.ones(4), "b": jnp.ones(3)})
    path = tmp_path / "two.eqx"
    compat.tree_serialise_leaves(path, [jnp.ones(1), jnp.ones(2)])
    with pytest.raises(RuntimeError, match="more"):
        compat.tree_deserialise_leaves(path, [jnp.ones(1)])


@claim("nn.BatchNorm", "nn.SpectralNorm")
def state_is_collected():
    xs = jnp.arange(12.0).reshape(6, 2)
    norm = nn.BatchNorm(2)
    ys, learnt = jax.jit(nn.apply)(norm, xs)
    np.testing.assert_allclose(ys.mean(0), 0.0, atol=1e-5)
    assert any(
        not jnp.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(norm), jax.tree.leaves(learnt), strict=True)
    )
    layer = nn.SpectralNorm(nn.Linear(2, 2, key=KEY), "weight", key=KEY)
    y, learnt = jax.jit(nn.apply)(layer, xs[1])
    assert y.shape == (2,) and jax.tree.structure(learnt) == jax.tree.structure(layer)


@claim("nn.StateIndex", "nn.State")
def a_state_index_is_a_variable():
    index = compat.nn.StateIndex(jnp.zeros(2))
    assert isinstance(index, nn.Variable) and index.init is index.stored
    [(path, _)] = jax.tree_util.tree_leaves_with_path([index])
    assert jax.tree_util.keystr(path) == "[0]"
    assert compat.nn.State([index]).get(index).tolist() == [0, 0]
    with pytest.raises(ValueError, match="cannot be made from an existing model"):
        nn.State([nn.Variable(jnp.zeros(2))])


@claim("nn.Dropout", "nn.inference_mode", "nn.Linear")
def layers_take_batches_and_their_numbers_are_structure():
    dropout = nn.Dropout(0.5)
    assert jax.tree.leaves(dropout) == [] and nn.inference_mode(dropout).inference is True
    drawn = dropout(jnp.ones((2, 64)), key=KEY)
    assert (drawn[0] != drawn[1]).any()
    layer, xs = nn.Linear(2, 3, key=KEY), jnp.ones((5, 4, 2))
    np.testing.assert_allclose(layer(xs), jax.vmap(jax.vmap(layer))(xs), rtol=1e-6)


@claim("nn.RotaryPositionalEmbedding")
def rotations_have_their_own_theta_and_positions():
    xs = jnp.arange(12.0).reshape(3, 4)
    slow, fast = (nn.RotaryPositionalEmbedding(4, theta=theta) for theta in (1e4, 10.0))
    assert not jnp.allclose(slow(xs), fast(xs))
    np.testing.assert_allclose(fast(xs)[1:], fast(xs[1:], positions=1), rtol=1e-5)


@claim("nn.MultiheadAttention")
def attention_has_groups_masks_and_kernels():
    layer = nn.MultiheadAttention(4, 8, num_key_value_heads=2, key=KEY)
    xs = jax.random.normal(KEY, (6, 8))
    mask = jnp.tril(jnp.ones((6, 6), bool))
    named, masked = jax.jit(
        lambda layer: (layer(xs, xs, xs, causal=True), layer(xs, xs, xs, mask))
    )(layer)
    np.testing.assert_allclose(named, masked, rtol=1e-5)
    assert layer.key_proj.weight.shape[0] * 2 == layer.query_proj.weight.shape[0]


@claim(
    "nn.AdaptivePool",
    *(f"nn.Adaptive{kind}Pool{dims}d" for kind in ("Avg", "Max") for dims in (1, 2, 3)),
)
def parts_of_adaptive_pools_overlap():
    for kind, ours, theirs in (("Avg", [1, 3.5, 6], [1, 4, 6.5]), ("Max", [2, 5, 7], [2, 5, 7])):
        for dims in (1, 2, 3):
            x = jnp.broadcast_to(jnp.arange(8.0), (1,) * dims + (8,))
            name, target = f"Adaptive{kind}Pool{dims}d", (1,) * (dims - 1) + (3,)
            assert getattr(nn, name)(target)(x).ravel().tolist() == ours
            assert getattr(compat.nn, name)(target)(x).ravel().tolist() == theirs
            assert getattr(nn, name)(target, disjoint=True)(x).ravel().tolist() == theirs
    x = jnp.arange(8.0)[None]
    assert nn.AdaptivePool(3, 1, jnp.min)(x).tolist() == [[0, 2, 5]]
    assert compat.nn.AdaptivePool(3, 1, jnp.min)(x).tolist() == [[0, 3, 6]]


@claim("nn.GroupNorm")
def a_group_norm_takes_batches_and_guesses_nothing():
    x = jnp.arange(64.0).reshape(4, 4, 4)
    with pytest.raises(ValueError, match="channel axis is ambiguous"):
        nn.GroupNorm(2, 4)(x)
    one, several = (nn.GroupNorm(2, 4, num_spatial_dims=n)(x) for n in (2, 1))
    np.testing.assert_array_equal(compat.nn.GroupNorm(2, 4)(x), one)
    np.testing.assert_allclose(several, jax.vmap(nn.GroupNorm(2, 4, num_spatial_dims=1))(x), 1e-6)


@claim("nn.WeightNorm")
def equal_norms_are_equal():
    layer = nn.Linear(2, 2, key=KEY)
    assert nn.WeightNorm(layer) == nn.WeightNorm(layer)


@claim("nn.LayerNorm", "nn.RMSNorm", "nn.Sequential", "nn.Shared")
def norms_do_not_hide_an_overflow_and_natively_none_is_not_a_state():
    large = jnp.array([4e19, 1.0, 2.0])
    for norm in (compat.nn.LayerNorm(3), compat.nn.RMSNorm(3), compat.nn.GroupNorm(1, 3)):
        assert jnp.isnan(norm(large)).all()
    assert nn.Sequential([nn.Identity()])(large, None) is large
    pair = [jnp.ones(1), jnp.ones(1)]
    shared = nn.Shared(pair, lambda t: t[0], lambda t: t[1])
    assert len(jax.tree.leaves(shared)) == 1


@claim("debug.assert_max_traces", "debug.backward_nan")
def debugging_says_more():
    once = jax.jit(compat.debug.assert_max_traces(lambda x: x, max_traces=1))
    once(jnp.ones(2))
    with pytest.raises(RuntimeError, match=r"f32\[2\]"):
        once(jnp.ones(3))
    assert jax.grad(lambda x: 3 * compat.debug.backward_nan(x))(1.0) == 3.0


@claim("internal.while_loop", "internal.scan")
def checkpointed_loops_are_differentiable_in_any_order():
    def power(x):
        step = {"kind": "checkpointed", "max_steps": 3}
        _, out = compat.internal.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x), **step
        )
        scanned, _ = compat.internal.scan(
            lambda c, _: (c * x, None), x, None, length=3, kind="checkpointed"
        )
        return out + scanned

    # Of 2 x^4.
    x = jnp.array(1.5)
    forward, twice = jax.jit(lambda x: (jax.jvp(power, (x,), (1.0,))[1], jax.hessian(power)(x)))(x)
    np.testing.assert_allclose([forward, twice], [8 * x**3, 24 * x**2], rtol=1e-5)


@claim("internal.noinline", "internal.ω", "internal.GetKey", "internal.announce_jaxpr_p")
def small_helpers():
    kept = compat.internal.noinline(lambda x: x + 1)
    assert hash(kept) == hash(kept) and jax.jit(kept)(jnp.array(1.0)) == 2.0
    ω = compat.internal.ω
    np.testing.assert_array_equal((np.ones(2, np.float32) ** ω + jnp.ones(2) ** ω).ω, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EQX_GETKEY_SEED", "5")
        assert compat.internal.GetKey().seed == 5 != vernal.testing.GetKey().seed
    (same,) = compat.internal.announce_jaxpr_p.bind(jnp.ones(2))
    assert (same == 1).all()


@claim("internal.to_onnx")
def onnx_is_refused():
    with pytest.raises(NotImplementedError, match="Vernal does not write ONNX"):
        compat.internal.to_onnx(jnp.sin)


@pytest.mark.parametrize("name", [f.__name__ for f in dict.fromkeys(CLAIMS.values())])
def test_what_the_table_says_holds(name, request):
    function = next(f for f in CLAIMS.values() if f.__name__ == name)
    takes = function.__code__.co_varnames[: function.__code__.co_argcount]
    function(*[request.getfixturevalue(argument) for argument in takes])


def test_the_tests_are_of_names():
    assert CLAIMS.keys() <= set(public_names())
