"""`collectives`: what is sent is counted as often as it happens, and in bytes that each device receives."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import P

import vernal
from vernal import debug

MESH = jax.make_mesh((4, 2), ("data", "model"))
WHOLE = jax.NamedSharding(MESH, P(None, None))


def compiled(fn, *args):
    return vernal.filter_jit(fn).lower(*args).compile()


def one(found, kind):
    (row,) = [row for row in found.rows if row.kind == kind]
    return row.devices, row.count, row.bytes


def spread(shape, *spec):
    return jax.device_put(jnp.ones(shape), jax.NamedSharding(MESH, P(*spec)))


def test_each_kind_is_counted_with_its_group_and_its_bytes():
    kinds = {
        "all-gather": lambda x: jax.lax.all_gather(x, "data"),
        "all-reduce": lambda x: jax.lax.psum(x, "data"),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, "data"),
        "all-to-all": lambda x: jax.lax.all_to_all(x, "data", 0, 0),
        "collective-permute": lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3)]),
    }
    # Each device has 4 x 8 numbers of 4 bytes, 128 in all.
    received = 3 * 128, 2 * 96, 96, 96, 128

    def program(x):
        return [fn(x) for fn in kinds.values()]

    fn = functools.partial(
        jax.shard_map, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    found = debug.collectives(compiled(fn(program), spread((16, 8), "data")))
    for kind, size in zip(kinds, received, strict=True):
        # A permutation has pairs, not groups.
        assert one(found, kind) == (8 if kind == "collective-permute" else 4, 1, size)
    assert found.count() == 5 and found.bytes() == sum(received)
    text = str(found)
    assert all(kind in text for kind in kinds) and "896 B" in text


def test_in_a_loop_they_count_for_every_trip_also_in_loops_in_loops():
    def body(x, w):
        return jnp.tanh(x @ jax.reshard(w, WHOLE)), None

    def twice(x, w):
        return jax.lax.scan(lambda x, _: jax.lax.scan(body, x, w), x, None, length=3)[0]

    found = debug.collectives(
        compiled(twice, spread((4, 8), "data"), spread((5, 8, 8), None, "data"))
    )
    assert one(found, "all-gather") == (4, 15, 15 * 8 * 8 * 4 * 3 // 4)
    assert not found.rows[0].at_least


def test_a_loop_of_unknown_length_counts_one_trip_and_says_so():
    spread_out = jax.NamedSharding(MESH, P("data"))

    def until(x):
        def body(x):
            return jax.reshard(jax.reshard(x, WHOLE)[::-1] + 1, spread_out)

        return jax.lax.while_loop(lambda x: jnp.sum(x) < 100, body, x)

    found = debug.collectives(compiled(until, spread((4, 8), "data")))
    (gather,) = [row for row in found.rows if row.kind == "all-gather"]
    assert gather.count == 1 and gather.at_least and ">= 1" in str(found)


class Program:
    """A program that was compiled elsewhere."""

    def __init__(self, *lines):
        self.lines = lines

    def as_text(self):
        header = "HloModule jit_f, entry_computation_layout={()->()}, num_partitions=16"
        return "\n".join([header, "", "ENTRY %main (p: f32[]) -> f32[] {", *self.lines, "}"])


@pytest.mark.parametrize(
    ("line", "row"),
    [
        # As it is written for GPUs: operations that start, and are done later.
        (
            "%a = (bf16[2,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%x), replica_groups=[4,4]<=[16], dimensions={0}",
            ("all-gather", 4, 96),
        ),
        (
            "%a = ((f32[2]{0}, f32[4]{0}), (f32[8]{0}, f32[16]{0})) all-gather-start(%x), replica_groups={{0,1,2,3}}",
            ("all-gather", 4, 72),
        ),
        (
            "%p = (f32[3]{0}, f32[3]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}",
            ("collective-permute", 16, 12),
        ),
        (
            "ROOT %r = (f32[8]{0}, pred[16]{0}) all-reduce-start(%x, %y), replica_groups={}, to_apply=%add",
            ("all-reduce", 16, 90),
        ),
        # Axes of a mesh, and a part of one.
        (
            "%r = f8e4m3fn[64]{0} all-reduce(%x), replica_groups=mesh['a'=4,'b'=4] {'a','b':(2)2}, to_apply=%add",
            ("all-reduce", 8, 112),
        ),
    ],
)
def test_programs_for_other_machines_are_read_as_well(line, row):
    (got,) = debug.collectives(Program(f"  {line}", "  %d = f32[8]{0} all-gather-done(%a)")).rows
    assert (got.kind, got.devices, got.bytes) == row and got.count == 1


def test_groups_of_one_device_and_other_programs_send_nothing():
    lonely = Program("  %r = f32[8]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add")
    assert debug.collectives(lonely).rows == ()
    assert str(debug.collectives(compiled(jnp.sin, jnp.ones(3)))) == "no communication"


def test_what_is_not_compiled_is_refused():
    for wrong in (3, jax.jit(jnp.sin).lower(1.0)):
        with pytest.raises(TypeError, match=r"not a compiled program\n.*debug\.collectives"):
            debug.collectives(wrong)
