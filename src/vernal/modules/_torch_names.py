"""What to write for the methods of a PyTorch module, which a model here does not have."""

import inspect
from typing import Any, NoReturn

from ._attributes import Attributes

_CAST = "vernal.nn.cast(model, vernal.nn.Policy(...))"
_DEVICE = "jax.device_put(model, device)"
_NAMES = "vernal.trees.named_leaves(model)"

INSTEAD = {
    "eval": "vernal.nn.inference_mode(model), or vernal.nn.apply(model, x, train=False)",
    "train": "nothing: vernal.nn.inference_mode returns another model, and this one still trains",
    "parameters": "vernal.params(model), the tree of what is trained",
    "named_parameters": "vernal.trees.named_leaves(vernal.params(model))",
    "state_dict": f"{_NAMES}, or vernal.save(path, model)",
    "load_state_dict": "vernal.load(path, model), or vernal.saving.from_torch(model, state_dict)",
    "zero_grad": "nothing: gradients are returned, and never stored in the model",
    "requires_grad_": "vernal.freeze(model, path)",
    "register_buffer": "a field that holds a vernal.nn.Variable",
    "register_parameter": "a field that holds the array",
    "register_forward_hook": 'vernal.nn.apply(model, x, capture="path")',
    "named_modules": _NAMES,
    "to": f"{_DEVICE}; for a dtype, {_CAST}",
    "cuda": _DEVICE,
    "cpu": _DEVICE,
    "half": _CAST,
    "bfloat16": _CAST,
}


class Hint:
    """In place of a method that a class does not have: getting it is Python's error, with what to write. A field, a
    property or a method of this name in a subclass takes its place."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __get__(self, instance: Any, owner: Any) -> NoReturn:
        what = (
            f"type object {owner.__name__!r}" if instance is None else f"{owner.__name__!r} object"
        )
        raise AttributeError(
            f"{what} has no attribute {self.name!r}: write {INSTEAD[self.name]}",
            name=self.name,
            obj=owner if instance is None else instance,
        )


def is_hint(found: Any) -> bool:
    """Whether a class attribute only says that there is none of its name."""
    return type(found) is Hint


class WithHints(Attributes):
    """The base of `Module` that answers for PyTorch's names."""

    def __dir__(self) -> list[str]:
        cls = type(self)
        return [
            name
            for name in super().__dir__()
            if name not in INSTEAD or not is_hint(inspect.getattr_static(cls, name, None))
        ]


for _name in INSTEAD:
    setattr(WithHints, _name, Hint(_name))
