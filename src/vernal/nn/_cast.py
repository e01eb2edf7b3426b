"""`Policy` and `cast`: a model that keeps its parameters in one precision and computes in another."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.typing import DTypeLike

from ..show import short, type_error, value_error
from ..trees import is_array, match_paths
from ._kv_cache import KVCache
from ._places import Unrolled
from ._state import State, StatefulLayer, is_stateful
from ._variable import Variable

# What remembers something from call to call, and must come back in the dtype that it had.
_MEMORY = (Variable, State, KVCache)


@dataclasses.dataclass(frozen=True)
class Policy:
    """In which precision a model keeps its parameters, computes, and returns its results. See `cast`.

    Args:
        params: the dtype of the parameters as they are stored, trained and saved.
        compute: the dtype of the parameters and of the inputs while the model computes.
        output: the dtype of what the model returns.

    Each is a real floating-point dtype, or None for what it is anyway.

    Raises:
        ValueError: for any other dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import nn
        >>> nn.Policy(params=jnp.float32, compute=jnp.bfloat16, output="float32")
        Policy(params=dtype('float32'), compute=dtype(bfloat16), output=dtype('float32'))
    """

    params: DTypeLike | None = None
    compute: DTypeLike | None = None
    output: DTypeLike | None = None

    def __post_init__(self):
        for f in dataclasses.fields(self):
            object.__setattr__(
                self, f.name, _floating(f"Policy({f.name}=...)", getattr(self, f.name))
            )


def _floating(where: str, dtype: DTypeLike | None) -> np.dtype | None:
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise value_error(
            "a precision is a floating-point dtype",
            where=where,
            expected="for example jnp.float32 or jnp.bfloat16, or None",
            got=short(dtype),
        )
    return found


def _to(x: Any, dtype: Any) -> Any:
    if dtype is None or not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.update(dtype=dtype)
    return x.astype(dtype) if is_array(x) else x


def _is_memory(x: Any) -> bool:
    return isinstance(x, _MEMORY)


def _all_to(tree: Any, dtype: Any) -> Any:
    return jtu.tree_map(lambda x: _to(x, dtype), tree, is_leaf=_is_memory)


class Cast(StatefulLayer):
    """A model with a `Policy`; `cast` makes it. It wants `state` where the model does.

    Attributes:
        model: the model, with its parameters as they are stored.
        policy: the precisions.
        keep: pairs of a path and the dtype that the parameters there have instead.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import nn
        >>> model = nn.cast(nn.Linear(2, 3, key=jax.random.key(0)), nn.Policy(compute=jnp.bfloat16))
        >>> model.model.weight.dtype, model.computing().weight.dtype, model(jnp.ones(2)).dtype
        (dtype('float32'), dtype(bfloat16), dtype(bfloat16))
    """

    # PyTorch has no such wrapper: see `vernal.saving.from_torch`.
    _vernal_passed_over = "model"

    model: Any
    policy: Policy
    keep: tuple[tuple[str, Any], ...]

    def computing(self) -> Any:
        """The model as it computes, for what else than calling it is to be done with it.

        Returns:
            The model with its parameters in `policy.compute`, or what `keep` says.
        """
        return _parameters_to(self.model, self.policy.compute, dict(self.keep))

    @jax.named_scope("vernal.nn.Cast")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model in the precision of `policy.compute`.

        Args:
            *args: what the model takes. Floating-point arrays in it are converted.
            **kwargs: likewise.

        Returns:
            What the model returns, with its floating-point arrays in `policy.output`.
        """
        args, kwargs = _all_to((args, kwargs), self.policy.compute)
        return _all_to(self.computing()(*args, **kwargs), self.policy.output)

    def is_stateful(self) -> bool:
        """Whether the model wants `state`.

        Returns:
            True if it is a `StatefulLayer` that says so.
        """
        return is_stateful(self.model)

    @property
    def __wrapped__(self) -> Any:
        return self.model

    def __unrolled__(self) -> Unrolled:
        return [(("model",), "")]


def _parameters_to(model: Any, dtype: Any, keep: Mapping[str, Any]) -> Any:
    dtypes = match_paths(
        model, keep, default=dtype, is_leaf=_is_memory, where="cast(model, policy, keep=...)"
    )
    return jtu.tree_map(_to, model, dtypes, is_leaf=_is_memory)


def cast(model: Any, policy: Policy, *, keep: Mapping[str, DTypeLike] | None = None) -> Cast:
    """Mixed precision: a model that keeps its parameters in one precision and computes in another.

    The wrapped model converts its parameters and what it is given to `policy.compute` at every call, and what it
    returns to `policy.output`. Gradients have the dtype of the stored parameters, and so have the states of an
    optimiser and the files that the model is saved in.

    Layers take sums over many numbers (the statistics of a normalisation, the softmax of an attention) in at
    least float32, whatever they are given. A loss should too: let `policy.output` be float32.

    Only real floating-point arrays are converted. Integers, keys and complex numbers stay as they are; and so does what
    is remembered from call to call: the state of layers (`BatchNorm`), a `State` and a `KVCache` among the
    arguments and results. Other floating-point arguments are all converted, so give positions as integers.

    In `vernal.nn.keys` the layers have the names that they have without the wrapper; everywhere else, such as in
    `freeze`, `vernal.nn.initialise` and `vernal.save`, `model.` stands before them.

    Args:
        model: a layer, or any module that is called.
        policy: the precisions.
        keep: dtypes by path in `model` (see `vernal.trees.Pattern`) of parameters, or of parts with all of theirs:
            these parameters are stored and computed with in that dtype instead.

    Returns:
        The wrapped model; `.model` is the model inside.

    Raises:
        TypeError: if `policy` is not a `Policy`.
        ValueError: if a path is for no parameter, or two for the same, or a dtype in `keep` is not floating-point.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import nn
        >>> mixed = nn.Policy(params=jnp.float32, compute=jnp.bfloat16, output=jnp.float32)
        >>> model = nn.cast(nn.MLP(2, 1, 8, depth=2, key=jax.random.key(0)), mixed)
        >>> model(jnp.ones(2)).dtype, model.computing().layers[0].weight.dtype
        (dtype('float32'), dtype(bfloat16))
        >>> jax.grad(lambda m: m(jnp.ones(2))[0])(model).model.layers[0].weight.dtype
        dtype('float32')
    """
    if not isinstance(policy, Policy):
        raise type_error(
            "`policy` must be a Policy",
            where="cast(model, policy)",
            expected="the precisions of parameters, of what is computed, and of the output",
            got=short(policy),
            instead="nn.Policy(params=jnp.float32, compute=jnp.bfloat16, output=jnp.float32)",
        )
    kept = {text: _floating(f"keep[{text!r}]", dtype) for text, dtype in (keep or {}).items()}
    stored = _parameters_to(model, policy.params, kept)
    return Cast(stored, policy, tuple(kept.items()))
