"""The names of `equinox.debug` 0.13.8."""

from ...debug import announce_transform as announce_transform
from ...debug import assert_max_traces as assert_max_traces
from ...debug import backward_nan as backward_nan
from ...debug import breakpoint_if as breakpoint_if
from ...debug import get_num_traces as get_num_traces
from ...debug import inspect_dce as inspect_dce
from ...debug import store_dce as store_dce
