"""What to write in Vernal for names of `torch.nn`, `flax.linen` and `equinox.nn` that `vernal.nn` does not have."""

_ACTIVATIONS = (
    "celu elu gelu glu hard_tanh leaky_relu log_sigmoid log_softmax mish relu relu6 selu sigmoid silu softmax "
    "softplus tanh"
)
_SPATIAL = {"1d": 1, "2d": 2, "3d": 3}

# Keyed by the lower-case name.
_INSTEAD = {
    "module": "vernal.Module",
    "parameter": "the array itself, in a field",
    "modulelist": "a list or a tuple in a field",
    "moduledict": "a dictionary in a field",
    "stateindex": "nn.Variable",
    "flatten": "lambda x: x.reshape(*x.shape[:-3], -1) for images, or jnp.ravel for one example",
    "crossentropyloss": "optax.softmax_cross_entropy_with_integer_labels",
    "mseloss": "optax.squared_error",
    "dense": "nn.Linear",
    "embed": "nn.Embedding",
    **{name.replace("_", ""): f"jax.nn.{name}" for name in _ACTIVATIONS.split()},
    **{name: f"jax.nn.{name}" for name in _ACTIVATIONS.split()},
    **{f"batchnorm{d}": f"nn.BatchNorm(channels, num_spatial_dims={n})" for d, n in _SPATIAL.items()},
    **{f"instancenorm{d}": f"nn.InstanceNorm(channels, num_spatial_dims={n})" for d, n in _SPATIAL.items()},
    **{f"dropout{d}": f"nn.Dropout(p, together={n})" for d, n in _SPATIAL.items()},
}  # fmt: skip
_INSTEAD["batchnorm1d"] = "nn.BatchNorm(channels), and num_spatial_dims=1 for signals"


def instead_of(name: str) -> str | None:
    """What to write here for the name of a layer in another library; None for any other name."""
    return _INSTEAD.get(name.lower())
