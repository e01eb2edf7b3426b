"""Which files of this folder are tests on this Python."""

import sys

# Files named `test_*torch.py` import PyTorch, which `make test` installs only on Python 3.11: for
# newer Pythons its build comes with gigabytes of libraries for GPUs. Elsewhere they are no tests.
collect_ignore_glob = [] if sys.version_info < (3, 12) else ["test_*torch.py"]
