"""The page at /, used with the keyboard in a headless Chromium."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.serving import Running
from hybridspec import LLM, SamplingParams

PAGE = Path(__file__).resolve().parents[2] / "src/hybridspec/serve/page.html"
# Contrast of text and of the marks against what is behind them, by WCAG 2.
_CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((v) => {
      v /= 255;
      return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = parse(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("label, p.key, h1, dt, dd, mark, legend, button, #model")]
    .filter((node) => node.offsetParent && node.textContent.trim())
    .map((node) => {
      const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    });
}"""


def wait_for(page: Any, selector: str, is_right: Callable[[str], bool]) -> None:
    """Poll from here: the page's own rules forbid code that comes as text."""
    ends = time.monotonic() + 60
    while not is_right(page.text_content(selector)):
        assert time.monotonic() < ends, page.text_content(selector)
        page.wait_for_timeout(20)


def test_nothing_comes_from_elsewhere() -> None:
    text = PAGE.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert "http://" not in text and "https://" not in text and "@import" not in text


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, running: Running) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox"]
        )
        page = browser.new_page(color_scheme=request.param)
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        refused = "Failed to load resource: the server responded with a status of 400"
        page.goto(running.url)
        wait_for(page, "#model", lambda text: text == "small")
        yield page
        assert [text for text in problems if not text.startswith(refused)] == []
        browser.close()


@pytest.mark.browser
def test_a_prompt_by_keyboard(page: Any, running: Running) -> None:
    [right] = LLM("bundled", device="cpu").generate(
        "import os\n", SamplingParams(temperature=0, max_tokens=60)
    )
    page.focus("#prompt")
    page.keyboard.press("Control+A")
    page.keyboard.type("import os\n")
    page.fill("#max", "60")
    page.keyboard.press("Control+Enter")
    wait_for(page, "#status", lambda text: text == "done: 60 tokens")
    assert page.text_content("#output") == "import os\n" + right.outputs[0].text
    accepted, drafted = map(int, page.text_content("#accepted").split(" of "))
    stats = right.stats
    assert (accepted, drafted) == (sum(stats.accepted_per_step), sum(stats.drafted_per_step))
    marked = "".join(page.locator("#output mark").all_text_contents())
    assert len(marked) == accepted
    assert int(page.text_content("#steps")) == len(stats.committed_per_step)
    assert page.locator("#positions meter").count() == 3
    assert min(page.evaluate(_CONTRAST)) >= 4.5


@pytest.mark.browser
def test_a_chat_that_is_stopped(page: Any, running: Running) -> None:
    page.check("[value=chat]")
    assert page.text_content("#prompt-label") == "Message"
    page.fill("#prompt", "hello")
    page.fill("#max", "3000")
    page.click("#send")
    wait_for(page, "#tokens", lambda text: int(text) > 20)
    wait_for(page, "#running", lambda text: text == "1")
    page.keyboard.press("Escape")
    wait_for(page, "#status", lambda text: text == "stopped")
    running.wait_idle()
    page.fill("#max", "0")
    page.evaluate("document.getElementById('max').removeAttribute('min')")
    page.click("#send")
    wait_for(page, "#problem", lambda text: text.startswith("max_tokens"))


@pytest.mark.browser
def test_every_control_has_a_name(page: Any) -> None:
    for control in page.locator("input, textarea, button, meter").all():
        name = control.evaluate(
            "node => node.textContent.trim() || node.getAttribute('aria-label') || "
            "node.getAttribute('aria-labelledby') || (node.labels && node.labels.length) || ''"
        )
        assert name, control.evaluate("node => node.outerHTML")
