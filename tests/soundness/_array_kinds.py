"""Functions over NumPy buffers that are refilled in place.

They hold arrays: refused in a field, fine as an argument.
"""

import numpy as np

from tests.soundness._kinds import Kind

ARRAY_KINDS: dict[str, Kind] = {
    "buffer": Kind(
        lambda: np.ones((), np.float32),
        lambda s: lambda x: x * s.astype(x.dtype),
        lambda s, k: s.fill(k),
    ),
    "buffer in a list": Kind(
        lambda: [np.ones((), np.float32)],
        lambda s: lambda x: x * s[0].astype(x.dtype),
        lambda s, k: s[0].fill(k),
    ),
    "buffer in a default": Kind(
        lambda: np.ones((), np.float32),
        lambda s: lambda x, s=s: x * s.astype(x.dtype),
        lambda s, k: s.fill(k),
    ),
    "view of a buffer": Kind(
        lambda: np.ones(3, np.float32),
        lambda s: (lambda view: lambda x: x * view[0].astype(x.dtype))(s[1:]),
        lambda s, k: s.fill(k),
    ),
}
