"""`filter_shard` and `filter_shard_map`, on eight CPU devices, with meshes of both types."""

import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import vernal
from vernal import filter_jit, filter_shard, filter_shard_map

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MESHES = {
    "auto": jax.make_mesh((4, 2), ("a", "b"), axis_types=(AUTO, AUTO)),
    "explicit": jax.make_mesh((4, 2), ("a", "b"), axis_types=(EXPLICIT, EXPLICIT)),
    "mixed": jax.make_mesh((4, 2), ("a", "b"), axis_types=(EXPLICIT, AUTO)),
}
by_mesh = pytest.mark.parametrize("kind", MESHES)
# Small: where `tanh` saturates, its derivative is the rounding of whichever `tanh` was compiled.
X = jnp.arange(16.0).reshape(8, 2) / 16


class Dense(vernal.Module):
    weight: jax.Array
    bias: jax.Array
    activation: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(x @ self.weight + self.bias[None])

    @filter_shard_map(mesh=MESHES["auto"], in_specs={"x": P("a")}, out_specs=P("a"))
    def mapped(self, x: jax.Array) -> jax.Array:
        """Mapped."""
        return self(x)


MODEL = Dense(jnp.array([[1.0, -1.0], [0.5, 2.0]]), jnp.array([0.1, 0.2]), jnp.tanh)


def spec(x):
    """The spec, without the trailing entries that say nothing."""
    entries = list(x.sharding.spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


@by_mesh
def test_outside_of_jit_arrays_are_moved_and_the_rest_is_passed_over(kind):
    sharding = NamedSharding(MESHES[kind], P("a", "b"))
    for x in (X, np.asarray(X), jax.device_put(X, jax.devices()[3])):
        out = filter_shard({"x": x, "f": jnp.sin, "n": 1, "none": None}, sharding)
        assert out["f"] is jnp.sin and out["n"] == 1 and out["none"] is None
        assert spec(out["x"]) == ("a", "b")
        np.testing.assert_array_equal(out["x"], X)


@by_mesh
def test_inside_of_jit_it_is_right_for_the_type_of_every_axis(kind):
    mesh = MESHES[kind]
    with jax.set_mesh(mesh):
        for placement in (P("a", "b"), NamedSharding(mesh, P("a", "b"))):
            out = filter_jit(lambda x, s=placement: filter_shard({"x": 2 * x, "n": 1}, s))(X)
            assert spec(out["x"]) == ("a", "b") and out["n"] == 1
            np.testing.assert_array_equal(out["x"], 2 * X)
        both = filter_jit(lambda x: filter_shard(x, P(("a", "b"))))(X)
        assert spec(both) == (("a", "b"),)
        mapped = filter_jit(vernal.filter_vmap(lambda x: filter_shard(x, P("a"))))(X[None])
        assert spec(mapped) == (None, "a")
        constant = filter_jit(lambda x: filter_shard(np.ones((8,), np.float32), P("a")))(X)
        assert spec(constant) == ("a",)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(filter_shard(x, P("a")) ** 2)))(X)
        np.testing.assert_array_equal(gradient, 2 * X)


def test_explicit_axes_become_part_of_the_type():
    types = []
    with jax.set_mesh(MESHES["explicit"]):
        jax.jit(lambda x: types.append(jax.typeof(filter_shard(x, P("a")))))(X)
    assert str(types[0]) == "float32[8@a,2]"


def test_a_device_is_a_place():
    device = jax.devices()[3]
    out = filter_shard(MODEL, device)
    assert out.weight.devices() == out.bias.devices() == {device}
    assert out.activation is jnp.tanh
    assert jax.jit(lambda x: filter_shard(2 * x, device))(X).devices() == {device}


@by_mesh
def test_prefix_trees_give_each_part_its_own_sharding(kind):
    mesh = MESHES[kind]
    split, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    tree = {"batch": (X, X), "model": MODEL, "same": X}
    out = filter_shard(tree, {"batch": split, "model": whole, "same": None})
    assert spec(out["batch"][1]) == ("a",) and spec(out["model"].weight) == ()
    assert out["same"] is X
    by_leaf = jax.tree.map(lambda w: NamedSharding(mesh, P(*["b"] * (w.ndim == 2))), MODEL)
    out = filter_shard(MODEL, by_leaf)
    assert spec(out.weight) == ("b",) and spec(out.bias) == ()


def test_what_cannot_be_placed_is_told_by_path():
    auto = NamedSharding(MESHES["auto"], P("a", "b"))
    with pytest.raises(
        ValueError, match=r"(?s)cannot be placed with this sharding.*where: x\['b'\]"
    ):
        filter_shard({"b": X[0], "w": X}, auto)
    with pytest.raises(ValueError, match=r"(?s)where: x\.bias.*a placement that fits f32\[2\]"):
        jax.jit(lambda m: filter_shard(m, auto))(MODEL)
    with pytest.raises(ValueError, match=r"(?s)where: x\[0\].*P\('a', 'b'\)"):
        explicit = NamedSharding(MESHES["explicit"], P("a", "b"))
        jax.jit(lambda x: filter_shard([x], explicit))(X[0])
    with pytest.raises(ValueError, match="(?s)where: x\n.*jax.set_mesh"):
        filter_shard(X, P("a"))
    with pytest.raises(TypeError, match=r"(?s)not a device or a sharding.*or_shardings\[1\].*'a'"):
        filter_shard((X, X), (None, "a"))
    with pytest.raises(ValueError, match=r"(?s)`device_or_shardings` is not a prefix.*f32\[8,2\]"):
        filter_shard((X, X), (auto,))


def spread(x, kind, *names):
    return filter_shard(x, NamedSharding(MESHES[kind], P(*names)))


def total(fn, x, name):
    return {"sum": jax.lax.psum(fn(x).sum(), "a"), "each": fn(x)}, name, None


@by_mesh
@pytest.mark.parametrize("in_specs", [(None, P("a"), None), {"x": P("a")}, P("a")])
@pytest.mark.sample(3)
def test_shard_map_agrees_with_the_whole_in_both_axis_types(kind, in_specs):
    mesh = MESHES[kind]
    out_specs = ({"sum": None, "each": P("a")}, None, None)
    fn = filter_shard_map(total, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    model = MODEL
    if isinstance(in_specs, P):
        model = jnp.tanh
    for run in (fn, filter_jit(fn)):
        out, name, none = run(model, spread(X, kind, "a"), "name")
        assert name == "name" and none is None
        np.testing.assert_allclose(out["each"], model(X), rtol=1e-6)
        np.testing.assert_allclose(out["sum"], model(X).sum(), rtol=1e-6)
        assert spec(out["each"]) == ("a",)


def test_without_in_specs_explicit_types_say_how_arguments_are_cut():
    x = spread(X, "explicit", "a")
    with jax.set_mesh(MESHES["explicit"]):
        for run in (lambda f: f, filter_jit):
            out = run(filter_shard_map(lambda m, x, s: (m(x), s), out_specs=P("a")))(MODEL, x, "s")
            np.testing.assert_allclose(out[0], MODEL(X), rtol=1e-6)
            assert out[1] == "s" and spec(out[0]) == ("a",)


@by_mesh
def test_a_module_is_a_function_whose_arrays_keep_their_sharding(kind):
    mesh, x = MESHES[kind], spread(X, kind, "a")
    fn = filter_shard_map(MODEL, mesh=mesh, in_specs=(P("a"),), out_specs=P("a"))
    np.testing.assert_allclose(filter_jit(fn)(x), MODEL(X), rtol=1e-6)
    bound = filter_shard_map(MODEL.__call__, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    np.testing.assert_allclose(filter_jit(bound)(x=x), MODEL(X), rtol=1e-6)

    def loss(model, x):
        fn = filter_shard_map(model, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
        return jnp.sum(fn(x) ** 2)

    with jax.set_mesh(mesh):
        got = filter_jit(vernal.filter_grad(loss))(MODEL, x)
    want = vernal.filter_grad(lambda m: jnp.sum(m(X) ** 2))(MODEL)
    np.testing.assert_allclose(got.weight, want.weight, rtol=1e-5)
    np.testing.assert_allclose(got.bias, want.bias, rtol=1e-5)


def test_the_arrays_of_a_module_may_be_spread_over_explicit_axes():
    model = vernal.tree_at(lambda m: m.bias, MODEL, spread(jnp.ones(4), "explicit", "a"))
    seen = []

    def fn(x):
        return x

    class Seeing(vernal.Module):
        inner: Dense

        def __call__(self, x):
            seen.append(self.inner.bias.shape)
            return fn(x)

    run = filter_shard_map(
        Seeing(model), mesh=MESHES["explicit"], in_specs=P("a"), out_specs=P("a")
    )
    run(spread(X, "explicit", "a"))
    assert seen == [(1,)]


def test_axis_names_choose_the_axes_to_map_over():
    shapes = []

    def fn(x):
        shapes.append(x.shape)
        return x

    options = {"mesh": MESHES["auto"], "in_specs": P("a"), "out_specs": P("a")}
    out = filter_jit(filter_shard_map(fn, axis_names={"a"}, **options))(X)
    np.testing.assert_array_equal(out, X)
    assert shapes == [(2, 2)]


def test_check_vma_can_be_turned_off():
    options = {"mesh": MESHES["auto"], "in_specs": P("a"), "out_specs": None}
    with pytest.raises(ValueError, match="check_vma"):
        filter_shard_map(lambda x: x, **options)(X)
    out = filter_shard_map(lambda x: x, check_vma=False, **options)(X)
    assert out.shape == (2, 2)


def shift(x, by=1.0):
    """Shifts."""
    return x + by


def test_all_decorator_forms_agree_and_keep_name_documentation_and_signature():
    options: dict[str, Any] = {"mesh": MESHES["auto"], "in_specs": P("a"), "out_specs": P("a")}
    for fn in (filter_shard_map(shift, **options), filter_shard_map(**options)(shift)):
        np.testing.assert_array_equal(fn(X), X + 1)
        assert fn.__name__ == "shift" and fn.__doc__ == "Shifts." and fn.__wrapped__ is shift
        assert inspect.signature(fn) == inspect.signature(shift)
    np.testing.assert_allclose(MODEL.mapped(X), MODEL(X), rtol=1e-6)
    assert Dense.mapped.__doc__ == "Mapped."


def test_it_pickles_where_its_mesh_does_not_matter():
    fn = filter_shard_map(shift, in_specs=P("a"), out_specs=P("a"))
    again = pickle.loads(pickle.dumps(fn))
    with jax.set_mesh(MESHES["auto"]):
        np.testing.assert_array_equal(again(X), X + 1)


def test_keyword_only_arguments_are_cut_by_name():
    def fn(x, *, y):
        return x + y

    mesh = MESHES["auto"]
    run = filter_shard_map(fn, mesh=mesh, in_specs={"x": P("a"), "y": P("a")}, out_specs=P("a"))
    np.testing.assert_array_equal(run(X, y=X), 2 * X)
    whole = filter_shard_map(fn, mesh=mesh, in_specs=(P("a"),), out_specs=P("a"))
    np.testing.assert_array_equal(whole(X, y=jnp.ones((2, 2))), X + 1)


def test_a_traced_size_names_the_argument():
    fn = filter_shard_map(lambda n: jnp.zeros(n), mesh=MESHES["auto"], in_specs=P(), out_specs=P())
    with pytest.raises(vernal.transforms.TracedShapeError, match="argument `n`"):
        filter_jit(fn)(jnp.array(3))


AUTO_MESH: dict[str, Any] = {"mesh": MESHES["auto"]}
WRONG = {
    "not callable": (
        lambda: filter_shard_map(X, out_specs=None),
        TypeError,
        "filter_shard_map needs a function",
    ),
    "option": (
        lambda: filter_shard_map(shift, out_specs=None, check_rep=False),
        TypeError,
        "(?s)no option `check_rep`.*check_vma in place of check_rep",
    ),
    "spec": (
        lambda: filter_shard_map(shift, in_specs=(P("a"), "a"), out_specs=None),
        TypeError,
        r"(?s)not a PartitionSpec.*where: in_specs\[1\]",
    ),
    "out spec": (
        lambda: filter_shard_map(shift, out_specs={"k": 0}),
        TypeError,
        r"where: out_specs\['k'\]",
    ),
    "name": (
        lambda: filter_shard_map(shift, in_specs={"z": P()}, out_specs=None),
        ValueError,
        "`in_specs` names an argument that `shift` does not have",
    ),
    "count": (
        lambda: filter_shard_map(shift, in_specs=(P(), P()), out_specs=None, **AUTO_MESH)(X),
        ValueError,
        "`in_specs` must have one entry for each positional argument",
    ),
    "prefix": (
        lambda: filter_shard_map(shift, in_specs=((P(),),), out_specs=None, **AUTO_MESH)(X),
        ValueError,
        r"(?s)`in_specs` of `shift` is not a prefix.*where: x\n.*f32\[8,2\]",
    ),
    "prefix of the result": (
        lambda: filter_shard_map(shift, in_specs=P(), out_specs=(None,), **AUTO_MESH)(X),
        ValueError,
        r"(?s)`out_specs` of `shift` is not a prefix.*where: the result",
    ),
    "unknown axis": (
        lambda: filter_shard_map(shift, in_specs=P("z"), out_specs=None, **AUTO_MESH)(X),
        ValueError,
        r"(?s)no mesh axis 'z' to split.*filter_shard_map of `shift`, argument x",
    ),
    "unknown axis of the result": (
        lambda: filter_shard_map(shift, in_specs=P(), out_specs=[P("z")], **AUTO_MESH)(X),
        ValueError,
        r"(?s)no mesh axis 'z' to split.*out_specs\[0\]",
    ),
    "parts that are not equal": (
        lambda: filter_shard_map(shift, in_specs=P("a"), out_specs=None, **AUTO_MESH)(X[:7]),
        ValueError,
        r"(?s)cannot be split into equal parts.*argument x.*f32\[7,2\]",
    ),
    "too few axes": (
        lambda: filter_shard_map(
            shift, in_specs=(P(None, None, "a"),), out_specs=None, **AUTO_MESH
        )(X),
        ValueError,
        r"(?s)cannot be split into equal parts.*at least 3 axes",
    ),
    "nothing to infer from": (
        lambda: filter_shard_map(shift, out_specs=None, **AUTO_MESH)(X),
        ValueError,
        "in_specs can only be left out on a mesh with explicit axes",
    ),
    "no mesh": (
        lambda: filter_shard_map(shift, out_specs=None)(X),
        ValueError,
        r"(?s)in_specs can only be left out.*AbstractMesh\(\(\)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_by_path(case):
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call()


def two_results(x, s):
    return x * s, x**2


def weighted(factors, cts):
    return sum(f * vernal.transforms.materialise(ct) for f, ct in zip(factors, cts, strict=True))


def by_rule(x, s):
    rule = vernal.filter_custom_vjp(two_results)
    rule.def_fwd(lambda perturbed, x, s: (two_results(x, s), None))
    rule.def_bwd(lambda _, cts, perturbed, x, s: weighted((s, 2 * x), cts), symbolic_zeros=True)
    return rule(x, s)


def by_transpose(x, s):
    own, shared = vernal.primitives.local_linear_call(
        lambda s, x: (x * s, x * 2), lambda s, cts: weighted((s, 2), cts), s, x
    )
    return own, shared * x / 2


@pytest.mark.parametrize("made", [by_rule, by_transpose])
@pytest.mark.parametrize("results", ["both", "own", "shared"])
def test_a_backward_rule_gets_parts_of_a_sum_or_wholes_but_not_both(made, results):
    def loss(x, s):
        own, shared = made(x, s[0])
        return jax.lax.pmean({"both": own + shared, "own": own, "shared": shared}[results], "a")

    mapped = filter_shard_map(
        loss, mesh=MESHES["auto"], in_specs=(P(), P("a")), out_specs=P(), check_vma=True
    )
    x, s = jnp.asarray(3.0), jnp.arange(1.0, 5.0)
    if results == "own":
        np.testing.assert_allclose(jax.grad(mapped)(x, s), 2.5, rtol=1e-6)
    else:
        with pytest.raises(
            ValueError, match="differ between the devices of `shard_map`, and others"
        ):
            jax.grad(mapped)(x, s)
