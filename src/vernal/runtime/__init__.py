"""What compiled code reports while it runs: errors with a message and a place, result codes,
progress."""

from .._ground import RuntimeCheckError as RuntimeCheckError
from .._ground import publish
from ._assert_dce import assert_dce as assert_dce
from ._enumeration import Enumeration as Enumeration
from ._enumeration import EnumerationItem as EnumerationItem
from ._error_if import branched_error_if as branched_error_if
from ._error_if import error_if as error_if
from ._meters import RichProgressMeter as RichProgressMeter
from ._meters import TextProgressMeter as TextProgressMeter
from ._meters import TqdmProgressMeter as TqdmProgressMeter
from ._progress import AbstractProgressMeter as AbstractProgressMeter
from ._progress import NoProgressMeter as NoProgressMeter

publish(__name__, globals())
