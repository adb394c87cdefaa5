"""The status page: it brings all that it needs, reads metrics that exist, and looks like a page."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import threading
import zlib
from pathlib import Path

import httpx
import pytest
from served_model import Served

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


def _complete(served: Served, max_tokens: int) -> None:
    served.client.completions.create(
        model="mini", prompt="a", max_tokens=max_tokens, extra_body={"ignore_eos": True}
    )


def test_the_page_loads_nothing_from_elsewhere(served: Served) -> None:
    response = httpx.get(served.url)
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"https?://|//[a-z]|@import|<link[^>]+stylesheet| src=", response.text)


def test_the_page_reads_metrics_that_exist(served: Served) -> None:
    _complete(served, 3)
    served.wait_until_idle()
    page = httpx.get(served.url).text
    names = set(re.findall(r'"((?:vllm|kdecode):\w+)"', page))
    assert len(names) > 10
    exposed = httpx.get(f"{served.url}/metrics").text
    for name in names:
        assert re.search(rf"^{name}(_bucket)?{{", exposed, re.MULTILINE), name


def _browse(url: str, *flags: str) -> str:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed; one of them takes the picture")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    # Time as the page sees it: enough for a few looks at the metrics.
    command += ["--virtual-time-budget=5000", "--window-size=1160,800", *flags, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout


def _pixels(path: Path) -> tuple[int, int, set[bytes]]:
    """Width, height and the lines of an 8-bit PNG, as they are stored."""
    data = path.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    channels = {2: 3, 6: 4}[kind]
    assert depth == 8
    body, place = b"", 8
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            body += data[place + 8 : place + 8 + size]
        place += size + 12
    raw, line = zlib.decompress(body), width * channels + 1
    return width, height, {raw[i : i + line] for i in range(0, len(raw), line)}


@pytest.mark.slow
def test_the_page_in_a_browser(served: Served, tmp_path: Path) -> None:
    """What it shows while a request runs, as text and as a picture."""
    load = threading.Thread(target=_complete, args=(served, 2000))
    load.start()
    dom = _browse(served.url, "--dump-dom")
    load.join()
    _complete(served, 30)

    def shown(name: str) -> str:
        found = re.search(rf'id="{name}"[^>]*>([^<]*)<', dom)
        assert found is not None, name
        return found[1]

    assert shown("model") == "mini"
    assert shown("state").startswith("live")
    assert re.fullmatch("[0-9,]+", shown("generated"))
    assert re.fullmatch(r"[0-9.]+ %", shown("coverage"))
    assert re.fullmatch(r"[0-9.]+ %", shown("slots"))
    assert "specialized" in dom
    assert dom.count("<tr>") >= 5
    picture = tmp_path / "page.png"
    _browse(served.url, f"--screenshot={picture}")
    width, height, lines = _pixels(picture)
    assert (width, height) == (1160, 800)
    # A page of text has many different lines of pixels; an empty one has a few.
    assert len(lines) > 100
