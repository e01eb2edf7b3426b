"""Properties of Vernal's operations, besides their rules."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Traits:
    """The properties of an operation, which mapping does not change.

    Args:
        is_written: whether a program holds the program of what it computes.
        one_way: whether it has a derivative for reverse mode only.
        replays: whether it repeats what another operation has computed.
        may_check: whether its rules may hold a check, which is known only when they run.
        splits: whether some of its results may be known if only some of its arguments are, as for a loop that carries
            a value and its tangent in a user's rule.
        has_own_rule: whether its derivative may be another than that of what it computes, as by a user's rule.
        transposed: for an operation that is only ever transposed: the function that it is the derivative of, and the
            number of its arguments that are residuals.
    """

    is_written: bool = True
    one_way: bool = False
    replays: bool = False
    may_check: bool = False
    splits: bool = False
    has_own_rule: bool = False
    transposed: tuple[str, int] | None = None
