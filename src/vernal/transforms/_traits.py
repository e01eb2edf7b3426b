"""What is known of an operation of ours, beside its rules."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Traits:
    """What an operation is, however often it is mapped.

    Args:
        is_written: whether a program holds the program of what it computes.
        one_way: whether it has a derivative for reverse mode alone.
        replays: whether it computes again what another operation has computed.
        may_check: whether its rules may hold a check, which is known only when they run.
        splits: whether some of its results may be known where only some of its arguments are: those of a loop that
            carries a value and its tangent, in a rule of a user's.
        transposed: for an operation that is only ever transposed: the function that it is the derivative of, and how
            many of its arguments are residuals.
    """

    is_written: bool = True
    one_way: bool = False
    replays: bool = False
    may_check: bool = False
    splits: bool = False
    transposed: tuple[str, int] | None = None
