"""Inspecting models: their layers, their cost, and what the transformations do to them."""

from .._ground import publish
from ._announce import announce_transform as announce_transform
from ._backward_nan import backward_nan as backward_nan
from ._breakpoint_if import breakpoint_if as breakpoint_if
from ._collectives import Collective as Collective
from ._collectives import Collectives as Collectives
from ._collectives import collectives as collectives
from ._compilation import Compilation as Compilation
from ._compilations import CompilationLog as CompilationLog
from ._compilations import record_compilations as record_compilations
from ._dce import inspect_dce as inspect_dce
from ._dce import store_dce as store_dce
from ._max_traces import assert_max_traces as assert_max_traces
from ._max_traces import get_num_traces as get_num_traces
from ._retraces import RetraceError as RetraceError
from ._retraces import log_retraces as log_retraces
from ._retraces import no_retrace as no_retrace
from ._summary import summary as summary

publish(__name__, globals())
