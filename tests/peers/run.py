"""Downloads the source of a library, and runs its tests on Equinox and on Vernal."""

import dataclasses
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# A suite that hangs is ended.
SECONDS = 3000
PLUGINS = {"equinox": (), "vernal": ("-p", "vernal.compat.pytest")}


@dataclasses.dataclass
class Outcome:
    """What a suite did: each test by name, the seconds of the processor, and what it printed."""

    outcomes: dict[str, str]
    seconds: float
    output: str

    @property
    def passed(self) -> int:
        return list(self.outcomes.values()).count("passed")


def download(name: str, folder: Path) -> Path:
    """The unpacked source distribution of the version that is installed."""
    version = importlib.metadata.version(name)
    found = list(folder.glob(f"{name}-{version}"))
    if not found:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--quiet",
            "--disable-pip-version-check",
            "download",
        ]
        options = ["--no-deps", "--no-binary", name, "--dest", str(folder)]
        subprocess.run([*command, *options, f"{name}=={version}"], check=True)
        with tarfile.open(folder / f"{name}-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        found = list(folder.glob(f"{name}-{version}"))
    return found[0]


def tests_run(
    source: Path, arguments: tuple[str, ...], settings: Mapping[str, str], system: str
) -> Outcome:
    """Runs a suite in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PLUGINS[system]]
        # Its own configuration: pytest would look for one further up, and find ours.
        command += ["--config-file=pyproject.toml", f"--junitxml={report}", *arguments]
        with (Path(temporary) / "output").open("w+") as output:
            process = subprocess.Popen(
                ["timeout", str(SECONDS), *command],
                cwd=source,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **settings},
            )
            _, _, usage = os.wait4(process.pid, 0)
            output.seek(0)
            printed = output.read()
        outcomes = read(report) if report.exists() else {}
    return Outcome(outcomes, usage.ru_utime + usage.ru_stime, printed)


def read(report: Path) -> dict[str, str]:
    """The outcomes of pytest's report."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = f"{case.get('classname')}::{case.get('name')}"
        found[name] = kinds.pop() if kinds else "passed"
    return found


def both(
    source: Path, runs: tuple[tuple[str, ...], ...], settings: Mapping[str, str]
) -> list[Outcome]:
    """On Equinox and on Vernal, at the same time: so both meet the same disturbances."""

    def all_of(system: str) -> Outcome:
        found = [tests_run(source, arguments, settings, system) for arguments in runs]
        outcomes = {name: outcome for run in found for name, outcome in run.outcomes.items()}
        printed = "\n".join(run.output for run in found)
        return Outcome(outcomes, sum(run.seconds for run in found), printed)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(all_of, PLUGINS))
