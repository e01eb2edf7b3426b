"""Agreement between the processes of a mesh: on their parts of a batch, and by exchanging a number of each."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

from ._ledger import Signature, different_parts
from ._lifeline import compare_batches


def compare(mesh: Mesh, signature: Signature) -> None:
    """Refuses, in every process, parts of a batch that differ in structure, shape or dtype."""
    processes = tuple(sorted({device.process_index for device in mesh.devices.flat}))
    if compare_batches(processes, signature):
        return
    # Not joined by `initialise`: compare checksums over the devices at every call.
    sums = over_processes(mesh, zlib.crc32(signature.key.encode()) % 2**31)
    if len(set(sums.values())) > 1:
        text = {rank: Signature("", f"{number:08x}") for rank, number in sums.items()}
        raise ValueError(different_parts(f"here {signature.text}, in checksums", text))


def over_processes(mesh: Mesh, number: int) -> dict[int, int]:
    """Exchanges a number between the processes of a mesh: all of them get all numbers, by process."""
    if len({device.process_index for device in mesh.devices.flat}) == 1:
        return {jax.process_index(): number}
    flat = Mesh(mesh.devices.reshape(-1), ("all",), axis_types=(AxisType.Auto,))
    spread, same = NamedSharding(flat, P("all")), NamedSharding(flat, P())
    mine = jax.make_array_from_callback(
        (flat.size,), spread, lambda _: np.array([number], np.int32)
    )
    numbers = np.asarray(jax.jit(jnp.copy, out_shardings=same)(mine))
    owners = [device.process_index for device in flat.devices]
    return dict(zip(owners, numbers.tolist(), strict=True))
