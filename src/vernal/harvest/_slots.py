"""The values of slots while a program is evaluated, and which programs use slots or hold checks."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from .._ground import current_scope, jaxprs_in_params
from ..show import message
from ..transforms import check_p, traits_of
from ._sow import planted_p, sow_p
from ._views import View

# For each argument or result of an operation, the part of a slot that it is; None if it is not part of one.
Views = list[View | None]


class Slots:
    """The current values of the slots, at one place in the evaluation of a program.

    Args:
        values: the values of all slots, by number; None for those that are not used here.
        active: the number of the slot that says whether checks count here, as bool[]; None if they always do.
        step: the number of the slot that holds the step of a loop, as i32[]; None if checks do not report a step.
        labels: the labels of the values to capture.

    Attributes:
        caught: the values captured here, by label.
        rests: by label, the parts of them that are not arrays.
        read: pairs of a slot that was read here, and the program of the operation that read it.
        sown: the same for slots that were sown.
        needed: the slots whose new value must not be lost.
    """

    def __init__(
        self,
        values: Sequence[Any],
        active: int | None = None,
        step: int | None = None,
        labels: Iterable[Hashable] = (),
    ):
        self.values = list(values)
        self.labels = frozenset(labels)
        self.caught: dict[Hashable, list[Any]] = {}
        self.rests: dict[Hashable, Any] = {}
        self.active = active
        self.step = step
        # The numbers of the slots that checks need.
        self.told = [i for i in (active, step) if i is not None]
        self.read: set[tuple[int, int]] = set()
        self.sown: set[tuple[int, int]] = set()
        self.needed: set[int] = set()

    def used(self, views: Views) -> list[int]:
        """The numbers of the slots that an operation with these arguments can reach."""
        found = {view.slot for view in views if view is not None}
        return sorted({*found, *self.told})

    def of(self, numbers: Sequence[int]) -> list[Any]:
        """The values of these slots."""
        return [self.values[i] for i in numbers]

    def set(self, numbers: Sequence[int], values: Sequence[Any]) -> None:
        """Replaces the values of these slots."""
        for i, value in zip(numbers, values, strict=True):
            self.values[i] = value

    def update(self, numbers: Sequence[int], values: Sequence[Any]) -> None:
        """Replaces the values of these slots by those that an operation returned.

        No operation changes the slots that checks read, so they keep their values here. What the operation returns for
        them may be unknown, where JAX splits a program into what depends on tangents and what does not.
        """
        for i, value in zip(numbers, values, strict=True):
            if i not in self.told:
                self.values[i] = value

    def inside(self, numbers: Sequence[int], values: Sequence[Any]) -> "Slots":
        """The slots for the program of an operation, which has its own values of these slots."""
        inner = Slots([None] * len(self.values), self.active, self.step, self.labels)
        inner.set(numbers, values)
        inner.rests = self.rests
        inner.read, inner.sown, inner.needed = self.read, self.sown, self.needed
        return inner

    def without_values(self) -> "Slots":
        """The slots for a derivative rule, which runs later with its own values, and so must not hold tracers."""
        return self.inside([], [])

    def catch(self, labels: Iterable[Hashable], values: Iterable[list[Any]]) -> None:
        """Stores the values captured in the program of an operation, once it was evaluated, as they come out of it."""
        self.caught.update(zip(labels, values, strict=True))

    def inside_loop(self, numbers: Sequence[int], values: Sequence[Any]) -> "Slots":
        """The slots for the program of a loop."""
        inner = self.inside(numbers, values)
        inner.read, inner.sown = set(), set()
        return inner

    def leave_loop(self, inner: "Slots") -> None:
        """Checks and merges the uses of slots in a loop, once it was evaluated.

        Args:
            inner: what `inside_loop` returned.

        Raises:
            NotImplementedError: if a `planted` was moved out of the loop, while its `sow` stayed inside. When JAX
                differentiates a loop, it moves everything out that seems the same at every step.
        """
        if (inner.sown - inner.read) & self.read:
            raise unknown(
                "a loop that is differentiated inside the function, with one state for all steps",
                "differentiate `vernal.nn.apply` from outside, or give each step its own layer (`nn.Stack`)",
            )
        self.read |= inner.read
        self.sown |= inner.sown


# Evaluates a jaxpr, given its constants, its arguments, their views, and the slots, whose values it updates. Returns
# the results, and their views.
Evaluate = Callable[[Any, Sequence[Any], Sequence[Any], Views, Slots], tuple[list[Any], Views]]


def touches(jaxpr: Any) -> bool:
    """Whether a program reads or sows, at any depth."""
    return _has(jaxpr, lambda eqn: eqn.primitive in (planted_p, sow_p))


def sows(jaxpr: Any) -> bool:
    """Whether a program sows a slot, at any depth.

    Args:
        jaxpr: the program.

    Returns:
        True if there is a `vernal.harvest.sow` in it.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.harvest import sow, sows
        >>> sows(jax.make_jaxpr(lambda slot: sow(slot, slot + 1, slot))(jnp.array(1)).jaxpr)
        True
    """
    return _has(jaxpr, lambda eqn: eqn.primitive is sow_p)


def _has(jaxpr: Any, wanted: Callable[[Any], bool]) -> bool:
    return any(
        wanted(eqn) or any(_has(x, wanted) for x in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def checks(jaxpr: Any) -> bool:
    """Whether a program holds a check, at any depth, or a function with a derivative rule that may hold one.

    Args:
        jaxpr: the program.

    Returns:
        True if it holds an `error_if` or similar, or a `filter_custom_jvp`, `filter_custom_vjp` or `jax.custom_vjp`,
        whose rule is unknown until it runs. (The rules of `jax.custom_jvp` are not counted: nearly all of them are
        JAX's own.)

    Example:
        >>> import jax
        >>> from vernal.harvest import checks
        >>> from vernal.runtime import error_if
        >>> checks(jax.make_jaxpr(lambda x: error_if(x, x < 0, "negative"))(1.0).jaxpr)
        True
    """
    return _has(jaxpr, lambda eqn: eqn.primitive is check_p or traits_of(eqn).may_check)


def unknown(what: str, instead: str) -> NotImplementedError:
    """The error for a place where state cannot be sown."""
    return NotImplementedError(
        message(
            f"state cannot be used inside {what}",
            where=current_scope() or "vernal.harvest.reap",
            expected="jit, scan, while_loop, cond, switch, vmap, grad, checkpoint, shard_map, or a function with a "
            "derivative rule",
            instead=instead,
        )
    )


def unknown_capture(operation: str) -> NotImplementedError:
    """The error for a place where values cannot be captured."""
    return NotImplementedError(
        message(
            f"values cannot be captured inside the operation `{operation}`",
            where=current_scope() or "vernal.harvest.reap",
            expected="only jit, scan, checkpoint, vmap and grad around the captured value, and nothing that decides "
            "how often it is computed",
            instead="capture a value or a layer outside of the operation",
        )
    )
