"""Loads a GPT-2 checkpoint of Hugging Face into a model of this library, and continues a text with it.

    python examples/load_gpt2.py FOLDER [--prefix transformer.] [--tokens 1 2 3] [--length 20]

The folder is what `save_pretrained` writes: `config.json` and safetensors. (In the checkpoints that OpenAI published,
the names of the tensors begin at once: `--prefix ""`.) Tokens are given and printed as numbers. Without a folder,
PyTorch and `transformers` make a small random model, save it, and are compared with. To fine-tune the last block alone,
take it out of the `Stack` first: see "Stacks" in the guide to layers.
"""

import argparse
import functools
import json
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import vernal
from vernal import nn
from vernal.saving import Conversion, Tied, from_torch


class Block(vernal.Module):
    norm_1: nn.LayerNorm
    attention: nn.MultiheadAttention
    norm_2: nn.LayerNorm
    wide: nn.Linear
    narrow: nn.Linear

    def __init__(self, size, heads, inner, eps, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.norm_1 = nn.LayerNorm(size, eps)
        biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.attention = nn.MultiheadAttention(heads, size, **biases, key=k1)
        self.norm_2 = nn.LayerNorm(size, eps)
        self.wide = nn.Linear(size, inner, key=k2)
        self.narrow = nn.Linear(inner, size, key=k3)

    def __call__(self, x):
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, causal=True)
        return x + self.narrow(jax.nn.gelu(self.wide(self.norm_2(x)), approximate=True))


class GPT2(vernal.Module):
    """From tokens, of shape `(..., time)`, to the logits of the next one at each time."""

    tokens: nn.Embedding
    positions: nn.Embedding
    blocks: nn.Stack
    norm: nn.LayerNorm

    def __init__(self, config, key):
        k1, k2, k3 = jax.random.split(key, 3)
        size, eps = config["n_embd"], config["layer_norm_epsilon"]
        inner = config.get("n_inner") or 4 * size
        self.tokens = nn.Embedding(config["vocab_size"], size, key=k1)
        self.positions = nn.Embedding(config["n_positions"], size, key=k2)
        self.blocks = nn.Stack(
            lambda key: Block(size, config["n_head"], inner, eps, key), config["n_layer"], key=k3
        )
        self.norm = nn.LayerNorm(size, eps)

    def __call__(self, tokens):
        x = self.tokens(tokens)
        x = x + jnp.broadcast_to(self.positions(jnp.arange(tokens.shape[-1])), x.shape)
        # The same matrix as at the beginning: GPT-2 ties them.
        return self.norm(self.blocks(x)) @ self.tokens.weight.T


def rules(prefix):
    """Where the arrays of `GPT2` are in a checkpoint. `#` is the number of the block."""
    block = f"{prefix}h.#"

    def transposed(name):
        return Conversion(name, np.transpose, np.transpose)

    def three(name):
        return tuple(f"blocks.layers.attention.{n}_proj.{name}" for n in ("query", "key", "value"))

    return {
        "tokens.weight": Tied(f"{prefix}wte.weight", "lm_head.weight"),
        "positions.weight": f"{prefix}wpe.weight",
        "norm.*": f"{prefix}ln_f.*",
        "blocks.layers.norm_*.*": f"{block}.ln_*.*",
        # GPT-2 stores its matrices the other way round, and three of them in one.
        three("weight"): Conversion(
            f"{block}.attn.c_attn.weight",
            lambda joined: np.split(joined.T, 3),
            lambda *parts: np.concatenate(parts).T,
        ),
        three("bias"): f"{block}.attn.c_attn.bias",
        "blocks.layers.attention.output_proj.weight": transposed(f"{block}.attn.c_proj.weight"),
        "blocks.layers.attention.output_proj.bias": f"{block}.attn.c_proj.bias",
        "blocks.layers.wide.weight": transposed(f"{block}.mlp.c_fc.weight"),
        "blocks.layers.wide.bias": f"{block}.mlp.c_fc.bias",
        "blocks.layers.narrow.weight": transposed(f"{block}.mlp.c_proj.weight"),
        "blocks.layers.narrow.bias": f"{block}.mlp.c_proj.bias",
    }


# The causal mask, which old checkpoints hold too.
MASKS = ["**.attn.bias", "**.attn.masked_bias"]


def load(folder, prefix="transformer."):
    """The model in a folder. Nothing is initialised only to be overwritten: `eval_shape` makes shapes, no arrays."""
    config = json.loads(Path(folder, "config.json").read_text())
    assert config["activation_function"] == "gelu_new", config["activation_function"]
    skeleton = jax.eval_shape(functools.partial(GPT2, config), jax.random.key(0))
    return from_torch(skeleton, folder, rules(prefix), ignore=MASKS)


@vernal.filter_jit
def generate(model, tokens, length):
    """Continues tokens by the likeliest ones, up to a length. What is not written yet comes later, and is not seen."""
    text = jnp.zeros(length, tokens.dtype).at[: len(tokens)].set(tokens)

    def write(i, text):
        return text.at[i].set(model(text)[i - 1].argmax().astype(text.dtype))

    return jax.lax.fori_loop(len(tokens), length, write, text)


def compare_with_transformers(tokens, length):
    """Makes a small random model with `transformers`, loads what it saves, and computes the same with both."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=None, initializer_range=0.2)
    theirs = GPT2LMHeadModel(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = load(folder)
    with torch.no_grad():
        batch = torch.tensor([tokens])
        wanted = theirs(batch).logits[0].numpy()
        text = theirs.generate(batch, max_length=length, do_sample=False, pad_token_id=0)
    difference = np.abs(ours(jnp.array(tokens)) - wanted).max()
    print(
        f"largest difference of the logits, which reach {np.abs(wanted).max():.1f}: {difference:.1e}"
    )
    same = generate(ours, jnp.array(tokens), length).tolist() == text[0].tolist()
    print(f"the text is {'the same' if same else 'another'}")
    return ours


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="with config.json and model.safetensors")
    parser.add_argument("--prefix", default="transformer.", help="of the names of the tensors")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3], help="to begin with")
    parser.add_argument("--length", type=int, default=20, help="of the text, in tokens")
    args = parser.parse_args()
    if args.folder is None:
        model = compare_with_transformers(args.tokens, args.length)
    else:
        model = load(args.folder, args.prefix)
    count = sum(leaf.size for leaf in jax.tree.leaves(model))
    print(f"{count:,} parameters in {len(model.blocks)} blocks")
    print(*generate(model, jnp.array(args.tokens), args.length).tolist())


if __name__ == "__main__":
    main()
