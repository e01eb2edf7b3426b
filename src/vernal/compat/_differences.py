"""What Vernal does otherwise than Equinox 0.13.8, name by name: the table of `docs/from-equinox.md` is made of it.

`python -m vernal.compat` prints the table. A name that is not listed here does the same.
"""

import types
from collections.abc import Iterator

from . import equinox

BETTER, DIFFERS = "better", "differs"

# What is better holds in compat too; what differs does so only where you import `vernal` itself.
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
    "apply_updates": (DIFFERS, "keeps dtypes; an update that does not fit is an error that names it"),
    "combine": (BETTER, "fills in `vernal.NoGradient` too"),
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
    "nn.StateIndex": (DIFFERS, "is `nn.Variable`, which adds no `.init` to paths and has no marker of its own"),
    "nn.State": (DIFFERS, "is made by `nn.make_with_state`, or of variables with markers"),
    "nn.GroupNorm": (DIFFERS, "takes batches; needs `num_spatial_dims` where the input could be one"),
    "nn.SpectralNorm": (DIFFERS, "begins with other vectors; `nn.apply` collects the state"),
    "nn.Dropout": (DIFFERS, "`p` and `inference` are structure; one key for a batch gives independent masks"),
    "nn.RotaryPositionalEmbedding": (DIFFERS, "computes in the dtype of its input; `theta` holds for every instance"),
    "nn.MultiheadAttention": (DIFFERS, "masks are bools; one draw for all heads; kernels, grouped heads, caches"),
    "nn.WeightNorm": (BETTER, "equal ones compare equal"),
    "nn.inference_mode": (BETTER, "reaches `inference` where it is structure"),
    "nn.Linear": (BETTER, "takes batches"),
    "debug.assert_max_traces": (BETTER, "says what has changed"),
    "debug.backward_nan": (BETTER, "right for Python floats too"),
    "internal.while_loop": (BETTER, "checkpointed loops in forward mode too, and of any order"),
    "internal.scan": (BETTER, "as `while_loop`"),
    "internal.noinline": (BETTER, "can be hashed"),
    "internal.ω": (BETTER, "takes NumPy arrays too"),
    "internal.GetKey": (DIFFERS, "`vernal.testing.GetKey` has other draws, and reads no environment variable"),
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


def table() -> str:
    """The table of names, as Markdown."""
    rows = [(name, *DIFFERENCES.get(name, ("same", ""))) for name in public_names()]
    lines = [f"| `{name}` | {verdict} | {words} |" for name, verdict, words in rows]
    return "\n".join(["| name | | in Vernal |", "| --- | --- | --- |", *lines]) + "\n"
