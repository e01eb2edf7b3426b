"""What every test of the suite runs under.

The package is imported through a hook that puts beartype on every function, so that every call in every test checks the
annotations, jaxtyping's included; JAX refuses implicit promotion of types and ranks, and believes it has eight CPU
devices. All of this must be set before anything imports the package, hence at the top of this file. The doctest pass
loads it as a plugin (`-p tests.conftest`), because its files lie outside `tests/`.
"""

import gc
import os
import zlib
from collections.abc import Iterator

import hypothesis
import jax
import pytest

from tests._annotations import check_annotations

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling is most of the time of this suite, and no test asks how fast a program is.
jax.config.update("jax_disable_most_optimizations", True)
# A small program in one part compiles in four fifths of the time of many, and there is a worker for each core already.
flags = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_parallel_codegen_split_count=1"]
# XLA's older way to write a fused loop compiles in half the time; newer versions refuse the flag.
if jax.__version_info__ < (0, 11):
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(flags)
# A program compiled by yesterday's code must not pass for today's.
jax.config.update("jax_enable_compilation_cache", False)

# Stays installed for the whole run: rooms are imported lazily by the tests that need them.
check_annotations("vernal")

from vernal.testing import GetKey  # noqa: E402 (the hook above must be there first)

hypothesis.settings.register_profile(
    "vernal",
    # The first example of a property compiles, which says nothing about the property.
    deadline=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        # `getkey` only ever moves on to fresh keys: sharing it between the examples of one test is harmless.
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
    # A change must not be refused for an example that it did not cause; exploring is for the desk.
    derandomize="CI" in os.environ,
    print_blob=True,
)
hypothesis.settings.load_profile("vernal")


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> GetKey:
    """Fresh random keys; a failing test prints the seed, and `VERNAL_GETKEY_SEED=<seed>` replays it.

    In CI each test has a seed of its own that stays: as with hypothesis, exploring is for the desk.
    """
    if seed := os.environ.get("VERNAL_GETKEY_SEED"):
        return GetKey(int(seed))
    if "CI" in os.environ:
        return GetKey(zlib.crc32(request.node.nodeid.encode()) % 2**31)
    return GetKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Adds the seed to the report of a failure, whatever style of traceback was asked for."""
    report = yield
    key = getattr(item, "funcargs", {}).get("getkey")
    if report.failed and key is not None:
        report.sections.append(
            ("random keys", f"{key!r}: replay with VERNAL_GETKEY_SEED={key.seed}")
        )
    return report


@pytest.fixture(autouse=True, scope="module")
def drop_compiled_programs() -> Iterator[None]:
    """Frees what one file compiled before the next begins: the whole suite would not fit in memory.

    What survives, such as modules that were imported, is not looked at again by later collections.
    """
    yield
    jax.clear_caches()
    gc.collect()
    gc.freeze()


# Files that take more than a minute and a half.
LONG = {
    "test_branches.py",
    "test_calls.py",
    "test_compositions.py",
    "test_coverage.py",
    "test_debug_buffers.py",
    "test_examples.py",
    "test_factories.py",
    "test_finished_elements.py",
    "test_packaging.py",
    "test_random_programs.py",
    "test_rules_of_jax.py",
    "test_site.py",
    "test_substitution.py",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is not sampled, and puts the longest files first: one that begins when the others end keeps a
    worker waiting for minutes."""
    kept = sampled(items) if "CI" in os.environ else items
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = sorted(kept, key=lambda item: item.path.name not in LONG)


def sampled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of a test marked `sample(n)`, about one cell in n, at least one, and always the same ones."""
    kept: list[pytest.Item] = []
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in tests.values():
        mark = cells[0].get_closest_marker("sample")
        count = 1 if mark is None else mark.args[0]
        kept += [x for x in cells if zlib.crc32(x.name.encode()) % count == 0] or cells[:1]
    return kept


def pytest_collection_finish() -> None:
    """What is imported by now stays: collections need not walk through it (a quarter of `tests/transforms`)."""
    gc.collect()
    gc.freeze()
    # Of what a test makes, nearly nothing is dropped before its end.
    gc.set_threshold(50_000, 20, 20)
