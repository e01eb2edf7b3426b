"""Trains a small GPT on the documentation strings of Python's standard library, and lets it write some of its own.

    python examples/gpt.py [--steps 200] [--seed 0] [--out runs/gpt] [--prompt "Return the "]

The text is what ships with the Python that runs this; the model reads it byte by byte. Every 40th file is kept for
validation. Inside: rotary positions, grouped heads, a stack of blocks that one scan runs, tied embeddings, bfloat16,
and a cache for every block while it writes.
"""

import argparse
import ast
import lzma
import math
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.nn import initializers
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import vernal
from vernal import nn

VOCABULARY, WIDTH, HEADS, GROUPS, BLOCKS = 256, 128, 4, 2, 3
BATCH, LENGTH, RATE = 8, 128, 4e-3
EVERY, HELD_OUT = 50, 40


class Block(vernal.Module):
    attention_norm: nn.RMSNorm
    attention: nn.MultiheadAttention
    attention_dropout: nn.Dropout
    mlp_norm: nn.RMSNorm
    mlp: nn.MLP
    mlp_dropout: nn.Dropout
    rotary: nn.RotaryPositionalEmbedding

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.attention_norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = nn.MultiheadAttention(HEADS, WIDTH, num_key_value_heads=GROUPS, key=key1)
        self.mlp = nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=key2)
        # Two places, two layers: each has a random key of its own.
        self.attention_dropout, self.mlp_dropout = nn.Dropout(0.05), nn.Dropout(0.05)
        self.rotary = nn.RotaryPositionalEmbedding(WIDTH // HEADS)

    def __call__(self, x, cache=None):
        h = self.attention_norm(x)
        h = self.attention(h, h, h, causal=True, rotary=self.rotary, cache=cache)
        h, cache = (h, None) if cache is None else h
        x = x + self.attention_dropout(h)
        x = x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))
        return x if cache is None else (x, cache)


# Tokens of shape (..., length) go in, logits of shape (..., length, 256) come out.
class GPT(vernal.Module):
    tied: nn.Shared
    blocks: nn.Stack
    norm: nn.RMSNorm

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        embedding = nn.Embedding(VOCABULARY, WIDTH, key=key1)
        unembedding = nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=key1)
        # One table, that of the embedding, in both places.
        self.tied = nn.Shared(
            (embedding, unembedding), lambda t: t[1].weight, lambda t: t[0].weight
        )
        self.blocks = nn.Stack(Block, BLOCKS, key=key2)
        self.norm = nn.RMSNorm(WIDTH)

    def __call__(self, tokens, caches=None):
        embedding, unembedding = self.tied()
        x = embedding(tokens)
        if caches is None:
            return unembedding(self.norm(self.blocks(x)))
        # With caches, `tokens` are those that come after what the caches hold.
        x, caches = self.blocks(x, each={"cache": caches}, collect=True)
        return unembedding(self.norm(x)), caches


# Compiled, because one program is made sooner than a small one for each of its operations.
@vernal.filter_jit
def make_model(key):
    key1, key2 = jax.random.split(key)
    small = 0.02 / math.sqrt(2 * BLOCKS)
    rules = {
        nn.Linear: initializers.normal(1 / math.sqrt(WIDTH)),
        nn.Embedding: initializers.normal(0.05),
        # What is added to the sum that passes through all blocks begins smaller.
        "blocks.**.{attention.output_proj,mlp.layers.1}.weight": initializers.normal(small),
        "**.bias": initializers.zeros,
    }
    model = nn.initialise(GPT(key1), rules, key2)
    policy = nn.Policy(params=jnp.float32, compute=jnp.bfloat16, output=jnp.float32)
    return nn.cast(model, policy)


# In bits for a byte.
def loss(model, tokens):
    logits = model(tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return nats.mean() / math.log(2)


# Which pieces of the text are read, and what dropout leaves out, follow from the key: nothing comes from outside but
# the number of the step, and all steps are one program.
@vernal.filter_jit
def train_step(model, optimizer, state, text, key):
    place_key, dropout_key = jax.random.split(key)
    starts = jax.random.randint(place_key, (BATCH, 1), 0, len(text) - LENGTH)
    tokens = text[starts + jnp.arange(LENGTH + 1)]

    # Each dropout is given a key inside of the loss, so that the gradient has the structure of the model.
    value, grads = vernal.filter_value_and_grad(
        lambda model: loss(nn.keys(model, dropout_key), tokens)
    )(model)
    model, state = optimizer.update(model, grads, state)
    return model, state, value


@vernal.filter_jit
def evaluate(model, text):
    model = nn.inference_mode(model)
    count = (len(text) - 1) // LENGTH
    tokens = text[jnp.arange(count)[:, None] * LENGTH + jnp.arange(LENGTH + 1)]
    return jax.lax.map(lambda row: loss(model, row[None]), tokens, batch_size=BATCH).mean()


def caches_for(model, length):
    """One empty cache for each block, all in one with a leading axis."""
    attention = model.computing().blocks.layers.attention
    return attention.make_cache(length, batch=(BLOCKS,))


# The prompt is read at once, then what is drawn is fed back byte by byte. All of it is one program.
@vernal.filter_jit
def write(model, prompt, length, temperature, key):
    model = nn.inference_mode(model)
    logits, caches = model(prompt, caches_for(model, len(prompt) + length))

    def step(carry, key):
        logits, caches = carry
        token = jax.random.categorical(key, logits / temperature)
        logits, caches = model(token[None], caches)
        return (logits[0], caches), token

    _, tokens = jax.lax.scan(step, (logits[-1], caches), jax.random.split(key, length))
    return tokens


# How far what is read in two goes and then byte by byte is from what is read at once; in float32, so that it is small.
@vernal.filter_jit
def decoding_error(model, tokens):
    model = nn.inference_mode(nn.cast(model.model, nn.Policy(compute=jnp.float32)))
    third = len(tokens) // 3
    first, caches = model(tokens[:third], caches_for(model, len(tokens)))
    second, caches = model(tokens[third : 2 * third], caches)

    def step(caches, token):
        logits, caches = model(token[None], caches)
        return caches, logits[0]

    _, rest = jax.lax.scan(step, caches, tokens[2 * third :])
    return jnp.abs(jnp.concatenate([first, second, rest]) - model(tokens)).max()


def read_text():
    """The documentation strings of all modules, classes and functions: for training, and for validation."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    without = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    parts = [[], []]
    files = [path for path in sorted(root.rglob("*.py")) if not without & set(path.parts)]
    for i, path in enumerate(files):
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds)]
        parts[i % HELD_OUT == 0] += filter(None, map(ast.get_docstring, nodes))
    return [np.frombuffer("\n\n".join(part).encode(), np.uint8) for part in parts]


def yardsticks(text, validation):
    """What others need for the validation text, in bits for a byte, if they know the text for training."""
    counts = np.bincount(text, minlength=VOCABULARY) + 1
    frequencies = -np.log2(counts / counts.sum())[validation].mean()
    alone, both = (len(lzma.compress(x)) for x in (text, np.append(text, validation)))
    return {"frequencies of bytes": frequencies, "xz": 8 * (both - alone) / len(validation)}


def train(steps, seed, text, validation):
    model = make_model(jax.random.key(seed))
    schedule = vernal.optim.Schedule(
        optax.warmup_cosine_decay_schedule, 0.0, RATE, max(steps // 20, 1), steps, RATE / 20
    )
    optimizer = vernal.Optimizer(
        optax.chain,
        vernal.Optimizer(optax.clip_by_global_norm, 1.0),
        vernal.Optimizer(optax.adamw, schedule, b2=0.98, weight_decay=0.1),
    )
    state = optimizer.init(model)
    print(vernal.debug.summary(nn.inference_mode(model), text[:LENGTH]))

    key = jax.random.key(seed + 1)
    losses, validated = [], [(0, float(evaluate(model, validation)))]
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=steps)
        for step in range(1, steps + 1):
            step_key = jax.random.fold_in(key, step)
            model, state, value = train_step(model, optimizer, state, text, step_key)
            losses.append(value)
            if step % EVERY == 0 or step == steps:
                validated.append((step, float(evaluate(model, validation))))
            words = f"step {step}/{steps}  validation {validated[-1][1]:.3f} bits per byte"
            progress.update(bar, advance=1, description=words)
    return model, np.array(jax.device_get(losses)), np.array(validated)


def draw_curves(losses, validated, others, path):
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(1, len(losses) + 1), losses, linewidth=0.5, label="training")
    axes.plot(*validated.T, marker="o", markersize=3, label="validation")
    for (name, bits), style in zip(others.items(), ("--", ":"), strict=True):
        axes.axhline(bits, color="gray", linestyle=style, label=name)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(1, 8.2))
    axes.legend()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/gpt"))
    parser.add_argument(
        "--prompt", default="Return the ", help="how the text that is written begins"
    )
    parser.add_argument("--length", type=int, default=400, help="how many bytes are written")
    parser.add_argument("--temperature", type=float, default=0.7)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    train_bytes, validation_bytes = read_text()
    others = yardsticks(train_bytes, validation_bytes)
    print(f"{len(train_bytes):,} bytes for training, {len(validation_bytes):,} for validation")
    text, validation = jnp.asarray(train_bytes, jnp.int32), jnp.asarray(validation_bytes, jnp.int32)
    model, losses, validated = train(args.steps, args.seed, text, validation)

    print(
        f"validation: {validated[0, 1]:.3f} bits per byte at first, {validated[-1, 1]:.3f} at the end"
    )
    for name, bits in others.items():
        print(f"    by {name}: {bits:.3f}")
    count = train_step.trace_count
    print(f"training step: compiled {'once' if count == 1 else f'{count} times'}")

    path, curves = args.out / "model.safetensors", args.out / "curves.png"
    vernal.save(path, model, metadata={"steps": args.steps, "seed": args.seed})
    draw_curves(losses, validated, others, curves)
    print(f"written: {path}, {curves}")
    # Loading needs the structure of the model, but no weights: this one has only shapes.
    loaded = vernal.load(path, like=vernal.filter_eval_shape(make_model, jax.random.key(0)))
    same = float(evaluate(loaded, validation)) == validated[-1, 1]
    print(f"loaded back: predictions are {'equal' if same else 'DIFFERENT'}")

    error = float(decoding_error(loaded, validation[:LENGTH]))
    print(f"read with caches and at once: logits differ by {error:.1e} at most")
    prompt = jnp.array(list(args.prompt.encode()), jnp.int32)
    key = jax.random.key(args.seed + 2)
    written = write(loaded, prompt, args.length, args.temperature, key)
    print(f"\n{args.prompt}{bytes(written.tolist()).decode(errors='replace')}")


if __name__ == "__main__":
    main()
