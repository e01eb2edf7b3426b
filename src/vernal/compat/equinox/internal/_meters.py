"""`TqdmProgressMeter` with Equinox's argument."""

from .... import runtime
from ....modules import field


class TqdmProgressMeter(runtime.TqdmProgressMeter):
    """`vernal.runtime.TqdmProgressMeter`, which is drawn at every percent, whatever the number of steps.

    Args:
        refresh_steps: stored, but not used.
    """

    refresh_steps: int = field(static=True, default=20)

    def __init__(self, refresh_steps: int = 20):
        self.minimum_increase = 0.01
        self.refresh_steps = refresh_steps
