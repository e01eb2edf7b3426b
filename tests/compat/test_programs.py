"""Calls that programs written for Equinox make: surgery, mapped axes, old spellings, names of parameters."""

import collections
import contextlib
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.compat import equinox as compat

from ._same import same_as_equinox

KEY = jax.random.key(0)


@same_as_equinox
def test_any_sequence_replaces_a_sequence_of_nodes(eqx):
    Pair = collections.namedtuple("Pair", "a b")
    tree = [1, 2, 3]
    return (
        eqx.tree_at(lambda t: (t[0], t[1]), tree, [5, 6]),
        eqx.tree_at(lambda t: [t[0], t[1]], tree, (5, 6)),
        eqx.tree_at(lambda t: (t.a, t.b), Pair(1, 2), [3, 4]),
        eqx.tree_at(lambda t: t[0], [[1, 2], 3], [7]),
        eqx.tree_at(lambda t: (t[0], t[1]), [None, None], [4, 5], is_leaf=lambda x: x is None),
        eqx.tree_at(lambda t: (t[0], t[1]), tree, replace_fn=lambda x: 10 * x),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"where": lambda t: (t[0], t[1]), "replace": (5, 6, 7)},
        {"where": lambda t: t[0]},
        {"where": lambda t: t[0], "replace": 4, "replace_fn": lambda x: x},
        {"where": lambda t: (t[0], t[0][0]), "replace": ("x", "y")},
    ],
    ids=["too many", "neither", "both", "nested"],
)
def test_replacements_that_do_not_fit(arguments):
    same_as_equinox(lambda eqx: eqx.tree_at(pytree=[(1, 2), 3, 4], **arguments))()


def test_natively_any_sequence_replaces_one_too():
    assert vernal.tree_at(lambda t: (t[0], t[1]), [1, 2], [5, 6]) == [5, 6]
    # A tree of nodes keeps its arrangement.
    nested = vernal.tree_at(lambda t: (t[0], [t[1]]), [1, 2], (5, [[6]]))
    assert nested == [5, [6]]
    with pytest.raises(ValueError, match="do not match the nodes"):
        vernal.tree_at(lambda t: {"a": t[0]}, [1], [5])


@same_as_equinox
def test_numbers_are_repeated_along_the_axis_of_a_result(eqx):
    xs = jnp.arange(3.0)
    return (
        eqx.filter_vmap(lambda x: (x, 1, 1.5, True, None), out_axes=0)(xs),
        eqx.filter_vmap(lambda x: (x, 1, "a", None))(xs),
        eqx.filter_vmap(lambda x: (x, 1), out_axes=(0, None))(xs),
        eqx.filter_vmap(lambda x: x + 1, axis_size=3, out_axes=0)(1.0),
        eqx.filter_vmap(lambda x: x + 1)(1.0),
        eqx.filter_vmap(lambda x, y=2.0: x + y, in_axes={"x": 0})(xs),
    )


@pytest.mark.parametrize("axes", [{"x": 0, "y": 0}, {"z": 0}], ids=["a default", "unknown"])
def test_an_axis_for_what_is_not_given(axes):
    xs = jnp.arange(3.0)
    same_as_equinox(lambda eqx: eqx.filter_vmap(lambda x, y=xs: x + y, in_axes=axes)(xs))()


def test_an_axis_for_a_default_is_refused():
    ones = jnp.ones(3)
    mapped = vernal.filter_vmap(lambda x, y=ones: x + y, in_axes={"x": 0, "y": 0})
    with pytest.raises(ValueError, match=r"that the call does not pass[\s\S]*'y': None"):
        mapped(jnp.arange(3.0))
    assert mapped(jnp.arange(3.0), jnp.ones(3)).shape == (3,)
    with pytest.raises(ValueError, match="nothing is mapped"):
        vernal.filter_vmap(lambda x: 1, out_axes=0)(1.0)


@same_as_equinox
def test_rules_by_their_old_names(eqx):
    seen = []

    @eqx.filter_custom_jvp
    def square(x, name):
        return x**2

    def rule(primals, tangents):
        seen.append(tangents[1])
        return primals[0] ** 2, 7 * tangents[0]

    square.defjvp(rule)

    @eqx.filter_custom_vjp
    def product(x, y, n):
        return x * y, x + y, n

    def backward(residuals, gradients, x, y, n):
        seen.append((gradients[1], gradients[2]))
        return 5 * residuals * gradients[0]

    product.defvjp(lambda x, y, n: ((x * y, x + y, n), y), backward)
    x = jnp.array(2.0)
    gradients = jax.grad(square)(x, "x"), jax.grad(lambda x: product(x, jnp.array(3.0), 2)[0])(x)
    return gradients, seen


@same_as_equinox
def test_rules_for_each_argument(eqx):
    return eqx.filter_custom_jvp(lambda x: x).defjvps(lambda t, ans, x: t)


def test_the_refusal_of_rules_for_each_argument():
    with pytest.raises(NotImplementedError, match="rules cannot be given one by one"):
        compat.filter_custom_jvp(lambda x: x).defjvps(None)


@same_as_equinox
def test_first_parameters_by_name(eqx):
    x = jnp.array(1.0)
    asked = eqx.is_array, eqx.is_array_like, eqx.is_inexact_array, eqx.is_inexact_array_like
    return (
        [ask(element=1.0) for ask in asked],
        eqx.tree_pformat(pytree=[1]),
        eqx.filter_vjp(fun=lambda: x)[0],
        [
            d(fun=lambda x: x**2)(x)
            for d in (eqx.filter_grad, eqx.filter_jacfwd, eqx.filter_hessian)
        ],
    )


@same_as_equinox
def test_guards_take_numbers(eqx):
    i = eqx.internal
    guards = i.nondifferentiable, i.nondifferentiable_backward, i.nonbatchable, i.nontraceable
    reduced = i.unvmap_all(True), i.unvmap_any(False), i.unvmap_max(1), i.unvmap_max(1.5)
    return [[guard(x) for x in (1.0, 2, True)] for guard in guards[:3]], guards[3](1.0), reduced


@same_as_equinox
def test_a_function_with_its_abstract_form(eqx):
    twice = eqx.internal.noinline(lambda x: 2 * x, abstract_fn=lambda fn, x: x)
    return jax.jit(lambda x: twice(x))(jnp.ones(2))


@same_as_equinox
def test_a_meter_with_steps(eqx):
    meter = eqx.internal.TqdmProgressMeter(refresh_steps=5)
    return meter.refresh_steps, eqx.internal.TqdmProgressMeter().refresh_steps


@same_as_equinox
def test_whatever_has_a_truth_value_is_an_answer_of_a_predicate(eqx):
    tree = {"a": 1, "b": [2, None]}
    return (
        eqx.filter(tree, lambda x: np.bool_(x == 1)),
        eqx.filter(tree, lambda x: x - 1, inverse=True, replace=7),
        eqx.filter(tree, {"a": True, "b": lambda x: jnp.array(True)}),
        eqx.partition(tree, lambda x: np.bool_(x == 1), replace=0),
        eqx.filter([1, 2], [np.bool_(True), False]),
    )


@same_as_equinox
def test_the_last_value_for_a_node_counts(eqx):
    at = eqx.tree_at
    return (
        at(lambda t: (t[0], t[0]), [1, 2], (5, 6)),
        at(lambda t: [t[0], t[1], t[0]], [jnp.ones(1), 2], (1, 2, 3)),
        at(lambda t: (t[0], t[0]), [[1, 3], 2], (5, 6)),
        at(lambda t: (t[0], t[0]), [1, 2], replace_fn=lambda x: x + 10),
        at(lambda t: (), [1, 2], ()),
        at(lambda t: (), [1, 2], replace_fn=lambda x: x + 10),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"where": lambda t: (t[0], t[0]), "replace": (5,)},
        {"where": lambda t: (t[0], t[0]), "replace": 5},
        {"where": lambda t: (t[0], t[0], t[0][1]), "replace": (5, 6, 7)},
        {"where": lambda t: {"a": t[0], "b": t[0]}, "replace": {"a": 1, "b": 2}},
        {"where": lambda t: ()},
    ],
    ids=["too few", "none of several", "one inside", "a dict", "neither"],
)
def test_nodes_that_are_picked_twice_need_as_many_values(arguments):
    with pytest.raises(ValueError, match=r"tree_at|ambiguous|do not match"):
        compat.tree_at(pytree=[(1, 2), 3], **arguments)


@same_as_equinox
def test_gradients_with_respect_to_nothing(eqx):
    y = jnp.array(3.0)
    return (
        eqx.filter_grad(lambda x, y: x * y)(2.0, y),
        eqx.filter_grad(lambda x, y: (y, x["n"]), has_aux=True)({"n": 2}, y),
        eqx.filter_value_and_grad(lambda x, y: y)("text", y),
    )


@same_as_equinox
def test_options_of_jax_grad(eqx):
    z = {"z": jnp.array([1.0 + 2j, 3.0]), "n": 3}

    def of_tree(tree):
        return jnp.sum(tree["z"] ** tree["n"])

    @eqx.filter_value_and_grad(holomorphic=True)
    def decorated(tree):
        return of_tree(tree)

    return (
        eqx.filter_grad(of_tree, holomorphic=True)(z),
        eqx.filter_grad(lambda t: (of_tree(t), "a"), has_aux=True, holomorphic=True)(z),
        eqx.filter_value_and_grad(lambda t: (of_tree(t), 1), has_aux=True, holomorphic=True)(z),
        decorated(z),
        eqx.filter_grad(lambda t: jnp.real(of_tree(t)), holomorphic=False)(z),
        eqx.filter_grad(lambda x: jnp.sum(x**2), allow_int=True)(jnp.ones(2)),
    )


def test_a_holomorphic_function_of_real_numbers():
    same_as_equinox(lambda eqx: eqx.filter_grad(jnp.sin, holomorphic=True)(1.0 * jnp.ones(())))()
    with pytest.raises(TypeError, match="a holomorphic derivative is taken of complex arrays only"):
        compat.filter_grad(jnp.sin, holomorphic=True)(jnp.ones(()))
    with pytest.raises(TypeError, match=r"complex result[\s\S]*f32\[\]"):
        compat.filter_grad(jnp.abs, holomorphic=True)(jnp.ones((), complex))


@pytest.mark.parametrize("name", ["filter_grad", "filter_value_and_grad"])
def test_the_arguments_of_a_gradient_have_no_numbers(name):
    same_as_equinox(lambda eqx: getattr(eqx, name)(jnp.sin, argnums=0))()
    same_as_equinox(lambda eqx: getattr(eqx, name)(argnums=0)(jnp.sin))()


def test_what_to_write_instead_of_the_number_of_an_argument():
    with pytest.raises(ValueError, match="filter_grad has no option `argnums`") as caught:
        compat.filter_grad(jnp.sin, argnums=(0, 1))
    assert "in a tuple" in str(caught.value) and "(0, 1)" in str(caught.value)


@same_as_equinox
def test_arrays_that_jax_cannot_hold_are_arrays(eqx):
    tree = {"names": np.array(["a", "b"]), "ids": np.array([None, 1]), "x": jnp.ones(2)}
    other = np.str_("a"), np.datetime64(1, "s"), np.array(b"a"), np.zeros(1, [("a", int)])
    kept, rest = eqx.partition(tree, eqx.is_array)
    return (
        [
            [ask(x) for x in other]
            for ask in (eqx.is_array, eqx.is_array_like, eqx.is_inexact_array)
        ],
        [kept["names"] is tree["names"], kept["ids"] is tree["ids"], rest["names"], rest["ids"]],
        eqx.combine(kept, rest)["names"].tolist(),
    )


@same_as_equinox
def test_local_functions_print_with_the_place_where_they_were_defined(eqx):
    def local():
        pass

    class Model(eqx.Module):
        act: object

        def method(self):
            return 1

    values = local, lambda: 0, [local], Model.method
    return [*map(eqx.tree_pformat, values), repr(Model(local)), str(Model(lambda: 0))]


@same_as_equinox
def test_functions_by_the_names_of_their_parameters(eqx):
    x, struct = jnp.ones(2), jax.ShapeDtypeStruct((2,), jnp.float32)
    return (
        eqx.filter_eval_shape(fun=lambda x: 2 * x, x=x),
        eqx.filter_closure_convert(fn=lambda x: 2 * x, x=x)(x=x),
        eqx.filter_pure_callback(
            callback=lambda x: 2 * np.asarray(x), x=x, result_shape_dtypes=struct
        ),
    )


@pytest.mark.parametrize("given", [None, "state", 3])
def test_a_sequential_passes_any_state(given):
    def run(eqx):
        class Passing(eqx.nn.StatefulLayer):
            def __call__(self, x, state, *, key=None):
                return x + 1, state

        inner = eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=KEY), eqx.nn.Identity()])
        model = eqx.nn.Sequential([Passing(), inner, eqx.nn.Sequential([Passing()])])
        x = jnp.ones(2)
        return (
            *(model(x, given), model(x, state=given)),
            *(inner(x, given), inner(x), model[:1](x, given)),
            eqx.nn.Sequential([inner])(x, given),
            jax.vmap(inner, in_axes=(0, None))(jnp.ones((2, 2)), None),
        )

    same_as_equinox(run)()


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize(
    "stored", [1, 1.5, 2j, 2**40, np.zeros(3), np.arange(3), np.uint64(3), np.ones(3, complex)]
)
@pytest.mark.sample(4)
def test_files_of_numbers_of_64_bits(stored, wide):
    def run(eqx):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, [stored])
        found = []
        kinds = int, float, complex
        for like in (*(jnp.zeros(np.shape(stored), kind) for kind in kinds), np.zeros(3), 1j):
            file.seek(0)
            with contextlib.suppress(RuntimeError):
                found.append(eqx.tree_deserialise_leaves(file, [like]))
            file.seek(0)
            found.append(eqx.default_deserialise_filter_spec(file, jnp.zeros(2)))
        return found

    with jax.enable_x64(wide):
        same_as_equinox(run)()


@same_as_equinox
def test_integers_have_zeros_for_derivatives(eqx):
    x = jnp.arange(3.0)
    results = (lambda q: {"y": q * 2, "steps": 3}, lambda q: (q, 3, np.arange(2)), lambda q: 3)
    return [eqx.filter_jacfwd(f)(x) for f in results]


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
def test_the_value_of_a_loss_is_what_it_returned(wide):
    def run(eqx):
        losses = (lambda a: 3.0, lambda a: np.float64(3), lambda a: np.array(3.0))
        given = [eqx.filter_value_and_grad(f)(jnp.arange(3.0)) for f in losses]
        with_aux = eqx.filter_value_and_grad(lambda a: (a**2, "aux"), has_aux=True)
        squared = eqx.filter_value_and_grad(lambda a: a**2)
        compiled = [eqx.filter_jit(squared)(a) for a in (3.0, jnp.array(3.0))]
        return given, with_aux(3.0), squared(3.0), squared(jnp.asarray(2.0)), compiled

    with jax.enable_x64(wide):
        same_as_equinox(run)()
