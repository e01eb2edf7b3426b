"""A transformer over 1 to 8 devices: what they send each other, and what each of them holds.

    python benchmarks/sharding.py [--parameters 8e9] [--tokens 4e6] [--flops 4e14] [--bandwidth 5e10]

Nothing is timed and nothing is run: the training step is compiled, for devices that the CPU plays, and the numbers are
read off the program. Three tables: memory of a device under full sharding; communication of a step under data
parallelism, full sharding and tensor parallelism, beside what theory says; and, on paper, what full sharding takes of a
step on thousands of devices, for a model and a machine given by the options. Leaves with an error if a step sends more
than theory says, or if memory does not fall.
"""

import argparse
import sys
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import vernal
from vernal import debug, nn, optim, sharding
from vernal.show import human_bytes, human_count, table

WIDTH, HEADS, BLOCKS, VOCABULARY = 512, 8, 8, 256
BATCH, LENGTH = 16, 128
COUNTS = (1, 2, 4, 8)
# Rotations, norms and the loss send a little as well; and XLA may split a sum.
MARGIN = 1.1


class Block(vernal.Module):
    norms: tuple
    attention: nn.MultiheadAttention
    mlp: nn.MLP

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.norms = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = nn.MultiheadAttention(HEADS, WIDTH, key=key1)
        self.mlp = nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=key2)

    def __call__(self, x):
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, causal=True)
        return x + self.mlp(self.norms[1](x))


class Transformer(vernal.Module):
    embedding: nn.Embedding
    blocks: nn.Stack
    unembedding: nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.blocks = nn.Stack(Block, BLOCKS, checkpoint=True, key=keys[1])
        self.unembedding = nn.Linear(WIDTH, VOCABULARY, use_bias=False, key=keys[2])

    def __call__(self, tokens):
        return self.unembedding(self.blocks(self.embedding(tokens)))


def loss(model, tokens):
    logits = model(tokens[:, :-1])
    picked = jax.nn.one_hot(tokens[:, 1:], VOCABULARY, dtype=logits.dtype)
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * picked, axis=-1))


@partial(vernal.filter_jit, donate="all-except-first")
def train_step(tokens, model, optimizer, state):
    value, grads = vernal.filter_value_and_grad(loss)(model, tokens)
    model, state = optimizer.update(model, grads, state)
    return model, state, value


class Step(NamedTuple):
    """A compiled training step."""

    sent: debug.Collectives
    memory: Any
    cut: int
    """Bytes of the parameters that lie spread over the devices."""
    kept: int
    """Bytes of those that every device has."""


def compiled(way, count):
    """The step on so many devices; `way(model, mesh)` gives the rules."""
    axis = "model" if way is tensor else "data"
    mesh = sharding.make_mesh(**{axis: count}, devices=jax.devices()[:count])
    optimizer = optim.Optimizer(optax.adam, 1e-3)

    def placed(make, *args, like=None):
        shapes = vernal.filter_eval_shape(make, *args)
        rules = way(shapes if like is None else like, mesh)
        where = sharding.shardings(shapes, mesh, rules, like=like)
        return jax.tree.map(
            lambda s, w: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=w), shapes, where
        )

    model = placed(Transformer, jax.random.key(0))
    state = placed(optimizer.init, model, like=model)
    spec = jax.NamedSharding(mesh, jax.P("data" if axis == "data" else None))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32, sharding=spec)
    program = train_step.lower(tokens, model, optimizer, state).compile()
    leaves = [(leaf.size * leaf.dtype.itemsize, leaf.sharding) for leaf in jax.tree.leaves(model)]
    whole = sum(size for size, where in leaves if where.is_fully_replicated)
    cut = sum(size for size, _ in leaves) - whole
    return Step(debug.collectives(program), program.memory_analysis(), cut, whole)


def replicated(model, mesh):
    return sharding.data_parallel()


def fully(model, mesh):
    return sharding.fsdp(model, mesh, "data")


def tensor(model, mesh):
    return sharding.tensor_parallel(model, mesh, "model")


def memory_table():
    """What a device holds under full sharding; whether it falls as it should."""
    rows, peaks = [], []
    for count in COUNTS:
        memory = compiled(fully, count).memory
        held = memory.argument_size_in_bytes
        peak = (
            held
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes
        )
        peaks.append(peak)
        rows.append(
            [
                count,
                human_bytes(held),
                human_bytes(memory.temp_size_in_bytes),
                human_bytes(peak),
                f"{peak / peaks[0]:.2f}",
            ]
        )
    columns = ["devices", "model, optimiser, batch", "temporary", "peak", "of one"]
    print(table("memory of each device, full sharding", columns, rows))
    return all(after < 0.75 * before for before, after in zip(peaks, peaks[1:], strict=False))


def communication_table(count):
    """What a step sends, beside theory; whether it is no more."""
    rows, met = [], True
    activations = BATCH * LENGTH * WIDTH * 4
    for way in (replicated, fully, tensor):
        step = compiled(way, count)
        part = (count - 1) / count
        if way is tensor:
            # Of each block: two sums in the forward pass; one when it is computed again; in the backward pass one for
            # the perceptron, and one each for queries, keys and values, which XLA does not add up before.
            theory = 2 * part * 7 * BLOCKS * activations
        else:
            # Parameters are fetched for the forward and for the backward pass, and gradients are summed. (A sum of
            # which a device keeps its part would cost half of an all-reduce, but on CPUs XLA has only that one.)
            theory = part * (2 * step.cut + 2 * (step.cut + step.kept))
        met &= step.sent.bytes() <= MARGIN * theory
        kinds = "\n".join(
            f"{row.count} {row.kind}, {human_bytes(row.bytes)}" for row in step.sent.rows
        )
        rows.append(
            [way.__name__, kinds, human_bytes(step.sent.bytes()), human_bytes(round(theory))]
        )
    columns = ["way", "collectives of a step", "each device receives", "theory"]
    print(table(f"communication of a step on {count} devices", columns, rows))
    return met


def paper(options):
    """Full sharding of a larger model on more devices.

    A step of t tokens on each device computes 8 N t operations (2 forward, 2 again, 4 backward), and receives 3 N
    numbers of two bytes (fetched twice, and gradients in parts), both at once: it takes as long as the longer one. A
    device holds its part of the N parameters, their gradients and two moments, all in single precision.
    """
    rows = []
    for count in (8, 64, 512, 4096):
        each = options.tokens / count
        compute = 8 * options.parameters * each / options.flops
        sending = 3 * 2 * options.parameters * (count - 1) / count / options.bandwidth
        held = 16 * options.parameters / count
        rows.append(
            [
                count,
                human_count(round(each)),
                human_bytes(round(held)),
                f"{compute:.3g}",
                f"{sending:.3g}",
                f"{compute / max(compute, sending):.0%}",
            ]
        )
    title = (
        f"on paper: {options.parameters:.2g} parameters, {options.tokens:.2g} tokens a step, "
        f"{options.flops:.2g} operations/s, {options.bandwidth:.2g} bytes/s"
    )
    print(
        table(
            title,
            ["devices", "tokens each", "state each", "computing s", "sending s", "busy"],
            rows,
        )
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"parameters": 8e9, "tokens": 4e6, "flops": 4e14, "bandwidth": 5e10}.items():
        parser.add_argument(f"--{name}", type=float, default=value)
    options = parser.parse_args()
    met = memory_table()
    met &= communication_table(COUNTS[-1])
    paper(options)
    sys.exit(not met)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", COUNTS[-1])
    main()
