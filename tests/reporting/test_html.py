"""The page and the notebook fragment: complete, self-contained, and nothing in them can run."""

from __future__ import annotations

import html
import re
import subprocess
import sys
import types
from html.parser import HTMLParser

import pytest

from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts
from gradguard.reporting import notebook, wording
from gradguard.reporting.html.page import render_html

HOSTILE = "<script>alert('x')</script>&\"'{{ 7 * 7 }}{% raw %}"


class Page(HTMLParser):
    """Checks that tags nest, and collects text and tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data


def test_page_says_everything(story):
    page = Page(render_html([story], "Report of run 7"))
    flat = " ".join(page.text.split())
    assert render_html([story], "t").startswith("<!DOCTYPE html>")
    for said in (story.headline, story.explanation, *story.notes, *story.avoid, *(wording.fix_title(fix) for fix in story.fixes)):
        assert said.replace("`", "") in flat
    for said in (*story.breadcrumbs, story.torch_message, story.name, "train.py:19:12", "clip_share", "float32 [32, 8], version 0 → 1"):
        assert said in flat
    for span in (story.culprit, *story.related):
        assert span.label in flat


def test_marks(story):
    text = render_html([story], "t")
    assert '<mark class="culprit">share.clamp_(min=low)</mark>' in text
    assert '<mark class="related">torch.sigmoid(self.weight(x))</mark>' in text
    assert '<span class="removed">-     return share.clamp_(min=low)</span>' in text
    assert '<span class="added">+     return share.clamp(min=low)</span>' in text


def test_nothing_is_fetched_and_nothing_runs(story):
    page = Page(render_html([story, story], "t"))
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    assert not any(value and re.match(r"\w+:|//", value) for _, attributes in page.tags for value in attributes.values())
    assert "url(" not in render_html([story], "t") and "@import" not in render_html([story], "t")


def test_everything_is_escaped(write):
    source = write(f"y.mul_(2)  # {HOSTILE}\n", "a<b>.py")
    hostile = Diagnosis(
        code="GG101",
        name=HOSTILE,
        headline=HOSTILE + "`" + HOSTILE + "`",
        culprit=source.span("y.mul_(2)", HOSTILE, function=HOSTILE),
        tensors=[TensorFacts(name=HOSTILE, module=HOSTILE)],
        explanation=HOSTILE + "\n    " + HOSTILE,
        notes=[HOSTILE],
        fixes=[
            Fix(title=HOSTILE, detail=HOSTILE, patch=HOSTILE),
            Fix(title="x", patch=f"+++ b/{HOSTILE}\n@@ -1 +1 @@\n-{HOSTILE}\n+{HOSTILE}\n"),
        ],
        avoid=[HOSTILE],
        breadcrumbs=[HOSTILE],
        thread=HOSTILE,
        torch_message=HOSTILE,
    )
    for text in (render_html([hostile, hostile], HOSTILE), notebook.to_html_fragment(hostile)):
        assert "<script" not in text and "49" not in Page(text).text
        assert html.escape("<script>", quote=False) in text


def test_light_and_dark(story):
    text = render_html([story], "t")
    assert "color-scheme: light dark" in text and "prefers-color-scheme: dark" in text


def test_several_and_none(story):
    page = Page(render_html([story, story.model_copy(update={"severity": "warning", "culprit": None, "confidence": "likely"})], "t"))
    assert [attributes["href"] for tag, attributes in page.tags if tag == "a"] == ["#gradguard-1", "#gradguard-2"]
    assert "could not determine the exact line" in page.text and "likely, not certain" in page.text
    assert "nothing was found" in Page(render_html([], "t")).text


def test_fragment_stands_alone(story):
    text = notebook.to_html_fragment(story)
    page = Page(text)
    assert "<html" not in text and [tag for tag, _ in page.tags[:2]] == ["style", "div"]
    assert "share.clamp_(min=low)" in page.text


def test_without_jinja2(story, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    from gradguard.reporting.html import page as module

    module._template.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"pip install gradguard\[report\]"):
            render_html([story], "t")
        fragment = notebook.to_html_fragment(story)
    finally:
        module._template.cache_clear()
    assert fragment.startswith("<pre>error[GG101]") and "share.clamp_(min=low)" in fragment


def test_display_outside_a_kernel_prints(story, capsys):
    notebook.display(story)
    assert capsys.readouterr().err.startswith("error[GG101]")


def test_display_in_a_kernel_shows_html_and_text(story, monkeypatch):
    # A stand-in for IPython, which the tests do not install: just what a kernel offers.
    shown = []
    kernel = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    show = types.SimpleNamespace(display=lambda bundle, raw: shown.append((bundle, raw)))
    monkeypatch.setitem(sys.modules, "IPython.display", show)
    notebook.display(story)
    [(bundle, raw)] = shown
    assert raw and bundle["text/plain"].startswith("error[GG101]") and "<mark" in bundle["text/html"]


def test_nothing_heavy_is_imported_early():
    code = "import sys, gradguard.reporting.html.page, gradguard.reporting.notebook, gradguard.reporting.jsonl\n"
    code += "print([m for m in ('jinja2', 'IPython', 'rich.console') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
