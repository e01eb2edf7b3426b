"""Tools for any pytree: kinds of leaves, partition and combine, walking, surgery, comparison, arithmetic."""

from .._ground import publish
from ._by_name import by_name
from ._check import tree_check as tree_check
from ._check import tree_flatten_one_level as tree_flatten_one_level
from ._compare import tree_allclose as tree_allclose
from ._compare import tree_equal as tree_equal
from ._everything_in import everything_in
from ._kinds import has_shape
from ._kinds import is_array as is_array
from ._kinds import is_array_like as is_array_like
from ._kinds import is_inexact_array as is_inexact_array
from ._kinds import is_inexact_array_like as is_inexact_array_like
from ._names import named_leaves as named_leaves
from ._names import path_name as path_name
from ._names import tree_paths as tree_paths
from ._no_gradient import NoGradient as NoGradient
from ._no_gradient import is_missing
from ._omega import ω as ω
from ._openings import Node, open_up
from ._parts import is_sealed, node_parts, refuse_sealed, replace_parts
from ._paths import Paths
from ._patterns import Pattern as Pattern
from ._patterns import match_paths as match_paths
from ._picking import picked_nodes
from ._random_key import check_key
from ._rest import Rest, split
from ._split import combine as combine
from ._split import filter as filter
from ._split import partition as partition
from ._surgery import set_attributes
from ._surgery import tree_at as tree_at
from ._surgery import values_with_paths as values_with_paths

publish(__name__, globals())
