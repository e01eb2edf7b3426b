"""Any pytree, or the difference of two, as text; and the common form of our error messages."""

from .._ground import publish
from ._diff import FROZEN as FROZEN
from ._diff import Difference as Difference
from ._diff import diff as diff
from ._diff import diff_text as diff_text
from ._message import listed as listed
from ._message import message as message
from ._message import type_error as type_error
from ._message import value_error as value_error
from ._paths import path_text as path_text
from ._paths import shown_name as shown_name
from ._pformat import short as short
from ._pformat import tree_pformat as tree_pformat
from ._pformat import tree_pprint as tree_pprint
from ._spelling import BRACKET as BRACKET
from ._spelling import UnnamedKey as UnnamedKey
from ._spelling import field_key as field_key
from ._spelling import key_names as key_names
from ._spelling import name_in_brackets as name_in_brackets
from ._spelling import name_of_text as name_of_text
from ._spelling import quoted as quoted
from ._spelling import unquoted as unquoted
from ._table import human_bytes as human_bytes
from ._table import human_count as human_count
from ._table import table as table
from ._values import is_traced as is_traced
from ._values import spec_text as spec_text

publish(__name__, globals())
