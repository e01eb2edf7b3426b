"""Runs the examples, and keeps what they print and draw for their pages: `NAME.txt` and `NAME.png` in `docs/gallery`.

    python docs/_gallery.py [--into FOLDER] [NAME ...]

An example writes its files into the folder it is run in. The last figure by name is shown on its page.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXAMPLES = {file.stem: file for file in sorted((ROOT / "examples").glob("*.py"))}
# More than a page shows: a text of 400 letters among them, or several processes.
NOT_SHOWN = ("gpt_distributed", "load_gpt2")


def run(name: str, into: Path) -> None:
    """Runs an example in a folder of its own."""
    # Tables as wide as a page shows them.
    environment = dict(os.environ, JAX_PLATFORMS="cpu", MPLBACKEND="Agg", COLUMNS="100")
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, EXAMPLES[name]],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{name} failed after it had printed:\n{done.stdout}")
        into.mkdir(parents=True, exist_ok=True)
        (into / f"{name}.txt").write_text(done.stdout, encoding="utf-8")
        figures = sorted(Path(folder).rglob("*.png"))
        if figures:
            shutil.copy(figures[-1], into / f"{name}.png")


def main() -> None:
    """Runs those that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "gallery")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(EXAMPLES))
    if unknown:
        parser.error(f"no example is called {unknown[0]}; there are {', '.join(EXAMPLES)}")
    for name in arguments.names or [x for x in EXAMPLES if x not in NOT_SHOWN]:
        start = time.monotonic()
        print(f"{name} ...", flush=True)
        run(name, arguments.into)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
