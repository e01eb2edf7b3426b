"""`examples/load_gpt2.py` against `transformers`."""

import os
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from vernal.saving import to_torch

os.environ["HF_HUB_OFFLINE"] = "1"
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "load_gpt2.py")


@pytest.mark.slow
def test_a_checkpoint_of_gpt2_gives_the_logits_and_texts_of_transformers(tmp_path, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
    config = GPT2Config(
        **sizes, n_inner=20, layer_norm_epsilon=1e-3, eos_token_id=None, initializer_range=0.3
    )
    theirs = GPT2LMHeadModel(config).eval()
    # The norms begin as ones and zeros, which could be exchanged unnoticed.
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape) / 10)
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1

    example = runpy.run_path(EXAMPLE)
    model = example["load"](tmp_path / "whole")
    again = example["load"](tmp_path / "shards")
    jax.tree.map(np.testing.assert_array_equal, again, model)

    tokens = np.random.default_rng(0).integers(0, 50, (2, 9))
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits.numpy()
        texts = theirs.generate(
            torch.tensor(tokens[:, :3]), max_length=16, do_sample=False, pad_token_id=0
        )
    np.testing.assert_allclose(model(jnp.array(tokens)), logits, rtol=1e-4, atol=1e-4)
    for text in texts.numpy():
        got = example["generate"](model, jnp.array(text[:3]), 16)
        np.testing.assert_array_equal(got, text)

    state = to_torch(model, example["rules"]("transformer."), like=theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(state[name], tensor), name

    sys_argv = [EXAMPLE, str(tmp_path / "whole"), "--tokens", *map(str, texts[0, :3].tolist())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*sys_argv, "--length", "16"])
        runpy.run_path(EXAMPLE, run_name="__main__")
        patch.setattr(sys, "argv", [EXAMPLE])
        runpy.run_path(EXAMPLE, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("in 2 blocks") and lines[1] == " ".join(map(str, texts[0].tolist()))
    difference = float(lines[2].split()[-1])
    assert difference < 1e-4 and lines[3] == "the text is the same"
