"""Recurrent cells against Equinox's, and layers over sequences against the cells called step by step."""

import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn, tree_at, tree_equal

CELLS = {"GRU": (nn.GRUCell, eqx.nn.GRUCell), "LSTM": (nn.LSTMCell, eqx.nn.LSTMCell)}
LAYERS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}

every = pytest.mark.parametrize("kind", LAYERS)


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def state_like(kind, hidden):
    return (hidden, jnp.flip(hidden, -1)) if kind == "LSTM" else hidden


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.sample(3)
def test_a_step_and_its_gradient_are_equinoxs(kind, use_bias, getkey):
    ours, theirs = (make(3, 4, use_bias=use_bias, key=getkey()) for make in CELLS[kind])
    names = [n for n in ("weight_ih", "weight_hh", "bias", "bias_n") if hasattr(theirs, n)]
    for name in names:
        if getattr(ours, name) is not None:
            theirs = eqx.tree_at(lambda m, n=name: getattr(m, n), theirs, getattr(ours, name))
    x, state = (
        jax.random.normal(getkey(), (3,)),
        state_like(kind, jax.random.normal(getkey(), (4,))),
    )
    close(ours(x, state), theirs(x, state))

    def loss(cell, x, state):
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(cell(x, state)))

    grads = jax.grad(loss, argnums=(0, 1, 2))(ours, x, state)
    expected = eqx.filter_grad(lambda given: loss(*given))((theirs, x, state))
    close(grads[1:], expected[1:])
    for name in names:
        close(getattr(grads[0], name), getattr(expected[0], name))


def by_hand(layer, xs, state, length):
    """What a layer computes, one cell and one step after the other."""
    finals = []
    for cells in layer.cells:
        outputs = []
        for cell, steps in zip(cells, (range(length), reversed(range(length))), strict=False):
            at = len(finals)
            h = jax.tree.map(lambda s, at=at: s[at], state)
            ys = [jnp.zeros(layer.hidden_size)] * len(xs)
            for t in steps:
                h = cell(xs[t], h)
                ys[t] = jax.tree.leaves(h)[0]
            outputs.append(jnp.stack(ys))
            finals.append(h)
        xs = jnp.concatenate(outputs, axis=-1)
    return xs, jax.tree.map(lambda *parts: jnp.stack(parts), *finals)


@every
@pytest.mark.parametrize(("bidirectional", "length"), [(True, None), (True, 3), (False, 0)])
@pytest.mark.sample(6)
def test_a_layer_is_its_cells_step_by_step(kind, bidirectional, length, getkey):
    layer = LAYERS[kind](3, 2, num_layers=2, bidirectional=bidirectional, key=getkey())
    rows = 4 if bidirectional else 2
    xs, hidden = jax.random.normal(getkey(), (5, 3)), jax.random.normal(getkey(), (rows, 2))
    state = state_like(kind, hidden)
    steps = len(xs) if length is None else length
    found, expected = jax.jit(
        lambda layer, xs, state: (
            layer(xs, state, length=length),
            by_hand(layer, xs, state, steps),
        )
    )(layer, xs, state)
    close(found, expected)


@every
@pytest.mark.sample(3)
def test_a_batch_has_states_and_lengths_of_its_own(kind, getkey):
    layer = LAYERS[kind](3, 2, bidirectional=True, key=getkey())
    xs, lengths = jax.random.normal(getkey(), (3, 5, 3)), jnp.array([5, 2, 0])
    hidden = state_like(kind, jax.random.normal(getkey(), (3, 2, 2)))

    @jax.jit
    def all_ways(layer, xs, lengths, state):
        one_by_one = [
            layer(xs[i], jax.tree.map(lambda s, i=i: s[i], state), length=n)
            for i, n in enumerate([5, 2, 0])
        ]
        return (
            layer(xs, state, length=lengths),
            jax.vmap(lambda x, h, n: layer(x, h, length=n))(xs, state, lengths),
            jax.tree.map(lambda *parts: jnp.stack(parts), *one_by_one),
        )

    batched, mapped, stacked = all_ways(layer, xs, lengths, hidden)
    close(batched, stacked)
    close(mapped, stacked)
    assert not batched[0][1, 2:].any()


@every
@pytest.mark.sample(3)
def test_accelerators_project_the_input_before_the_loop_to_the_same_result(
    kind, getkey, monkeypatch
):
    layer = LAYERS[kind](3, 2, num_layers=2, bidirectional=True, key=getkey())
    xs, lengths = jax.random.normal(getkey(), (2, 5, 3)), jnp.array([5, 3])
    results = {}
    for backend, products in (("cpu", 2), ("gpu", 1)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        program = jax.jit(lambda layer, xs, lengths: layer(xs, length=lengths)).trace(
            layer, xs, lengths
        )
        loops = [e for e in program.jaxpr.eqns if e.primitive.name == "scan"]
        assert len(loops) == 4
        for loop in loops:
            inside = [str(e.primitive) for e in loop.params["jaxpr"].jaxpr.eqns]
            assert inside.count("dot_general") == products
        results[backend] = program.lower().compile()(layer, xs, lengths)
    close(results["cpu"], results["gpu"])


def test_an_rnn_cell_is_its_definition_with_any_activation(getkey):
    cell = nn.RNNCell(3, 4, activation=jax.nn.softplus, key=getkey())
    x, h = jax.random.normal(getkey(), (3,)), jax.random.normal(getkey(), (4,))
    close(cell(x, h), jax.nn.softplus(cell.weight_ih @ x + cell.weight_hh @ h + cell.bias))
    without = nn.RNNCell(3, 4, use_bias=False, key=getkey())
    assert without.bias is None
    close(without(x, h), jnp.tanh(without.weight_ih @ x + without.weight_hh @ h))


def test_the_activation_of_an_rnn_may_have_weights(getkey):
    layer = nn.RNN(3, 2, num_layers=2, activation=nn.PReLU(), key=getkey())
    xs = jax.random.normal(getkey(), (5, 3))
    gradient = jax.jit(jax.grad(lambda layer: layer(xs)[0].sum()))(layer)
    assert all(cell.activation.negative_slope != 0 for (cell,) in gradient.cells)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), layer)
    assert half(xs.astype(jnp.bfloat16))[0].dtype == jnp.bfloat16


def test_dropout_is_between_the_layers_only(getkey):
    layer = nn.GRU(3, 2, num_layers=2, dropout_p=1.0, key=getkey())
    without_input = tree_at(
        lambda m: m.cells[1][0].weight_ih, layer, jnp.zeros_like(layer.cells[1][0].weight_ih)
    )
    xs = jax.random.normal(getkey(), (5, 3))
    ys, state = layer(xs, key=getkey())
    close(ys, nn.inference_mode(without_input)(xs)[0])
    close(state[0], nn.inference_mode(layer)(xs)[1][0])
    one = nn.GRU(3, 2, dropout_p=1.0, key=getkey())
    close(one(xs), nn.inference_mode(one)(xs))


@every
def test_dropout_is_independent_for_each_sequence_of_a_batch(kind, getkey):
    layer = LAYERS[kind](3, 20, num_layers=2, dropout_p=0.5, key=getkey())
    xs = jnp.broadcast_to(jax.random.normal(getkey(), (4, 3)), (2, 4, 3))
    ys, _ = jax.jit(layer)(xs, key=getkey())
    assert not jnp.allclose(ys[0], ys[1])


@every
def test_wrong_shapes_are_refused(kind, getkey):
    layer = LAYERS[kind](3, 2, key=getkey())
    with pytest.raises(
        ValueError, match=rf"(?s)`{kind}`.*argument `xs`.*\(\.\.\., time, input_size=3\)"
    ):
        layer(jnp.ones((5, 4)))
    with pytest.raises(ValueError, match=r"(?s)argument `state`.*num_layers \* directions=1"):
        layer(jnp.ones((5, 3)), state_like(kind, jnp.ones((3, 2))))
    with pytest.raises(ValueError, match=r"(?s)argument `length`.*expected: \(7,\)"):
        layer(jnp.ones((7, 5, 3)), length=3)
    for length in (2.5, jnp.array(2.0), True):
        with pytest.raises(
            TypeError, match="(?s)a length that is not an integer.*argument `length`"
        ):
            layer(jnp.ones((5, 3)), length=length)
    with pytest.raises(ValueError, match="num_layers"):
        LAYERS[kind](3, 2, num_layers=0, key=getkey())
    cell = layer.cells[0][0]
    with pytest.raises(ValueError, match=rf"(?s)`{kind}Cell`.*argument `input`"):
        cell(jnp.ones(2), state_like(kind, jnp.ones(2)))
    with pytest.raises(ValueError, match="argument `hidden"):
        cell(jnp.ones(3), state_like(kind, jnp.ones(3)))
    with pytest.raises(ValueError, match=f"weights of `{kind}Cell` must be floating-point"):
        type(cell)(3, 2, dtype=jnp.int32, key=getkey())


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.sample(3)
def test_lengths_that_a_sequence_has_not_are_refused_where_they_are_known(kind, getkey):
    layer, xs = kind(2, 3, key=getkey()), jax.random.normal(getkey(), (2, 5, 2))
    for wrong, said in [(6, "got: 6"), (-1, "got: -1")]:
        for length in (wrong, np.int32(wrong), jnp.array(wrong)):
            with pytest.raises(ValueError, match=rf"(?s)`{kind.__name__}`.*from 0 to 5.*{said}"):
                layer(xs[0], length=length)
            with pytest.raises(ValueError, match=rf"(?s)`{kind.__name__}`.*from 0 to 5.*{said}"):
                jax.jit(lambda xs, length=length: layer(xs, length=length))(xs[0])
    with pytest.raises(ValueError, match="(?s)argument `length`.*got: from 2 to 7"):
        layer(xs, length=jnp.array([7, 2]))
    # Unknown, it is that of the sequence, or 0.
    run = jax.jit(lambda length: layer(xs, length=length))
    for length, same in [([7, 2], [5, 2]), ([3, -4], [3, 0])]:
        for found, wanted in zip(
            jax.tree.leaves(run(jnp.array(length))),
            jax.tree.leaves(layer(xs, length=jnp.array(same))),
            strict=True,
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert layer(xs[0], length=5)[0].any() and not layer(xs[0], length=0)[0].any()


def test_a_state_of_another_structure_is_refused(getkey):
    layer = nn.LSTM(3, 2, key=getkey())
    with pytest.raises(ValueError, match="`LSTM` was given a state of the wrong structure"):
        # Without the check of annotations, which would answer first.
        inspect.unwrap(nn.LSTM.__call__)(
            layer, jnp.ones((5, 3)), [jnp.ones((1, 2)), jnp.ones((1, 2))]
        )


MIXED = [
    (inputs, weights, state)
    for inputs in ("int32", "bfloat16", "float32")
    for weights in ("bfloat16", "float32")
    for state in (None, "int32", "bfloat16", "float32")
]


def _dtypes(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


def _numbers(shape, dtype):
    return (jnp.arange(np.prod(shape)).reshape(shape) % 5 - 2).astype(dtype)


def _first(kind, shape, dtype):
    return None if dtype is None else state_like(kind, _numbers(shape, dtype))


@pytest.mark.slow
@every
def test_dtypes_are_promoted_together(kind, getkey):
    for inputs, weights, state in MIXED:
        layer = LAYERS[kind](2, 3, num_layers=2, bidirectional=True, dtype=weights, key=getkey())
        with jax.numpy_dtype_promotion("standard"):
            wanted = {str(jnp.result_type(*filter(None, (inputs, weights, state))))}
            for batch in ((), (4,)):
                xs, first = _numbers((*batch, 5, 2), inputs), _first(kind, (*batch, 4, 3), state)
                length = jnp.full(batch, 3)
                assert _dtypes(jax.eval_shape(layer, xs, first)) == wanted
                cut = functools.partial(layer, xs, first, length=length)
                assert _dtypes(jax.eval_shape(cut)) == wanted
            if state is not None:
                cell = getattr(nn, f"{kind}Cell")(2, 3, dtype=weights, key=getkey())
                one = jax.eval_shape(cell, _numbers((2,), inputs), _first(kind, (3,), state))
                assert _dtypes(one) == wanted


@every
@pytest.mark.parametrize("inputs", ["int32", "bfloat16"])
@pytest.mark.sample(3)
def test_the_values_are_those_of_promoted_arguments(kind, inputs, getkey):
    layer = LAYERS[kind](2, 3, num_layers=2, key=getkey())
    xs, first = _numbers((5, 2), inputs), _first(kind, (2, 3), "bfloat16")
    promoted = jax.tree.map(lambda x: x.astype("float32"), (xs, first))
    with jax.numpy_dtype_promotion("standard"):
        close(layer(xs, first), layer(*promoted))


@every
def test_a_memory_of_another_dtype_and_weak_types_make_one_dtype(kind, getkey):
    layer = LAYERS[kind](2, 3, dtype="bfloat16", key=getkey())
    xs, weak = jnp.ones((5, 2), "bfloat16"), jnp.full((1, 3), 0.5)
    assert weak.weak_type
    with jax.numpy_dtype_promotion("standard"):
        if kind == "LSTM":
            mixed = layer(xs, (jnp.zeros((1, 3), "bfloat16"), jnp.zeros((1, 3), "float32")))
            assert _dtypes(mixed) == {"float32"}
        out = layer(xs, (weak, weak) if kind == "LSTM" else weak)
    assert _dtypes(out) == {"bfloat16"}
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(out))


@every
def test_gradients_go_through_a_promotion(kind, getkey):
    layer, xs = LAYERS[kind](2, 3, key=getkey()), jnp.ones((5, 2), "bfloat16")

    def loss(layer, xs):
        return jnp.sum(layer(xs)[0])

    with jax.numpy_dtype_promotion("standard"):
        of_layer, of_xs = jax.grad(loss, argnums=(0, 1))(layer, xs)
    assert _dtypes(of_layer) == {"float32"}
    assert of_xs.dtype == "bfloat16"


@every
def test_strict_promotion_refuses_what_linear_refuses(kind, getkey):
    layer, xs = LAYERS[kind](2, 3, key=getkey()), jnp.ones((5, 2), "bfloat16")
    for refuse in (layer, nn.Linear(2, 3, key=getkey())):
        with pytest.raises(Exception, match="promotion"):
            refuse(xs)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("layer_type", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.sample(3)
def test_what_pads_a_sequence_does_not_reach_gradients(layer_type, bad, getkey):
    layer = layer_type(3, 2, bidirectional=True, key=getkey())
    x = jax.random.normal(getkey(), (2, 6, 3))
    length = jnp.array([4, 6])

    def loss(layer, x):
        return jnp.sum(layer(x, length=length)[0] ** 2)

    expected = jax.grad(loss, argnums=(0, 1))(layer, x)
    got = jax.grad(loss, argnums=(0, 1))(layer, x.at[0, 4:].set(bad))
    assert tree_equal(expected, got)


def test_activations_that_need_a_key_are_refused(getkey):
    text = "(?s)an activation of `RNNCell` cannot be random: it is given no key.*Dropout"
    with pytest.raises(ValueError, match=text):
        nn.RNN(2, 3, activation=nn.Dropout(0.5), key=getkey())
    layer = nn.RNN(2, 3, key=getkey())
    later = tree_at("cells.0.0.activation", layer, nn.Dropout(0.5))
    with pytest.raises(ValueError, match=text):
        later(jnp.ones((4, 2)), key=getkey())


def test_a_length_that_is_a_text_is_refused(getkey):
    layer = nn.GRU(2, 3, key=getkey())
    call = inspect.unwrap(nn.GRU.__call__)
    with pytest.raises(TypeError, match="(?s)`GRU` was given a length.*integers"):
        call(layer, jnp.ones((4, 2)), length="3")
