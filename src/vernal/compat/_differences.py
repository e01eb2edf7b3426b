"""The differences between Vernal and Equinox 0.13.8, name by name: the source of the table of `docs/from-equinox.md`.

`python -m vernal.compat` prints the table. Which names differ is not written here: it comes from the tests.
"""

import types
from collections.abc import Iterator

from .. import debug, loops, modules, primitives, runtime, testing, transforms, trees
from . import equinox
from ._seen import SEEN

SAME, BETTER, DIFFERS, ABSENT = "same", "better", "differs", "absent"

# Packages that have names of `equinox.internal`.
ROOMS = (trees, modules, transforms, primitives, runtime, loops, debug, testing)

# Differences seen in the calls and signatures of a name, in words; these need no reason.
WORDS = {
    "more": "takes what Equinox does not",
    "errors": "other classes of errors",
    "absent": "only in `vernal.compat`",
}

# The reasons for all other differences.
DIFFERENCES = {
    "Module": (DIFFERS, "only arrays are leaves, so plain JAX accepts a model; `==` is a bool; has a hash"),
    "field": (BETTER, "`trainable=False` declares a buffer"),
    "Partial": (DIFFERS, "what is not an array is structure"),
    "EquinoxRuntimeError": (DIFFERS, "is `vernal.runtime.RuntimeCheckError`"),
    "EquinoxTracetimeError": (DIFFERS, "is `vernal.runtime.RuntimeCheckError`"),
    "StrictConfig": (DIFFERS, "write `strict=True`, which enforces abstract or final"),
    "static_field": (DIFFERS, "write `field(static=True)`"),
    "tree_inference": (DIFFERS, "is `nn.inference_mode`"),
    "error_if": (BETTER, "names every failing element of a batch, and the place; works under `shard_map`"),
    "branched_error_if": (BETTER, "as `error_if`; an index out of range has a message of its own"),
    "filter_jit": (BETTER, "dispatch near `jax.jit`; functions by value; 1 and 1.0, `jnp.int8` and `np.int8` differ"),
    "filter_grad": (DIFFERS, "`NoGradient` for None; `wrt=` names any part of any argument; by nothing is an error"),
    "filter_value_and_grad": (DIFFERS, "as `filter_grad`"),
    "filter_vjp": (DIFFERS, "`NoGradient` for None"),
    "filter_jacfwd": (DIFFERS, "as `filter_vjp`"),
    "filter_jacrev": (DIFFERS, "as `filter_vjp`"),
    "filter_hessian": (DIFFERS, "as `filter_vjp`"),
    "apply_updates": (DIFFERS, "natively an update that does not fit, or of what is frozen, is an error that names it"),
    "filter_custom_jvp": (DIFFERS, "zeros or `ZeroTangent` instead of None; may close over tracers"),
    "filter_custom_vjp": (DIFFERS, "as `filter_custom_jvp`; right for Python floats too"),
    "filter_closure_convert": (DIFFERS, "the program is structure; hashable with tracers inside"),
    "filter_eval_shape": (BETTER, "a traced value in a shape is an error that names the argument"),
    "tree_at": (BETTER, "reaches structure too; natively refuses one node twice"),
    "tree_serialise_leaves": (BETTER, "`vernal.save` stores names instead of positions, and random keys too"),
    "tree_deserialise_leaves": (BETTER, "names a leaf that does not fit, natively 64 bits too; refuses a longer file"),
    "nn.AdaptivePool": (DIFFERS, "PyTorch's parts, which may overlap; `disjoint=True` for these"),
    "nn.AdaptiveAvgPool1d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.AdaptiveAvgPool2d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.AdaptiveAvgPool3d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.AdaptiveMaxPool1d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.AdaptiveMaxPool2d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.AdaptiveMaxPool3d": (DIFFERS, "as `nn.AdaptivePool`"),
    "nn.BatchNorm": (DIFFERS, "batch statistics by default, `momentum=0.9`; averages do not begin at 0; `nn.apply`"),
    "nn.StateIndex": (DIFFERS, "is `nn.Variable`, which adds no `.init` to paths and has no marker of its own"),
    "nn.State": (DIFFERS, "is made by `nn.make_with_state`, or of variables with markers"),
    "nn.GroupNorm": (DIFFERS, "takes batches; needs `num_spatial_dims` if the input could be one; as `nn.LayerNorm`"),
    "nn.SpectralNorm": (DIFFERS, "begins with other vectors; `nn.apply` collects the state"),
    "nn.Dropout": (DIFFERS, "`p` and `inference` are structure; one key for a batch gives independent masks"),
    "nn.RotaryPositionalEmbedding": (DIFFERS, "computes in the dtype of its input; `theta` holds for every instance"),
    "nn.MultiheadAttention": (DIFFERS, "masks are bools; one draw for all heads; kernels, grouped heads, caches"),
    "nn.WeightNorm": (BETTER, "equal ones compare equal; has no leaf `_norm`"),
    "nn.Linear": (DIFFERS, "takes batches: rows are vectors; non-arrays in subclasses are structure; no loose shapes"),
    "nn.GRUCell": (DIFFERS, "as `nn.Linear`"),
    "nn.LSTMCell": (DIFFERS, "as `nn.Linear`"),
    "nn.Embedding": (DIFFERS, "non-arrays in subclasses are structure"),
    "debug.backward_nan": (BETTER, "right for Python floats too"),
    "internal.while_loop": (BETTER, "checkpointed loops in forward mode too, and of any order"),
    "internal.scan": (BETTER, "as `while_loop`"),
    "internal.noinline": (BETTER, "can be hashed"),
    "internal.ω": (BETTER, "takes NumPy arrays too"),
    "internal.GetKey": (DIFFERS, "`vernal.testing.GetKey` has other draws, and reads no environment variable"),
    "internal.to_onnx": (DIFFERS, "refuses"),
    "internal.announce_jaxpr_p": (DIFFERS, "a plain identity"),
    "AbstractClassVar": (DIFFERS, "a field of the instance does not stand for it"),
    "Enumeration": (BETTER, "can be hashed and iterated; refuses instances and new values of members"),
    "filter": (DIFFERS, "natively a predicate returns a Python bool"),
    "filter_checkpoint": (DIFFERS, "as `nn.PReLU`, which is in what was called"),
    "filter_jvp": (DIFFERS, "a number of the result is an array"),
    "filter_pure_callback": (BETTER, "no `vectorized`, which fails in Equinox; arguments of any name"),
    "filter_shard": (DIFFERS, "as `nn.PReLU`, which is in what was called"),
    "is_array": (BETTER, "false of NumPy arrays that JAX cannot hold"),
    "is_array_like": (BETTER, "as `is_array`"),
    "is_inexact_array_like": (BETTER, "takes tracers, and classes"),
    "default_deserialise_filter_spec": (DIFFERS, "natively an array of another dtype or shape stays as it was read"),
    "tree_flatten_one_level": (DIFFERS, "as `nn.PReLU`, which is in what was called"),
    "tree_pformat": (DIFFERS, "compiled functions print by their names"),
    "tree_pprint": (DIFFERS, "as `tree_pformat`"),
    "nn.PReLU": (BETTER, "its parameter has a strong type, which the first update leaves as it is"),
    "nn.LayerNorm": (BETTER, "takes batches; integers give floats; NaN where squares overflow; natively no `state`"),
    "nn.RMSNorm": (BETTER, "as `nn.LayerNorm`"),
    "nn.MLP": (DIFFERS, "activations see a whole layer, the last one with `depth=0` too; as `nn.Linear`"),
    "nn.Sequential": (DIFFERS, "takes functions; natively a state is a `State`, and None is as if not given"),
    "nn.StatefulLayer": (DIFFERS, "as `nn.Sequential`"),
    "nn.Shared": (DIFFERS, "what stands for the shared node is not a leaf, nor are `where` and `get`"),
    "nn.make_with_state": (DIFFERS, "as `nn.State`"),
    "nn.delete_init_state": (DIFFERS, "as `nn.State`"),
    "nn.Pool": (BETTER, "refuses windows that do not fit; takes batches"),
    **{f"nn.MaxPool{n}d": (BETTER, "as `nn.Pool`") for n in (1, 2, 3)},
    **{
        f"nn.AvgPool{n}d": (DIFFERS, "as `nn.Pool`; natively `use_ceil` divides as PyTorch does") for n in (1, 2, 3)
    },
    **{f"nn.Conv{n}d": (BETTER, "refuses what does not fit; defaults are single numbers") for n in (1, 2, 3)},
    **{f"nn.ConvTranspose{n}d": (BETTER, "as `nn.Conv1d`") for n in (1, 2, 3)},
    "debug.announce_transform": (DIFFERS, "says it in words: `evaluated` for `impl`"),
    "debug.inspect_dce": (DIFFERS, "prints its own name"),
    "internal.AbstractClassVar": (DIFFERS, "as `AbstractClassVar`"),
    "internal.ContainerMeta": (DIFFERS, "its parameter has another name"),
    "internal.Enumeration": (BETTER, "as `Enumeration`"),
    "internal.Static": (BETTER, "holds arrays without a warning"),
    "internal.TqdmProgressMeter": (DIFFERS, "is told the smallest step, not how many"),
    "internal.TreeWLCustom": (DIFFERS, "prints arrays as `tree_pformat` does"),
    "internal.announce_transform": (DIFFERS, "as `debug.announce_transform`"),
    "internal.branched_error_if": (BETTER, "as `branched_error_if`"),
    "internal.buffer_at_set": (DIFFERS, "takes no options of `.at[...].set`"),
    "internal.cached_filter_eval_shape": (BETTER, "keeps weak types"),
    "internal.closure_to_pytree": (BETTER, "only arrays are leaves"),
    "internal.debug_backward_nan": (BETTER, "as `debug.backward_nan`"),
    "internal.error_if": (BETTER, "as `error_if`"),
    "internal.finalise_fn": (BETTER, "refuses what cannot be called"),
    "internal.finalise_make_jaxpr": (BETTER, "refuses what cannot be called"),
    "internal.hashable_combine": (DIFFERS, "None has a place among the leaves"),
    "internal.hashable_partition": (DIFFERS, "None has a place among the leaves"),
    "internal.nondifferentiable_backward": (DIFFERS, "a number stays a number under `jax.jvp`"),
    "internal.nontraceable": (DIFFERS, "another default of `name`"),
}  # fmt: skip


def _names(module: types.ModuleType, prefix: str) -> Iterator[str]:
    for name, value in sorted(vars(module).items()):
        if name[0] != "_" and not isinstance(value, types.ModuleType):
            yield prefix + name


def public_names() -> list[str]:
    """Every public name of Equinox; names of its submodules have the submodule in front."""
    parts = (
        (equinox, ""),
        (equinox.nn, "nn."),
        (equinox.debug, "debug."),
        (equinox.internal, "internal."),
    )
    return [name for module, prefix in parts for name in _names(module, prefix)]


def needs_reason(name: str) -> bool:
    """Whether Vernal refuses arguments that Equinox takes, or gives another result."""
    return any(not set(kinds) <= WORDS.keys() for kinds in SEEN.get(name, ()))


def statuses(name: str) -> list[str]:
    """The status of a name in `vernal.compat`, and with `import vernal as eqx`."""
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
    """The number of names of each status, and the table of names, as Markdown."""
    rows = [(name, *statuses(name), _words(name)) for name in public_names()]
    counts = []
    for column, way in ((1, "Through `vernal.compat`"), (2, "With `import vernal as eqx`")):
        found = [row[column] for row in rows]
        numbers = [f"{found.count(status)} {status}" for status in (SAME, BETTER, DIFFERS, ABSENT)]
        counts.append(f"{way}: {', '.join(numbers)}.")
    lines = ["| " + " | ".join([f"`{row[0]}`", *row[1:]]) + " |" for row in rows]
    head = ["| name | compat | native | in Vernal |", "| --- | --- | --- | --- |"]
    return "\n".join(["  \n".join(counts), "", *head, *lines]) + "\n"
