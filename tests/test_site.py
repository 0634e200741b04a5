"""The pages as a site: built without a warning, with no dead link inside, and read on a wide and a narrow screen."""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.helpers.browser import CHROMIUM, Browser

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "index",
    "inspection",
    "reference/keys",
    "reference/datamodules",
    "reference/notebooks/quick_start",
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("myst_nb", reason="needs pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(folder)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    return folder


def test_no_link_inside_is_dead(site: Path) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    named = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    for path, text in texts.items():
        for link in re.findall(r'<a [^>]*href="([^"]+)"', text):
            target, _, part = unquote(unescape(link)).partition("#")
            if re.match(r"\w+:", target):
                continue
            leads_to = (path.parent / target).resolve() if target else path
            assert leads_to.is_file(), (path.name, link)
            assert not part or leads_to not in named or part in named[leads_to], (path.name, link)
    assert len(texts) > 30


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("callbacks", "AdaptiveBatchSize"),
        ("loading", "LoaderOptions"),
        ("testing", "check_dataset"),
        ("core.types", "FieldSpec"),
    ],
)
def test_the_reference_has_public_names(package: str, name: str, site: Path) -> None:
    assert f'id="lit_data.{package}.{name}"' in (site / "reference" / f"{package}.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pages_fit_a_wide_and_a_narrow_screen_and_are_found(site: Path, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        for width in (1400, 400):
            browser.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=1000,
                deviceScaleFactor=1,
                mobile=False,
            )
            for page in PAGES:
                browser.events.clear()
                browser.open(site / f"{page}.html")
                assert browser.evaluate("document.documentElement.scrollWidth") <= width, page
        browser.events.clear()
        browser.call("Page.navigate", url=f"{(site / 'search.html').as_uri()}?q=AdaptiveBatchSize")
        wait = "new Promise(found => setInterval(() => document.querySelector('#search-results li a') && found(true), 50))"
        assert (
            browser.evaluate(
                f"Promise.race([{wait}, new Promise(late => setTimeout(late, 20000))])"
            )
            is True
        )
