"""Rules for the layers that PyTorch stores in another form than we do."""

import functools
from typing import Any

import numpy as np

from ._torch_rules import Conversion, Rules


def _under(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _sum(a: Any, b: Any) -> Any:
    return a + b


def _all_in_the_first(bias: Any) -> tuple[Any, Any]:
    return bias, np.zeros_like(bias)


def _new_gate_apart(bias_ih: Any, bias_hh: Any) -> tuple[Any, Any]:
    reset_update, new = np.split(bias_hh, [2 * len(bias_hh) // 3])
    return bias_ih + np.concatenate([reset_update, np.zeros_like(new)]), new


def _new_gate_back(bias: Any, bias_n: Any) -> tuple[Any, Any]:
    return bias, np.concatenate([np.zeros(2 * len(bias_n), bias_n.dtype), bias_n])


# For each cell: our biases, and the conversions from PyTorch's two and back.
# That of an RNN is that of an LSTM.
_SUMMED_BIAS = (("bias",), _sum, _all_in_the_first)
_GRU_BIAS = (("bias", "bias_n"), _new_gate_apart, _new_gate_back)


def _cell(ours: str, theirs: str, suffix: str, bias: Any) -> Rules:
    """Rules for one cell; its PyTorch tensors are those whose names end in `suffix`."""

    def name(part: str) -> str:
        return _under(theirs, part + suffix)

    rules: dict[str | tuple[str, ...], Any] = {
        _under(ours, weight): name(weight) for weight in ("weight_ih", "weight_hh")
    }
    if bias is not None:
        names, load, dump = bias
        both = name("bias_ih"), name("bias_hh")
        rules[tuple(_under(ours, n) for n in names)] = Conversion(both, load, dump)
    return rules


def _layers(ours: str, theirs: str, bidirectional: bool, bias: Any) -> Rules:
    rules = _cell(_under(ours, "cells.*.0"), theirs, "_l*", bias)
    if bidirectional:
        rules = {**rules, **_cell(_under(ours, "cells.*.1"), theirs, "_l*_reverse", bias)}
    return rules


def lstm_rules(
    ours: str = "", theirs: str = "", *, bidirectional: bool = False, use_bias: bool = True
) -> Rules:
    """Rules for `from_torch`: `nn.LSTM` from the tensors of `torch.nn.LSTM`.

    PyTorch has two biases, which are only ever added; ours is their sum. Converted back, the first is
    ours and the second is zero. (PyTorch trains both, so their sum moves by twice the gradient. To
    compare losses, call `requires_grad_(False)` on the second, `bias_hh_l*`, there.)

    Args:
        ours: the name of our layer in the model; empty if it is the model. It may have wildcards.
        theirs: the name of their layer, with as many wildcards.
        bidirectional: that of the layers.
        use_bias: likewise.

    Returns:
        Rules, to be joined with others by `|`.

    Example:
        >>> from vernal.saving import lstm_rules
        >>> lstm_rules("encoder", "rnn", use_bias=False)
        {'encoder.cells.*.0.weight_ih': 'rnn.weight_ih_l*', 'encoder.cells.*.0.weight_hh': 'rnn.weight_hh_l*'}
    """
    return _layers(ours, theirs, bidirectional, _SUMMED_BIAS if use_bias else None)


def lstm_cell_rules(ours: str = "", theirs: str = "", *, use_bias: bool = True) -> Rules:
    """Rules for `from_torch`: `nn.LSTMCell` from the tensors of `torch.nn.LSTMCell`.

    The biases are treated as by `lstm_rules`.

    Args:
        ours: and all others: as for `lstm_rules`.

    Returns:
        Rules, to be joined with others by `|`.

    Example:
        >>> from vernal.saving import lstm_cell_rules
        >>> list(lstm_cell_rules("cell", "rnn"))
        ['cell.weight_ih', 'cell.weight_hh', ('cell.bias',)]
    """
    return _cell(ours, theirs, "", _SUMMED_BIAS if use_bias else None)


def rnn_rules(
    ours: str = "", theirs: str = "", *, bidirectional: bool = False, use_bias: bool = True
) -> Rules:
    """Rules for `from_torch`: `nn.RNN` from the tensors of `torch.nn.RNN`.

    The biases are treated as by `lstm_rules`.

    Args:
        ours: and all others: as for `lstm_rules`.

    Returns:
        Rules, to be joined with others by `|`.

    Example:
        >>> from vernal.saving import rnn_rules
        >>> rnn_rules("encoder", "rnn", use_bias=False)
        {'encoder.cells.*.0.weight_ih': 'rnn.weight_ih_l*', 'encoder.cells.*.0.weight_hh': 'rnn.weight_hh_l*'}
    """
    return _layers(ours, theirs, bidirectional, _SUMMED_BIAS if use_bias else None)


def rnn_cell_rules(ours: str = "", theirs: str = "", *, use_bias: bool = True) -> Rules:
    """Rules for `from_torch`: `nn.RNNCell` from the tensors of `torch.nn.RNNCell`.

    The biases are treated as by `lstm_rules`.

    Args:
        ours: and all others: as for `lstm_rules`.

    Returns:
        Rules, to be joined with others by `|`.

    Example:
        >>> from vernal.saving import rnn_cell_rules
        >>> list(rnn_cell_rules("cell", "rnn"))
        ['cell.weight_ih', 'cell.weight_hh', ('cell.bias',)]
    """
    return _cell(ours, theirs, "", _SUMMED_BIAS if use_bias else None)


def gru_rules(
    ours: str = "", theirs: str = "", *, bidirectional: bool = False, use_bias: bool = True
) -> Rules:
    """Rules for `from_torch`: `nn.GRU` from the tensors of `torch.nn.GRU`.

    PyTorch has two biases. For the reset and update gates they are only ever added, and ours is
    their sum; for the new gate we have both. Converted back, the second is zero where ours is the sum.

    Args:
        ours: and all others: as for `lstm_rules`.

    Returns:
        Rules, to be joined with others by `|`.

    Example:
        >>> from vernal.saving import gru_rules
        >>> list(gru_rules("gru", "rnn"))
        ['gru.cells.*.0.weight_ih', 'gru.cells.*.0.weight_hh', ('gru.cells.*.0.bias', 'gru.cells.*.0.bias_n')]
    """
    return _layers(ours, theirs, bidirectional, _GRU_BIAS if use_bias else None)


def gru_cell_rules(ours: str = "", theirs: str = "", *, use_bias: bool = True) -> Rules:
    """Rules for `from_torch`: `nn.GRUCell` from the tensors of `torch.nn.GRUCell`.

    The biases are treated as by `gru_rules`.

    Args:
        ours: and all others: as for `lstm_rules`.

    Returns:
        Rules, to be joined with others by `|`.

    Example:
        >>> from vernal.saving import gru_cell_rules
        >>> list(gru_cell_rules(use_bias=False))
        ['weight_ih', 'weight_hh']
    """
    return _cell(ours, theirs, "", _GRU_BIAS if use_bias else None)


def attention_rules(ours: str = "", theirs: str = "", *, use_bias: bool = True) -> Rules:
    """Rules for `from_torch`: `nn.MultiheadAttention` from the tensors of
    `torch.nn.MultiheadAttention`, which keeps three of the weights in one. (With `kdim` or `vdim`
    it does not: their names are then `q_proj_weight`, `k_proj_weight` and `v_proj_weight`.)

    Args:
        ours: the name of our layer in the model; empty if it is the model. It may have wildcards.
        theirs: the name of their layer, with as many wildcards, and `#` for the index in a `Stack`.
        use_bias: that of their layer; ours must have `use_query_bias`, `use_key_bias`,
            `use_value_bias` and `use_output_bias` equal to it.

    Returns:
        Rules, to be joined with others by `|`.

    Example:
        >>> from vernal.saving import attention_rules
        >>> list(attention_rules(use_bias=False).values())
        ['in_proj_weight', 'out_proj.weight']
    """
    rules: dict[str | tuple[str, ...], Any] = {}
    for name in ("weight", "bias")[: 2 if use_bias else 1]:
        three = tuple(_under(ours, f"{part}_proj.{name}") for part in ("query", "key", "value"))
        rules[three] = _under(theirs, f"in_proj_{name}")
        rules[_under(ours, f"output_proj.{name}")] = _under(theirs, f"out_proj.{name}")
    return rules


def weight_norm_rules(ours: str = "", theirs: str = "", *, use_bias: bool = True) -> Rules:
    """Rules for `from_torch`: `nn.WeightNorm` of a layer from the tensors of that layer under
    `torch.nn.utils.parametrizations.weight_norm`.

    Args:
        ours: as for `attention_rules`.
        theirs: likewise.
        use_bias: whether the layer has a bias.

    Returns:
        Rules, to be joined with others by `|`.

    Example:
        >>> from vernal.saving import weight_norm_rules
        >>> weight_norm_rules(use_bias=False)
        {'g': 'parametrizations.weight.original0', 'layer.weight': 'parametrizations.weight.original1'}
    """
    parts = {"g": "original0", "layer.weight": "original1"}
    return _parametrized(parts, ours, theirs, use_bias)


def spectral_norm_rules(ours: str = "", theirs: str = "", *, use_bias: bool = True) -> Rules:
    """Rules for `from_torch`: `nn.SpectralNorm` of a layer from the tensors of that layer under
    `torch.nn.utils.parametrizations.spectral_norm`.

    Args:
        ours: as for `attention_rules`.
        theirs: likewise.
        use_bias: whether the layer has a bias.

    Returns:
        Rules, to be joined with others by `|`.

    Example:
        >>> from vernal.saving import spectral_norm_rules
        >>> list(spectral_norm_rules("conv", "conv"))
        ['conv.layer.weight', 'conv.vectors.0', 'conv.vectors.1', 'conv.layer.bias']
    """
    parts = {"layer.weight": "original", "vectors.0": "0._u", "vectors.1": "0._v"}
    return _parametrized(parts, ours, theirs, use_bias)


def _parametrized(parts: dict[str, str], ours: str, theirs: str, use_bias: bool) -> Rules:
    """Rules for a layer whose weight PyTorch computes from these parts."""
    rules: dict[str | tuple[str, ...], Any] = {
        _under(ours, part): _under(theirs, f"parametrizations.weight.{name}")
        for part, name in parts.items()
    }
    return rules | ({_under(ours, "layer.bias"): _under(theirs, "bias")} if use_bias else {})


def conv_transpose_rules(
    ours: str = "", theirs: str = "", *, groups: int = 1, use_bias: bool = True
) -> Rules:
    """Rules for `from_torch`: `nn.ConvTranspose` from the tensors of `torch.nn.ConvTranspose2d` and
    its like.

    PyTorch stores the kernel of the convolution whose transpose this is, with shape
    `(in_channels, out_channels/groups, *kernel_size)`; ours is flipped in space, with the input and
    output channels of each group exchanged.

    Args:
        ours: as for `attention_rules`.
        theirs: likewise.
        groups: that of the layers.
        use_bias: likewise.

    Returns:
        Rules, to be joined with others by `|`.

    Example:
        >>> from vernal.saving import conv_transpose_rules
        >>> list(conv_transpose_rules("decoder.*", "up.*"))
        ['decoder.*.weight', 'decoder.*.bias']
    """
    turn = functools.partial(_transpose, groups=groups)
    weight, bias = _under(theirs, "weight"), _under(theirs, "bias")
    rules: dict[str | tuple[str, ...], Any] = {
        _under(ours, "weight"): Conversion(weight, turn, turn)
    }
    return rules | ({_under(ours, "bias"): bias} if use_bias else {})


def _transpose(kernel: Any, groups: int) -> Any:
    """Flips a kernel in space and exchanges its channel axes, group by group; its own inverse."""
    out_channels, in_channels, *size = kernel.shape
    kernel = kernel.reshape(groups, out_channels // groups, in_channels, *size)
    kernel = np.flip(np.swapaxes(kernel, 1, 2), tuple(range(3, kernel.ndim)))
    return kernel.reshape(groups * in_channels, out_channels // groups, *size)
