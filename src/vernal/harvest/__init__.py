"""State that a function updates and values that it captures, from inside any transformation: sow and reap them."""

from .._ground import publish
from ._capture import capture as capture
from ._capture import captures
from ._reap import reap as reap
from ._slots import checks, sows
from ._sow import planted as planted
from ._sow import sow as sow
from ._sow_if import sow_if as sow_if

publish(__name__, globals())
