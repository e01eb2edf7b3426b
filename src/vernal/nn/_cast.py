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

# These hold state from call to call, which must keep its dtype.
_MEMORY = (Variable, State, KVCache)


@dataclasses.dataclass(frozen=True)
class Policy:
    """The precisions in which a model keeps its parameters, computes, and returns its results. See `cast`.

    Args:
        params: the dtype of the parameters as they are stored, trained and saved.
        compute: the dtype of the parameters and of the inputs while the model computes.
        output: the dtype of what the model returns.

    Each is a real floating-point dtype, or None to leave dtypes as they are.

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
            "a precision must be a floating-point dtype",
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
    """A model with a `Policy`, as made by `cast`. It takes `state` if the model does.

    Attributes:
        model: the model, with its parameters as they are stored.
        policy: the precisions.
        keep: pairs of a path and the dtype of the parameters there.

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
        """The model as it computes, for uses other than calling it.

        Returns:
            The model with its parameters in `policy.compute`, or in the dtypes of `keep`.
        """
        return _parameters_to(self.model, self.policy.compute, dict(self.keep))

    @jax.named_scope("vernal.nn.Cast")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model in the precision of `policy.compute`.

        Args:
            *args: the arguments of the model. Floating-point arrays in them are converted.
            **kwargs: likewise.

        Returns:
            The result of the model, with its floating-point arrays in `policy.output`.
        """
        args, kwargs = _all_to((args, kwargs), self.policy.compute)
        return _all_to(self.computing()(*args, **kwargs), self.policy.output)

    def is_stateful(self) -> bool:
        """Whether the model takes `state`.

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
    """Wraps a model for mixed precision: it keeps its parameters in one precision and computes in another.

    At every call the wrapped model converts its parameters and arguments to `policy.compute`, and its results to
    `policy.output`. Gradients, optimiser states and saved files have the dtype of the stored parameters.

    Layers sum over many numbers (the statistics of a normalisation, the softmax of an attention) in at least float32,
    whatever the dtype of their inputs. A loss should too: set `policy.output` to float32.

    Only real floating-point arrays are converted. Integers, keys and complex numbers are unchanged, and so is state
    kept from call to call: that of layers (`BatchNorm`), and a `State` or a `KVCache` among the arguments and results.
    All other floating-point arguments are converted, so give positions as integers.

    In `vernal.nn.keys` the layers have the same names as without the wrapper; everywhere else, such as in `freeze`,
    `vernal.nn.initialise` and `vernal.save`, `model.` comes before them.

    Args:
        model: a layer, or any module that can be called.
        policy: the precisions.
        keep: dtypes by path in `model` (see `vernal.trees.Pattern`), of parameters or of parts with all their
            parameters. These are both stored and used in that dtype, whatever the policy.

    Returns:
        The wrapped model; `.model` is the model inside.

    Raises:
        TypeError: if `policy` is not a `Policy`.
        ValueError: if a path matches no parameter, two paths match the same one, or a dtype in `keep` is not
            floating-point.

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
