"""Loops and branches over any Python objects; loops have forward-mode and reverse-mode derivatives."""

from .._ground import publish
from ._branches import filter_cond as filter_cond
from ._branches import filter_switch as filter_switch
from ._buffers import Buffer as Buffer
from ._buffers import MaybeBuffer as MaybeBuffer
from ._buffers import buffer_at_set as buffer_at_set
from ._debug_buffers import debug_buffers as debug_buffers
from ._fori import fori_loop as fori_loop
from ._map import map as map
from ._scan import scan as scan
from ._while import while_loop as while_loop

publish(__name__, globals())
