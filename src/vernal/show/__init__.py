"""Any pytree, or the difference of two, as text; and the common form of our error messages."""

from .._ground import publish
from ._diff import FROZEN, diff_text
from ._diff import Difference as Difference
from ._diff import diff as diff
from ._message import listed
from ._message import message as message
from ._message import type_error as type_error
from ._message import value_error as value_error
from ._paths import path_text as path_text
from ._paths import shown_name
from ._pformat import short
from ._pformat import tree_pformat as tree_pformat
from ._pformat import tree_pprint as tree_pprint
from ._spelling import (
    BRACKET,
    UnnamedKey,
    field_key,
    key_names,
    name_in_brackets,
    name_of_text,
    quoted,
    unquoted,
)
from ._table import human_bytes, human_count, table
from ._values import is_traced, spec_text

publish(__name__, globals())
