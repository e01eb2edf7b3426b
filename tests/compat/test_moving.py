"""What `docs/from-equinox.md` says to swap: each row of its three tables is tried on Equinox and on Vernal."""

import re
from pathlib import Path

import equinox
import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal

PAGE = Path(__file__).parents[2] / "docs" / "from-equinox.md"
BOTH = [equinox, vernal]
KEY = jax.random.key(0)
X = jnp.arange(8.0).reshape(4, 2)
ROWS = {}


def row(left, right=""):
    """The test of the row with these cells."""

    def register(test):
        ROWS[left, right] = test
        return test

    return register


def _mlp(eqx):
    return eqx.nn.MLP(2, 1, 8, 1, key=KEY)


def _counted(eqx):
    class Counted(eqx.Module):
        mlp: eqx.nn.MLP
        calls: jax.Array

    return Counted(_mlp(eqx), jnp.array(0))


def _loss(model):
    return jnp.mean(jax.vmap(model)(X) ** 2)


def _counted_loss(model):
    return _loss(model.mlp)


def _trained(eqx, model, loss, part):
    """The loss after one step of a plain Optax optimiser."""
    optim = optax.adamw(1e-2)
    state = optim.init(part(model))
    gradient = eqx.filter_grad(loss)(model)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optim.update(gradient, state, part(model))
        return loss(eqx.apply_updates(model, updates))


# What must change.


@row("import equinox as eqx", "import vernal as eqx")
def the_same_program_runs():
    first, second = (_trained(eqx, _mlp(eqx), _loss, lambda model: model) for eqx in BOTH[1:] * 2)
    assert first == second
    theirs = _trained(
        equinox, _mlp(equinox), _loss, lambda m: equinox.filter(m, equinox.is_inexact_array)
    )
    np.testing.assert_allclose(first, theirs, rtol=1e-5)


@row("eqx.internal.while_loop", "eqx.loops.while_loop")
def internal_names_have_rooms():
    assert not hasattr(vernal, "internal")
    arguments = (lambda x: x < 5, lambda x: x + 1, jnp.array(0))
    theirs = equinox.internal.while_loop(*arguments, kind="checkpointed", max_steps=9)
    assert vernal.loops.while_loop(*arguments, kind="checkpointed", max_steps=9) == theirs == 5


@row("eqx.filter(model, eqx.is_inexact_array)", "eqx.params(model)")
def optimisers_take_the_trained_part():
    theirs = _trained(
        equinox,
        _counted(equinox),
        _counted_loss,
        lambda m: equinox.filter(m, equinox.is_inexact_array),
    )
    model = _counted(vernal)
    ours = _trained(vernal, model, _counted_loss, vernal.params)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    with pytest.raises(ValueError, match="NoGradient"):
        _trained(vernal, model, _counted_loss, lambda m: vernal.filter(m, vernal.is_inexact_array))


@row("gradient.calls is None", "isinstance(gradient.calls, eqx.NoGradient)")
def gradients_have_no_gradient():
    assert equinox.filter_grad(_counted_loss)(_counted(equinox)).calls is None
    gradient = vernal.filter_grad(_counted_loss)(_counted(vernal))
    assert isinstance(gradient.calls, vernal.NoGradient)


def _scaled(eqx, kind):
    class Scaled(eqx.Module):
        rate: kind  # pyright: ignore[reportInvalidTypeForm]

    return Scaled


@row("rate: float", "rate: jax.Array")
def numbers_are_structure():
    def doubled(tree):
        return jax.tree.map(lambda leaf: 2 * leaf, tree).rate

    assert doubled(_scaled(equinox, float)(0.5)) == 1.0
    assert doubled(_scaled(vernal, float)(0.5)) == 0.5
    assert doubled(_scaled(vernal, jax.Array)(0.5)) == 1.0


@row("table: jax.Array = eqx.field(static=True)", "table: jax.Array = eqx.field(trainable=False)")
def arrays_are_not_static():
    def table(eqx, **options):
        class Table(eqx.Module):
            table: jax.Array = eqx.field(**options)

        return Table(jnp.ones(2))

    with pytest.warns(UserWarning, match="being set as static"):
        table(equinox, static=True)
    with pytest.raises(ValueError, match="an array cannot be static"):
        table(vernal, static=True)
    assert jax.tree.leaves(vernal.params(table(vernal, trainable=False))) == []


def _batch_norm(eqx):
    return eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")


@row("eqx.tree_at(lambda m: m.layers[1], mask, True)", 'eqx.trainable(model, "layers.1")')
def masks_are_made_by_path():
    def trained(eqx):
        mask = jax.tree.map(lambda _: False, _mlp(eqx))
        mask = eqx.tree_at(lambda m: m.layers[1], mask, True)
        return eqx.partition(_mlp(eqx), mask)[0]

    with pytest.raises(ValueError, match="not a prefix of the tree"):
        trained(vernal)
    ours, _ = vernal.partition(_mlp(vernal), vernal.trainable(_mlp(vernal), "layers.1"))
    assert len(jax.tree.leaves(ours)) == len(jax.tree.leaves(trained(equinox))) == 2


@row("eqx.nn.State(model)", "eqx.nn.make_with_state(Model)(...)")
def states_are_made_with_their_model():
    with pytest.raises(ValueError, match="cannot be made from an existing model"):
        vernal.nn.State(_batch_norm(vernal))
    for eqx in BOTH:
        _, state = eqx.nn.make_with_state(_batch_norm)(eqx)
        assert isinstance(state, eqx.nn.State)


@row("eqx.nn.StateIndex(init)", "eqx.nn.Variable(init)")
def a_state_index_is_a_variable():
    assert not hasattr(vernal.nn, "StateIndex")
    index = equinox.nn.StateIndex(jnp.ones(2))
    assert equinox.nn.State(index).get(index).sum() == 2
    assert vernal.nn.Variable(jnp.ones(2)).value.sum() == 2


@row("eqx.tree_inference(model, value)", "eqx.nn.inference_mode(model, value)")
def inference_mode_has_one_name():
    assert not hasattr(vernal, "tree_inference")
    for eqx in BOTH:
        assert eqx.nn.inference_mode(eqx.nn.Dropout(0.5), True).inference


@row("eqx.static_field()", "eqx.field(static=True)")
def static_fields_have_one_spelling():
    assert not hasattr(vernal, "static_field")
    for eqx in BOTH:
        assert eqx.field(static=True).metadata


@row("eqx.EquinoxRuntimeError", "eqx.runtime.RuntimeCheckError")
def checks_raise_errors_of_their_own():
    assert not hasattr(vernal, "EquinoxRuntimeError")
    for eqx, error in [
        (equinox, equinox.EquinoxRuntimeError),
        (vernal, vernal.runtime.RuntimeCheckError),
    ]:
        with pytest.raises(error, match="not positive"):
            jax.block_until_ready(eqx.error_if(jnp.array(1.0), jnp.array(True), "not positive"))


# What may change.


@row("jax.vmap(layer)(xs)", "layer(xs)")
def layers_take_batches():
    layer = vernal.nn.Linear(2, 3, key=KEY)
    np.testing.assert_allclose(jax.vmap(layer)(X), layer(X), rtol=1e-6)


@row("eqx.partition(model, eqx.is_array)", "model")
def plain_jax_takes_a_model():
    for eqx in BOTH:
        arrays, rest = eqx.partition(_mlp(eqx), eqx.is_array)
        parted = jax.jit(lambda arrays, eqx=eqx, rest=rest: _loss(eqx.combine(arrays, rest)))(
            arrays
        )
    np.testing.assert_allclose(jax.jit(_loss)(_mlp(vernal)), parted, rtol=1e-6)


@row("eqx.partition(model, trained)", 'eqx.freeze(model, "layers.0")')
def a_part_is_frozen():
    gradients = []
    for eqx in BOTH:
        model = _mlp(eqx)
        trained = eqx.tree_at(
            lambda m: (m.layers[1].weight, m.layers[1].bias),
            jax.tree.map(lambda _: False, model),
            (True, True),
        )
        part, rest = eqx.partition(model, trained)
        gradients.append(
            eqx.filter_grad(lambda p, rest, eqx=eqx: _loss(eqx.combine(p, rest)))(part, rest)
        )
    gradients.append(vernal.filter_grad(_loss)(vernal.freeze(_mlp(vernal), "layers.0")))
    for gradient in gradients:
        np.testing.assert_allclose(
            gradient.layers[1].weight, gradients[0].layers[1].weight, rtol=1e-5
        )
    assert gradients[1].layers[0].weight is None
    assert isinstance(gradients[2].layers[0].weight, vernal.NoGradient)


@row(
    'jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(xs, state)',
    "eqx.nn.apply(model, xs)",
)
def state_stays_in_the_model():
    outputs = []
    for eqx in BOTH:
        model, state = eqx.nn.make_with_state(_batch_norm)(eqx)
        mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        outputs.append(mapped(X, state)[0])
    model = vernal.nn.BatchNorm(2)
    output, after = vernal.nn.apply(model, X)
    for other in outputs:
        np.testing.assert_allclose(output, other, rtol=1e-4, atol=1e-4)
    assert after.num_batches_tracked.value == 1


@row("model(x, key=key)", "eqx.nn.apply(model, x, key=key)")
def keys_are_given_by_name():
    for eqx in BOTH:
        assert eqx.nn.Dropout(0.5)(X, key=KEY).shape == X.shape
    output, _ = vernal.nn.apply(vernal.nn.Dropout(0.5), X, key=KEY)
    assert output.shape == X.shape


@row("optax.adam(rate)", "eqx.Optimizer(optax.adam, rate)")
def settings_are_arrays():
    @vernal.filter_jit
    def step(model, optimiser):
        return optimiser.update(model, vernal.filter_grad(_loss)(model), optimiser.init(model))[0]

    with jax.numpy_dtype_promotion("standard"):
        after = [step(_mlp(vernal), vernal.Optimizer(optax.adamw, rate)) for rate in (0.1, 0.01)]
    assert step.trace_count == 1
    # Optax's weight decay is that of `_trained`, too.
    theirs = _trained(vernal, _mlp(vernal), _loss, vernal.params)
    np.testing.assert_allclose(_loss(after[1]), theirs, rtol=1e-5)


@row("eqx.tree_serialise_leaves(path, model)", "eqx.save(path, model)")
def files_have_names(tmp_path):
    old, new = tmp_path / "model.eqx", tmp_path / "model.safetensors"
    equinox.tree_serialise_leaves(old, _mlp(equinox))
    model = vernal.tree_deserialise_leaves(old, _mlp(vernal))
    vernal.save(new, model)
    assert vernal.tree_equal(vernal.load(new, model), _mlp(vernal))


# What stays.


def _agree(program):
    theirs, ours = (program(eqx) for eqx in BOTH)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@row("eqx.Module, eqx.field, __init__, __check_init__")
def classes_stay():
    def program(eqx):
        class Line(eqx.Module):
            slope: jax.Array
            name: str = eqx.field(static=True, default="line")
            shift: jax.Array = eqx.field(converter=jnp.asarray, default=1.0)

            def __check_init__(self):
                assert self.name == "line"

            def __call__(self, x):
                return self.slope * x + self.shift

        return Line(jnp.array(2.0))(3.0)

    _agree(program)


@row("eqx.filter_jit, eqx.filter_grad, eqx.filter_vmap, eqx.filter_value_and_grad")
def transformations_stay():
    def program(eqx):
        keys = jax.random.split(KEY, 3)
        models = eqx.filter_vmap(lambda key: eqx.nn.MLP(2, 1, 8, 1, key=key))(keys)
        values, slopes = eqx.filter_jit(eqx.filter_vmap(eqx.filter_value_and_grad(_loss)))(models)
        slope = eqx.filter_grad(_loss)(_mlp(eqx))
        return jnp.concatenate(
            [values, slopes.layers[0].weight.ravel(), slope.layers[0].weight.ravel()]
        )

    _agree(program)


@row("eqx.tree_at, eqx.partition, eqx.combine, eqx.apply_updates")
def surgery_stays():
    def program(eqx):
        model = eqx.tree_at(lambda m: m.layers[0].bias, _mlp(eqx), jnp.ones(8))
        model = eqx.combine(*eqx.partition(model, eqx.is_array))
        return _loss(eqx.apply_updates(model, eqx.filter_grad(_loss)(model)))

    _agree(program)


@row("eqx.nn.make_with_state, eqx.nn.inference_mode, state handed from call to call")
def explicit_state_stays():
    def program(eqx):
        model, state = eqx.nn.make_with_state(_batch_norm)(eqx)
        _, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            X, state
        )
        trained = eqx.nn.inference_mode(model)
        return jax.vmap(lambda x: trained(x, state)[0])(X).shape

    _agree(program)


@row("the weights that a key draws")
def draws_stay():
    def program(eqx):
        layers = [
            _mlp(eqx),
            eqx.nn.Conv2d(2, 3, 3, key=KEY),
            eqx.nn.GRUCell(2, 3, key=KEY),
            eqx.nn.Embedding(4, 3, key=KEY),
            eqx.nn.MultiheadAttention(2, 4, key=KEY),
        ]
        leaves = jax.tree.leaves(eqx.filter(layers, eqx.is_inexact_array))
        return jnp.concatenate([leaf.ravel() for leaf in leaves])

    _agree(program)


def _cells(line):
    """The texts of the cells of a row, without the marks of code."""
    return tuple(cell.strip().replace("`", "") for cell in line.strip("| ").split("|"))


def _rows_of_the_page():
    _, _, section = PAGE.read_text(encoding="utf-8").partition("\n## What to swap\n")
    section = section.partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    # Without the heads of the tables and the lines below them.
    return [
        _cells(line)
        for line, below in zip(lines, [*lines[1:], ""], strict=True)
        if not re.fullmatch(r"[| -]+", line) and not re.fullmatch(r"[| -]+", below)
    ]


def test_the_page_and_the_tests_have_the_same_rows():
    assert _rows_of_the_page() == [tuple(filter(None, cells)) for cells in ROWS]


@pytest.mark.parametrize("test", ROWS.values(), ids=lambda test: test.__name__)
def test_what_to_swap(test, tmp_path):
    test(tmp_path) if test is files_have_names else test()
