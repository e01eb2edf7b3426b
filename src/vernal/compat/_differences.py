"""What Vernal does otherwise than Equinox 0.13.8, name by name: the table of `docs/from-equinox.md` is made of it.

`python -m vernal.compat` prints the table. Which names differ is not written here: it is what the tests have seen.
"""

import types
from collections.abc import Iterator

from .. import debug, loops, modules, primitives, runtime, testing, transforms, trees
from . import equinox
from ._seen import SEEN

SAME, BETTER, DIFFERS, ABSENT = "same", "better", "differs", "absent"

# Rooms that people take from where they would take a name from `equinox.internal`.
ROOMS = (trees, modules, transforms, primitives, runtime, loops, debug, testing)

# What was seen in the calls and signatures of a name, in words; these need no reason.
WORDS = {
    "more": "takes what Equinox does not",
    "errors": "other classes of errors",
    "absent": "only in `vernal.compat`",
}

# The reasons for all others.
DIFFERENCES = {
    "Module": (DIFFERS, "only arrays are leaves, so plain `jax.jit`, `lax.scan`, `optax` accept a model"),
    "field": (BETTER, "`trainable=False` declares a buffer"),
    "Partial": (DIFFERS, "what is no array is structure"),
    "EquinoxRuntimeError": (DIFFERS, "is `vernal.runtime.RuntimeCheckError`"),
    "EquinoxTracetimeError": (DIFFERS, "is `vernal.runtime.RuntimeCheckError`"),
    "StrictConfig": (DIFFERS, "write `strict=True`, which enforces abstract or final"),
    "static_field": (DIFFERS, "write `field(static=True)`"),
    "tree_inference": (DIFFERS, "is `nn.inference_mode`"),
    "error_if": (BETTER, "names every failing element of a batch, and the place; works under `shard_map`"),
    "branched_error_if": (BETTER, "as `error_if`; an index out of range has a message of its own"),
    "filter_jit": (BETTER, "dispatch near `jax.jit` on a flat list; library functions by value; `.explain()`"),
    "filter_grad": (DIFFERS, "`NoGradient` for None; `wrt=` names any part of any argument; leaves out what is frozen"),
    "filter_value_and_grad": (DIFFERS, "as `filter_grad`"),
    "filter_vjp": (DIFFERS, "`NoGradient` for None"),
    "filter_jacfwd": (DIFFERS, "as `filter_vjp`"),
    "filter_jacrev": (DIFFERS, "as `filter_vjp`"),
    "filter_hessian": (DIFFERS, "as `filter_vjp`"),
    "apply_updates": (BETTER, "an update that does not fit, or of what is frozen, is an error that names it"),
    "filter_custom_jvp": (DIFFERS, "zeros or `ZeroTangent` instead of None; may close over tracers"),
    "filter_custom_vjp": (DIFFERS, "as `filter_custom_jvp`; right for Python floats too"),
    "filter_closure_convert": (DIFFERS, "the program is structure; hashable with tracers inside"),
    "filter_eval_shape": (BETTER, "a traced value in a shape is an error that names the argument"),
    "tree_at": (BETTER, "reaches structure too; refuses one node twice"),
    "tree_serialise_leaves": (BETTER, "`vernal.save` stores names instead of positions, and random keys too"),
    "tree_deserialise_leaves": (BETTER, "names the leaf that does not fit; refuses a path with more leaves"),
    "nn.AdaptivePool": (DIFFERS, "PyTorch's parts, which may overlap; `disjoint=True` for these"),
    "nn.AdaptiveAvgPool1d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.AdaptiveAvgPool2d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.AdaptiveAvgPool3d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.AdaptiveMaxPool1d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.AdaptiveMaxPool2d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.AdaptiveMaxPool3d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.BatchNorm": (DIFFERS, "batch statistics by default, `momentum=0.9`; averages without the start; `nn.apply`"),
    "nn.StateIndex": (DIFFERS, "is `nn.Variable`, which adds no `.init` to paths"),
    "nn.State": (DIFFERS, "is made by `nn.make_with_state` only"),
    "nn.GroupNorm": (DIFFERS, "takes batches; needs `num_spatial_dims` where the input could be one"),
    "nn.SpectralNorm": (BETTER, "`nn.apply` collects the state"),
    "nn.Dropout": (DIFFERS, "`p` and `inference` are structure; one key for a batch gives independent masks"),
    "nn.RotaryPositionalEmbedding": (BETTER, "`theta` holds for every instance; absolute positions"),
    "nn.MultiheadAttention": (BETTER, "fused or blockwise kernels, grouped heads, structural masks, caches"),
    "nn.WeightNorm": (BETTER, "equal ones compare equal"),
    "nn.Linear": (BETTER, "takes batches"),
    "debug.backward_nan": (BETTER, "right for Python floats too"),
    "internal.while_loop": (BETTER, "checkpointed loops in forward mode too, and of any order"),
    "internal.scan": (BETTER, "as `while_loop`"),
    "internal.noinline": (BETTER, "can be hashed"),
    "internal.ω": (BETTER, "takes NumPy arrays too"),
    "internal.GetKey": (DIFFERS, "`vernal.testing.GetKey` reads no environment variable"),
    "internal.to_onnx": (DIFFERS, "refuses"),
    "internal.announce_jaxpr_p": (DIFFERS, "a plain identity"),
}  # fmt: skip


def _names(module: types.ModuleType, prefix: str) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if name[0] != "_" and not isinstance(value, types.ModuleType):
            yield prefix + name


def public_names() -> list[str]:
    """Every public name of Equinox, those of its parts with the part in front."""
    parts = (
        (equinox, ""),
        (equinox.nn, "nn."),
        (equinox.debug, "debug."),
        (equinox.internal, "internal."),
    )
    return [name for module, prefix in parts for name in _names(module, prefix)]


def needs_reason(name: str) -> bool:
    """Whether Vernal refuses what Equinox takes, or gives something else."""
    return any(not set(kinds) <= WORDS.keys() for kinds in SEEN.get(name, ()))


def statuses(name: str) -> list[str]:
    """What a name is in `vernal.compat`, and with `import vernal as eqx`."""
    return [_status(name, kinds) for kinds in SEEN.get(name, ([], []))]


def _status(name: str, kinds: list[str]) -> str:
    if not kinds:
        return SAME
    if "absent" in kinds:
        return ABSENT
    if set(kinds) <= WORDS.keys():
        return BETTER if "more" in kinds else DIFFERS
    return DIFFERENCES[name][0]


def _words(name: str) -> str:
    part, _, last = name.rpartition(".")
    room = next((room for room in ROOMS if last in vars(room)), None)
    where = f"`{room.__name__}`" if part == "internal" and room is not None else ""
    if name in DIFFERENCES:
        return "; ".join(filter(None, [where, DIFFERENCES[name][1]]))
    kinds = {kind for kinds in SEEN.get(name, ()) for kind in kinds}
    return "; ".join(filter(None, [where, *(WORDS[kind] for kind in WORDS if kind in kinds)]))


def table() -> str:
    """How many names are what, and the table of names, as Markdown."""
    rows = [(name, *statuses(name), _words(name)) for name in public_names()]
    counts = []
    for column, way in ((1, "Through `vernal.compat`"), (2, "With `import vernal as eqx`")):
        found = [row[column] for row in rows]
        numbers = [f"{found.count(status)} {status}" for status in (SAME, BETTER, DIFFERS, ABSENT)]
        counts.append(f"{way}: {', '.join(numbers)}.")
    lines = ["| " + " | ".join([f"`{row[0]}`", *row[1:]]) + " |" for row in rows]
    head = ["| name | compat | native | in Vernal |", "| --- | --- | --- | --- |"]
    return "\n".join(["  \n".join(counts), "", *head, *lines]) + "\n"
