"""`inference_mode`: from training to use, and back; and which of the two a layer is in."""

from collections.abc import Sequence
from typing import Any

from ..modules import is_frozen, is_partly_frozen
from ..trees import set_attributes


def inference_mode(pytree: Any, value: bool = True) -> Any:
    """Sets every attribute named `inference` in a model, wherever it is.

    Layers that behave differently while training, such as `Dropout`, have that attribute; your own
    modules may have it too.

    Args:
        pytree: a model, or anything that holds models.
        value: True for use, False for training.

    Returns:
        A copy of `pytree` in which only these attributes differ.

    Raises:
        TypeError: if a module has a field `inference` that is declared `static=True`, which cannot
            be changed.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> model = vernal.nn.Sequential([vernal.nn.Dropout(0.5), jnp.tanh])
        >>> vernal.nn.inference_mode(model)(jnp.zeros(2))
        Array([0., 0.], dtype=float32)
    """
    return set_attributes(pytree, "inference", value)


def in_inference(layer: Any, variables: Sequence[Any], inference: bool | None) -> bool:
    """Whether a layer with state uses what it has, rather than train.

    Args:
        layer: the layer, with an attribute `inference`.
        variables: its state. If anything of that is frozen the layer cannot train.
        inference: what the call says, or None.
    """
    if inference is not None:
        return inference
    # Of a state that is outside of the model, only the layer can be frozen.
    return layer.inference or any(map(is_partly_frozen, variables)) or is_frozen(layer)
