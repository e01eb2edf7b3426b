"""Models and batches sharded over many devices: meshes, rules by path, sharded construction."""

from .._ground import publish
from ._even import even_batches as even_batches
from ._init import init_sharded as init_sharded
from ._logical import logical_to_mesh as logical_to_mesh
from ._mesh import make_mesh as make_mesh
from ._place import gather as gather
from ._place import place as place
from ._place import shard_batch as shard_batch
from ._processes import initialise as initialise
from ._processes import is_main as is_main
from ._ready import data_parallel as data_parallel
from ._ready import fsdp as fsdp
from ._rules import shardings as shardings
from ._tensor_parallel import tensor_parallel as tensor_parallel

publish(__name__, globals())
