"""Weights to and from PyTorch itself. (The rules are in `test_rules.py`, the layers in `tests/nn/test_torch.py`.)"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import vernal
from vernal import nn, saving
from vernal.saving import (
    Tied,
    conv_transpose_rules,
    from_torch,
    gru_rules,
    lstm_rules,
    rnn_cell_rules,
    rnn_rules,
    to_torch,
)

DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "int64", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_cross_both_ways(dtype):
    theirs = {"w": torch.tensor([[1, 0, 2]]).to(getattr(torch, dtype))}
    values = [[1, 0, 1]] if dtype == "bool" else [[1, 0, 2]]
    ours = from_torch({"w": np.zeros((1, 3), dtype)}, theirs)
    assert ours["w"].dtype == dtype and ours["w"].astype(int).tolist() == values
    (back,) = to_torch(ours, like=theirs).values()
    assert back.dtype == theirs["w"].dtype and torch.equal(back.float(), theirs["w"].float())


def test_counts_of_64_bits_become_those_of_32_that_the_model_has():
    ours = from_torch({"steps": jnp.zeros((), jnp.int32)}, {"steps": torch.tensor(2**31 - 1)})
    assert ours["steps"].dtype == jnp.int32 and ours["steps"] == 2**31 - 1


def test_parameters_are_read_as_they_are_and_not_shared():
    module = torch.nn.Linear(3, 2).to(torch.bfloat16)
    layer = from_torch(nn.Linear(3, 2, key=jax.random.key(0)), dict(module.named_parameters()))
    before = module.weight.detach().float().numpy().copy()
    with torch.no_grad():
        module.weight.zero_()
    assert layer.weight.dtype == jnp.float32
    np.testing.assert_array_equal(layer.weight, before)


class Theirs(torch.nn.Module):
    """Layers that PyTorch keeps in another form, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.ConvTranspose2d(4, 6, (3, 2), groups=2)
        self.lstm = torch.nn.LSTM(3, 2, num_layers=2, bidirectional=True)
        self.gru = torch.nn.GRU(3, 2)
        self.rnn = torch.nn.RNN(3, 2, num_layers=2, bidirectional=True)
        self.step = torch.nn.RNNCell(3, 2)
        self.norm = torch.nn.BatchNorm1d(2, affine=False)
        self.embedding = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, image, xs, tokens):
        sequences = self.lstm(xs)[0], self.gru(xs)[0], self.rnn(xs)[0], self.step(xs)
        return self.up(image), *sequences, self.head(self.embedding(tokens))


def test_a_module_that_takes_our_weights_computes_what_it_did_before():
    torch.manual_seed(0)
    module = Theirs().eval()

    def make(key):
        return {
            "up": nn.ConvTranspose2d(4, 6, (3, 2), groups=2, key=key),
            "lstm": nn.LSTM(3, 2, num_layers=2, bidirectional=True, key=key),
            "gru": nn.GRU(3, 2, key=key),
            "rnn": nn.RNN(3, 2, num_layers=2, bidirectional=True, key=key),
            "step": nn.RNNCell(3, 2, key=key),
            "embedding": nn.Embedding(5, 3, key=key),
        }

    rules = (
        conv_transpose_rules("up", "up", groups=2)
        | lstm_rules("lstm", "lstm", bidirectional=True)
        | gru_rules("gru", "gru")
        | rnn_rules("rnn", "rnn", bidirectional=True)
        | rnn_cell_rules("step", "step")
        | {"embedding.weight": Tied("embedding.weight", "head.weight")}
    )
    skeleton = jax.eval_shape(make, jax.random.key(0))
    model = from_torch(skeleton, module.state_dict(), rules, ignore=["norm.*"])
    assert model["up"].weight.shape == skeleton["up"].weight.shape
    inputs = torch.randn(1, 4, 3, 3), torch.randn(4, 3), torch.tensor([1, 4])
    before = module(*inputs)
    state = to_torch(model, rules, like=module.state_dict(), ignore=["norm.*"])
    fresh = Theirs().eval()
    fresh.load_state_dict(state)
    for a, b in zip(before, fresh(*inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert fresh.head.weight is fresh.embedding.weight


@pytest.mark.parametrize("where", ["", "layers.0"])
def test_a_kernel_of_another_form_is_no_kernel_of_ours_though_the_shapes_agree(where):
    layer = nn.ConvTranspose2d(4, 4, 3, key=jax.random.key(0))
    model = nn.Sequential([layer]) if where else layer
    theirs = torch.nn.ConvTranspose2d(4, 4, 3)
    source = torch.nn.Sequential(theirs) if where else theirs
    for call in (lambda: from_torch(model, source.state_dict()), lambda: to_torch(model)):
        with pytest.raises(ValueError, match="PyTorch stores these arrays in another layout"):
            call()
    rules = conv_transpose_rules(where, "0" if where else "")
    loaded = from_torch(model, source.state_dict(), rules)
    x = np.random.default_rng(0).normal(size=(4, 5, 5)).astype(np.float32)
    expected = theirs(torch.tensor(x[None]))[0].detach().numpy()
    np.testing.assert_allclose(loaded(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)


def test_a_module_in_the_place_of_its_weights_is_refused():
    layer = nn.Linear(2, 3, key=jax.random.key(0))
    with pytest.raises(
        TypeError, match=r"(?s)tensors by name.*Linear\(in_features.*module\.state_dict\(\)"
    ):
        inspect.unwrap(saving.from_torch)(layer, torch.nn.Linear(2, 3))


def test_one_pattern_to_ignore_is_not_read_letter_by_letter():
    theirs = torch.nn.BatchNorm1d(3).state_dict()
    ours = vernal.tree_at(
        ["weight", "num_batches_tracked"],
        nn.BatchNorm(3),
        [jnp.full(3, 5.0), jnp.array(jnp.inf)],
    )
    for ignore in ("**.num_batches_tracked", ["**.num_batches_tracked"]):
        assert to_torch(ours, like=theirs, ignore=ignore)["weight"].tolist() == [5, 5, 5]
    more = {**theirs, "extra": torch.zeros(1)}
    assert from_torch(nn.BatchNorm(3), more, ignore="extra").weight.shape == (3,)
    with pytest.raises(ValueError, match="extra"):
        from_torch(nn.BatchNorm(3), more, ignore="*k")


def test_tensors_that_share_their_memory_take_one_value():
    theirs = torch.nn.Linear(2, 2, bias=False)
    like = {"first": theirs.weight, "second": theirs.weight, "empty": torch.ones(0)}
    one, other, empty = jnp.full((2, 2), jnp.nan), jnp.zeros((2, 2)), jnp.ones(0)
    same = to_torch({"first": one, "second": one, "empty": empty}, like=like)
    assert same["first"].isnan().all() and same["second"].isnan().all()
    with pytest.raises(ValueError, match=r"(?s)tensors of `like` are tied.*first, second"):
        to_torch({"first": one, "second": other, "empty": empty}, like=like)
    turned = {"first": theirs.weight, "second": theirs.weight.T}
    numbers = jnp.arange(4.0).reshape(2, 2)
    with pytest.raises(ValueError, match=r"(?s)tensors of `like` are tied.*first, second"):
        to_torch({"first": numbers, "second": numbers}, like=turned)
    assert len(to_torch({"first": numbers, "second": numbers.T}, like=turned)) == 2
