"""`inference_mode`: switches a model between training and inference; and whether a layer is in inference."""

from collections.abc import Sequence
from typing import Any

from ..modules import is_frozen, is_partly_frozen
from ..trees import set_attributes
from ._layer_arguments import as_flag

_TRACED = (
    "True or False, or for a traced flag vernal.filter_cond(flag, lambda: nn.apply(model, x, train=False), "
    "lambda: nn.apply(model, x))"
)


def inference_mode(pytree: Any, value: bool = True) -> Any:
    """Sets every attribute named `inference` in a model, at any depth.

    Layers that behave differently while training, such as `Dropout`, have that attribute; your own modules can have it
    too.

    Args:
        pytree: a model, or anything that holds models.
        value: True for inference, False for training.

    Returns:
        A copy of `pytree` in which only these attributes differ.

    Raises:
        TypeError: if `value` is not True or False; if a module has a field `inference` that is declared `static=True`,
            which cannot be changed.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> model = vernal.nn.Sequential([vernal.nn.Dropout(0.5), jnp.tanh])
        >>> vernal.nn.inference_mode(model)(jnp.zeros(2))
        Array([0., 0.], dtype=float32)
    """
    return set_attributes(pytree, "inference", as_flag("inference_mode", "value", value, _TRACED))


def in_inference(layer: Any, variables: Sequence[Any], inference: Any) -> bool:
    """Whether a layer with state uses that state, rather than train.

    Args:
        layer: the layer, with an attribute `inference`.
        variables: its state. If any of it is frozen, the layer does not train.
        inference: the setting of the call, or None.
    """
    flag = known_flag(layer, inference)
    if flag or inference is not None:
        return flag
    # With a state outside the model, only the layer can be frozen.
    return any(map(is_partly_frozen, variables)) or is_frozen(layer)


def known_flag(layer: Any, inference: Any) -> bool:
    """The flag of a call or, if that is None, of the layer. Its two values make different programs, so it cannot be
    traced."""
    return as_flag(
        type(layer).__name__,
        "inference",
        layer.inference if inference is None else inference,
        _TRACED,
    )
