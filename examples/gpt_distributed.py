"""Trains the small GPT of gpt.py on all devices of all processes: one process, several on this machine, or a cluster.

    python examples/gpt_distributed.py [--steps 100] [--seed 0] [--every 20] [--out runs/gpt-distributed]
    python -m vernal launch --processes 2 --devices-per-process 2 examples/gpt_distributed.py

Parameters, gradients and the state of the optimiser are spread over the devices ("fully sharded"), and so is each
batch. Every few steps all of it is saved. Started again, whatever had stopped it, the run goes on from there, on any
number of devices and processes, and its losses are those of a run that nothing stopped.
"""

import argparse
import pathlib

# The model, its data and its loss: the example beside this one.
import gpt
import jax
import jax.numpy as jnp
import numpy as np
import optax

import vernal
from vernal import nn, sharding
from vernal.saving import Checkpoints

# Arrays that are smaller are not worth to be fetched from other devices.
MIN_BYTES = 2**12


# In float32, so that one can see the losses agree.
def make_model(key):
    return nn.cast(gpt.make_model(key).model, nn.Policy(compute=jnp.float32))


def make_optimizer():
    return vernal.Optimizer(
        optax.chain,
        vernal.Optimizer(optax.clip_by_global_norm, 1.0),
        vernal.Optimizer(optax.adamw, gpt.RATE / 3, b2=0.98, weight_decay=0.1),
    )


# Which pieces of the text a step reads follows from its number. Of the batch, each process takes its own rows.
def read_batch(text, seed, step):
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - gpt.LENGTH, gpt.BATCH)
    own = np.split(starts, jax.process_count())[jax.process_index()]
    return text[own[:, None] + np.arange(gpt.LENGTH + 1)].astype(np.int32)


def train_step(optimizer, model, state, tokens, key):
    value, grads = vernal.filter_value_and_grad(
        lambda model: gpt.loss(nn.keys(model, key), tokens)
    )(model)
    model, state = optimizer.update(model, grads, state)
    return model, state, value


def train(steps, seed, text, mesh, checkpoints, say):
    """The losses of all steps, those before the last checkpoint included."""

    def rules(model):
        return sharding.fsdp(model, mesh, "data", min_bytes=MIN_BYTES)

    model = sharding.init_sharded(make_model, jax.random.key(seed), mesh, rules)
    optimizer = make_optimizer()
    state = sharding.init_sharded(optimizer.init, model, mesh, rules(model), like=model)
    losses = []
    if checkpoints.latest is not None:
        model, state = checkpoints.restore(like=(model, state))
        losses = checkpoints.metadata()["losses"]
        say(f"goes on after step {len(losses)}")

    places = (
        sharding.shardings(model, mesh, rules(model)),
        sharding.shardings(state, mesh, rules(model), like=model),
        jax.NamedSharding(mesh, jax.P()),
    )
    # What comes out lies where it went in: the next step is the same program, in the same memory.
    compiled_step = vernal.filter_jit(train_step, out_shardings=places, donate="all-except-first")
    key = jax.random.key(seed + 1)
    for step in range(len(losses) + 1, steps + 1):
        tokens = sharding.shard_batch(read_batch(text, seed, step), mesh, "data")
        step_key = jax.random.fold_in(key, step)
        model, state, value = compiled_step(optimizer, model, state, tokens, step_key)
        losses.append(float(value))
        say(f"step {step}/{steps}  {losses[-1]:.4f} bits per byte")
        # All processes save, each its own part.
        metadata = {"losses": losses}
        checkpoints.save(step, (model, state), metadata=metadata, force=step == steps)
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=20, help="after how many steps it saves")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/gpt-distributed"))
    args = parser.parse_args()

    # Before JAX is asked for anything. Without others, this is the only process.
    sharding.initialise()
    # One process speaks for all.
    say = print if sharding.is_main() else lambda *words: None
    # Automatic axes: where weights are collected is left to the compiler.
    mesh = sharding.make_mesh(data=-1, automatic=True)
    say(f"{jax.process_count()} processes, {jax.device_count()} devices")
    text, _ = gpt.read_text()
    with Checkpoints(args.out, every=args.every) as checkpoints:
        losses = train(args.steps, args.seed, text, mesh, checkpoints, say)
    say(f"loss: {losses[0]:.3f} bits per byte at first, {losses[-1]:.3f} at the end")


if __name__ == "__main__":
    main()
