"""The site as a browser shows it: on a wide window and on a phone, with nothing fetched from elsewhere."""

import functools
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Loads pages in frames of one width, one after the other, and writes down what it sees.
MEASURE = """
const pages = %s, width = %d;
const frame = document.createElement("iframe");
frame.style = `width: ${width}px; height: 800px; border: 0`;
document.documentElement.append(frame);
const load = page => new Promise(done => { frame.onload = done; frame.src = page; });
(async () => {
  const seen = {};
  for (const page of pages) {
    await load(page);
    const view = frame.contentWindow, root = frame.contentDocument.documentElement;
    const images = [...frame.contentDocument.images];
    images.forEach(image => image.loading = "eager");
    await Promise.all(images.map(image => image.decode().catch(() => null)));
    const first = frame.contentDocument.querySelector("a, button, input:not([type=checkbox]):not([type=radio])");
    seen[page] = {
      wider: root.scrollWidth - root.clientWidth,
      broken: images.filter(image => !image.naturalWidth).map(image => image.src),
      unnamed: images.filter(image => !image.hasAttribute("alt")).map(image => image.src),
      elsewhere: view.performance.getEntriesByType("resource").map(x => x.name).filter(x => !x.startsWith(view.origin)),
      headings: frame.contentDocument.querySelectorAll("h1").length,
      first: first.className,
    };
  }
  fetch("/seen", {method: "POST", body: JSON.stringify(seen)});
})();
"""

# Types into the search, and writes down where the results lead.
SEARCH = """
const words = %s, frame = document.createElement("iframe");
const wait = milliseconds => new Promise(done => setTimeout(done, milliseconds));
frame.style = "width: 1280px; height: 800px";
(async () => {
  await new Promise(done => { frame.onload = done; frame.src = "index.html"; document.documentElement.append(frame); });
  const page = frame.contentDocument, box = page.querySelector(".md-search__input");
  const links = () => [...page.querySelectorAll(".md-search-result__link")].map(x => x.href);
  box.focus();
  box.value = words;
  for (let i = 0; i < 200 && !links().length; i++) {
    box.dispatchEvent(new Event("keyup", {bubbles: true}));
    await wait(500);
  }
  fetch("/seen", {method: "POST", body: JSON.stringify(links())});
})();
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, the address of a server that has it, and a queue of what pages tell that server."""
    folder, told = tmp_path_factory.mktemp("site") / "site", queue.SimpleQueue()
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = dict(os.environ, NO_MKDOCS_2_WARNING="1")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self):
            told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        # A browser that is killed leaves requests behind.
        server.handle_error = lambda *_: None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}", told
        server.shutdown()


def told_in_browser(site, tmp_path, script):
    """What a page with this script tells, in a new headless Chromium."""
    folder, address, told = site
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    assert browser, "install Chromium: apt-get install chromium"
    switches = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
        "disable-component-update disable-sync disable-dev-shm-usage remote-debugging-port=0"
    )
    page = folder / "script.html"
    page.write_text(f"<!doctype html><title>script</title><script>{script}</script>")
    process = subprocess.Popen(
        [
            browser,
            *(f"--{switch}" for switch in switches.split()),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"{address}/script.html",
        ],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return told.get(timeout=250)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        page.unlink()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_fits_its_window_and_has_all_that_it_shows(site, width, tmp_path):
    pages = sorted(str(file.relative_to(site[0])) for file in site[0].rglob("*.html"))
    pages.remove("404.html")
    assert len(pages) > 50
    seen = told_in_browser(site, tmp_path, MEASURE % (json.dumps(pages), width))
    assert sorted(seen) == pages
    # What the first press of the tabulator reaches leads past the navigation.
    good = {
        "wider": 0,
        "broken": [],
        "unnamed": [],
        "elsewhere": [],
        "headings": 1,
        "first": "md-skip",
    }
    assert {page: of for page, of in seen.items() if of != good} == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("words", "page"),
    [("freeze", "vernal.freeze"), ("spectral", "SpectralNorm"), ("adam", "optim")],
)
def test_the_search_finds(site, words, page, tmp_path):
    found = told_in_browser(site, tmp_path, SEARCH % json.dumps(words))
    assert any(page in link for link in found), found
