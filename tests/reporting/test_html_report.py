"""The HTML report of real failing programs: what its pictures mark, what its tables say, and that it is one harmless file."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import gradguard.reporting.html.html_report as pages
import gradguard.runtime.gathering as gathering
from gradguard.core.diagnosis import Diagnosis, Verification
from gradguard.core.errors import ConfigError, GradGuardError
from gradguard.core.evidence import Evidence, GraphEdge, GraphNode, GraphPart, LayerGradient, ProtocolEvent
from gradguard.reporting.html.charts import norm_rows
from gradguard.reporting.html.graph_picture import graph_picture
from gradguard.runtime.guard import gradguard

_MARKS = {"root", "written", "culprit", "named", "cut", "freed", "detached", "fold"}


class Page(HTMLParser):
    """Collects what a page marks: the boxes of its graphs by mark, its tables' rows, its headings and its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.boxes: list[tuple[set[str], list[str]]] = []
        self.rows: list[tuple[str, list[str]]] = []
        self.broken = self.crosses = 0
        self.sections: list[str] = []
        self.events: list[tuple[str, str]] = []
        self.outside: list[str] = []
        self._stack: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self._stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        classes = set((found.get("class") or "").split())
        self.outside += [str(found[name]) for name in ("src", "href") if name in found and not str(found[name]).startswith("#")]
        self.outside += [tag] * (tag in ("script", "link", "iframe", "img"))
        if tag == "meta":
            return
        if tag == "g" and "node" in classes:
            self.boxes.append((classes & _MARKS, []))
        self.broken += tag == "path" and {"edge", "broken"} <= classes
        self.crosses += tag == "path" and "cross" in classes
        if tag == "tr":
            self.rows.append((found.get("class") or "", []))
        if tag == "td":
            self.rows[-1][1].append("")
        if tag == "g" and "event" in classes:
            self.events.append((found["class"].removeprefix("event "), ""))
        self._stack.append((tag, found))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "meta":
            assert self._stack.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._stack]
        around = next((found.get("class") or "" for tag, found in reversed(self._stack) if tag == "g"), "")
        if tags and tags[-1] == "text" and around.startswith("node"):
            self.boxes[-1][1].append(data)
        if tags and tags[-1] == "title" and around.startswith("event"):
            self.events[-1] = (self.events[-1][0], data)
        if "summary" in tags:
            self.sections.append(data)
        if "td" in tags:
            self.rows[-1][1][-1] += data

    def marked(self, mark: str) -> list[list[str]]:
        """The texts of the boxes that have a mark."""
        return [texts for marks, texts in self.boxes if mark in marks]

    def steps(self) -> list[tuple[str, list[str]]]:
        """The rows of the provenance table: mark and cells."""
        return [(mark, [cell.strip() for cell in cells]) for mark, cells in self.rows if len(cells) == 9]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(self.up(x))
        out = self.down(h)
        h.clamp_(max=0.9)
        return x + out


class Net(nn.Module):
    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 1)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def written_in_place(blocks: int = 1) -> None:
    model = Net(blocks)
    loss = model(torch.randn(4, 8)).mean()
    loss.backward()


def freed() -> None:
    cell, head = nn.Linear(8, 8), nn.Linear(8, 1)
    state = torch.zeros(4, 8)
    for _ in range(3):
        state = torch.tanh(cell(state) + 1)
        loss = head(state).pow(2).mean()
        loss.backward()


def detached() -> None:
    model = nn.Linear(8, 4)
    scores = torch.relu(model(torch.randn(4, 8)))
    loss = scores.detach().pow(2).mean()
    loss.backward()


def stepped() -> None:
    net, critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(critic.parameters())
    judged = critic(net(torch.randn(8, 4)))
    optimizer.zero_grad()
    critic(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    judged.mean().backward()


def cut_unnoticed() -> None:
    encoder, head = nn.Linear(8, 8), nn.Linear(8, 2)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()])
    for _ in range(40):
        features = torch.tensor(encoder(torch.randn(8, 8)).tolist())
        loss = head(features).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def infinite_slope(steps: int = 9) -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=1e-3)
    for step in range(steps):
        gap = last(torch.relu(first(torch.randn(4, 4)))).pow(2) * (step < steps - 1)
        root = torch.sqrt(gap)
        loss = root.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(autouse=True)
def _no_pages() -> None:
    pages._pages.clear()


def report(program, path: Path, level: str = "standard", **settings) -> Page:
    """Runs a program under a guard that writes a page; gives the page."""
    torch.manual_seed(0)
    with gradguard(level=level, html=path, **settings):
        try:
            program()
        except GradGuardError:
            pass
    return Page(path.read_text())


@pytest.mark.parametrize("level", ["standard", "strict"])
def test_in_place_write(tmp_path: Path, level: str) -> None:
    page = report(written_in_place, tmp_path / "r.html", level)
    written = {texts[0]: texts for texts in page.marked("written")}
    tensor = written.pop("h")
    assert set(written) == {"sigmoid", "linear"} and {texts[-1] for texts in written.values()} == {"saved version 0, found 1"}
    assert "model.blocks.0" in written["sigmoid"] and "[4, 16]" in written["sigmoid"] and "self.down(h)" in written["linear"]
    assert tensor[2].startswith("h.clamp_(") and tensor[-1] == "version 0 → 1, written here"
    assert page.broken == page.crosses == 1
    assert [texts[0] for texts in page.marked("root")] == ["mean → loss"]
    steps = page.steps()
    assert [cells[1].split()[0] for _, cells in steps][-1] == "model(torch.randn(4,"
    assert next(cells for mark, cells in steps if mark == "written" and cells[2] == "the saved tensor")[3:9] == [
        "h", "", "[4, 16]", "float32", "True", "1",
    ]  # fmt: skip
    gradless = [cells for _, cells in page.rows if len(cells) == 3]
    assert [cells[0].strip() for cells in gradless] == ["model.unused.weight", "model.unused.bias"]
    assert {cells[2].strip() for cells in gradless} == {"the loss does not depend on it"}


def test_freed_graph(tmp_path: Path) -> None:
    page = report(freed, tmp_path / "r.html")
    grey = page.marked("freed")
    assert [texts[0] for texts in grey] == ["linear", "add", "tanh"] or {"tanh", "add", "linear"} <= {texts[0] for texts in grey}
    assert [texts[-1] for texts in grey].count("used up by an earlier backward()") == 1
    assert page.crosses == 1
    alive = [texts[0] for marks, texts in page.boxes if "freed" not in marks]
    assert "pow" in alive and any(text.startswith("tanh") for text in alive)


def test_detached_loss(tmp_path: Path) -> None:
    page = report(detached, tmp_path / "r.html")
    (cut,) = page.marked("cut")
    assert cut[0] == "detach" and cut[-1] == "cut off here" and "scores.detach()" in cut
    assert page.broken == 2 and page.crosses == 1
    assert [texts[0] for texts in page.marked("root")] == ["loss"]
    assert {"linear"} <= {texts[0] for texts in page.marked("detached")}
    rows = {cells[2]: cells for _, cells in page.steps()}
    assert rows["relu"][7] == "True" and rows["detach"][7] == "False" and rows["the loss"][7] == "False"
    assert list(rows)[-3:] == ["relu", "detach", "the loss"]


def test_optimizer_step_between(tmp_path: Path) -> None:
    page = report(stepped, tmp_path / "r.html")
    assert any(texts[0] == "critic.2.weight" and "optimizer.step()" in texts for texts in page.marked("written"))
    faults = {kind: told for kind, told in page.events if kind in ("culprit", "noticed")}
    assert faults["culprit"].startswith("Adam.step()") and faults["noticed"].startswith("backward()")


def test_silently_without_gradient(tmp_path: Path) -> None:
    page = report(cut_unnoticed, tmp_path / "r.html")
    assert any(cells[0].strip() == "encoder.weight" for _, cells in page.rows if len(cells) == 3)
    assert len(page.marked("cut")) == 1 and page.crosses == 1
    assert [kind for kind, _ in page.events].count("unknown"), "forwards of untraced steps are drawn as such"
    assert "Gradient norm by layer" in page.sections


def test_gradient_became_infinite_in_an_untraced_step(tmp_path: Path) -> None:
    page = report(infinite_slope, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    (culprit,) = page.marked("culprit")
    assert culprit[0] == "sqrt → root" and "torch.sqrt(gap)" in culprit
    assert "which made the same operations in the same" in text
    assert re.search(r"class='nan'", text) and "NaN now" in text


def test_lines_of_another_graph_are_not_taken_over(tmp_path: Path) -> None:
    def changing() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(9):
            out = model(torch.randn(4, 4))
            gap = out.exp().sin().cos() if step < 8 else (out.pow(2) * 0).neg().abs()
            loss = torch.sqrt(gap.abs()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    report(changing, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "lines and expressions are not known" in text and "out.exp()" not in text.partition("Each step")[2]


def test_many_modules_are_folded(tmp_path: Path) -> None:
    page = report(lambda: written_in_place(40), tmp_path / "r.html")
    assert len(page.boxes) <= 26
    folds = page.marked("fold")
    assert any(re.search(r"cks.\d+ … \d+$", text) for texts in folds for text in texts)
    assert all(re.fullmatch(r"\d+ operations", texts[0]) for texts in folds)


def test_page_holds_nothing_alive_and_no_tensor(tmp_path: Path) -> None:
    model = Net()
    refs = [weakref.ref(model), weakref.ref(model.head.weight)]
    guard = gradguard(html=tmp_path / "r.html")
    with pytest.raises(GradGuardError) as raised, guard:
        model(torch.randn(4, 8)).mean().backward()
    evidence = guard.diagnoses[0].evidence
    assert evidence is not None and evidence.graph is not None and not evidence.lost
    del model, raised
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert evidence.graph.nodes, "the facts outlive it"


def test_results_are_those_of_a_bare_run(tmp_path: Path) -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(40):
            optimizer.zero_grad()
            model(torch.randn(4, 4)).pow(2).mean().backward()
            optimizer.step()
        return [*model.parameters()]

    bare = run()
    with gradguard(html=tmp_path / "r.html"):
        guarded = run()
    assert all(torch.equal(one, other) for one, other in zip(bare, guarded, strict=True))
    assert not (tmp_path / "r.html").exists(), "nothing was found"


def test_a_fault_costs_its_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(gathering, "LiveGraph", fails)
    page = report(written_in_place, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "GG101" in text and "gradguard failed to gather the graph" in text and not page.boxes
    assert "What happened before" in page.sections


def test_one_file_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = report(stepped, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert not page.outside and "url(http" not in text and "@import" not in text
    assert text.startswith("<!DOCTYPE html>\n<!-- gradguard report -->") and "prefers-color-scheme: dark" in text


def test_text_of_the_program_is_escaped() -> None:
    hostile = "<script>alert(1)</script>&'\""
    node = GraphNode(hostile, name=hostile, module=hostile, file=hostile, line=1, text=hostile, leaves=(hostile,), note=hostile, mark="cut")
    picture = graph_picture(GraphPart((node, node), (GraphEdge(1, 0, broken=True),), 2))
    assert "<script" not in picture and "&lt;script" in picture


def test_other_files_are_not_written_over(tmp_path: Path) -> None:
    mine = tmp_path / "thesis.html"
    mine.write_text("<!DOCTYPE html>\n<html>mine</html>")
    with pytest.raises(ConfigError, match=r"no report of gradguard's"):
        gradguard(html=mine)
    assert mine.read_text().endswith("mine</html>")
    page = report(detached, tmp_path / "r.html")
    pages._pages.clear()  # as in another process
    again = report(freed, tmp_path / "r.html")
    assert page.marked("cut") and not again.marked("cut"), "an earlier run's page is replaced"


def test_guards_of_one_process_share_a_page(tmp_path: Path) -> None:
    report(detached, tmp_path / "r.html")
    report(freed, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert "GG302" in text and "GG20" in text and text.count("<nav>") == 1


def test_a_page_needs_jinja2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'gradguard\[report\]'"):
        gradguard(html=tmp_path / "r.html")


def test_command_line(tmp_path: Path) -> None:
    """A run of a failing program writes the page; one in which nothing is found replaces it; what is no page is refused."""
    (tmp_path / "train.py").write_text(
        "import sys, torch\nmodel = torch.nn.Linear(4, 1)\nout = torch.sigmoid(model(torch.randn(2, 4)))\n"
        "if len(sys.argv) > 1:\n    out.mul_(2)\nout.mean().backward()\n"
    )
    (tmp_path / "notes.html").write_text("notes")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gradguard", "run", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    assert run("--html", "page.html", "train.py", "broken").returncode == 1
    assert "out.mul_(2)" in (tmp_path / "page.html").read_text()
    assert run("--html", "page.html", "train.py").returncode == 0
    assert "nothing was found" in (tmp_path / "page.html").read_text()
    refused = run("--html", "notes.html", "train.py")
    assert refused.returncode == 2 and "no report of gradguard's" in refused.stderr.replace("\n", " ").replace("│ ", "")
    assert (tmp_path / "notes.html").read_text() == "notes"


def test_norms_that_died_or_blew_up() -> None:
    nan = float("nan")
    layers = (
        LayerGradient("fine", ((1, 1.0), (2, 2.0))),
        LayerGradient("died", ((1, 1.0), (2, 0.0), (3, 0.0))),
        LayerGradient("nan", ((1, 1.0), (2, nan)), nan),
        LayerGradient("blew", ((1, 1e-3), (2, 1e3))),
        LayerGradient("fell", ((1, 1e3), (2, 1e-3))),
        *(LayerGradient(f"more.{i}", ((1, 1.0),)) for i in range(60)),
    )
    heads, rows, left_out = norm_rows(layers)
    verdicts = {row.layer: row.verdict for row in rows}
    assert heads == ["1", "2", "3", "now"] and left_out == 65 - len(rows) > 0
    assert verdicts["died"] == "zero since step 2" and verdicts["nan"] == "NaN since step 2"
    assert "blew up" in verdicts["blew"] and "fell from" in verdicts["fell"]
    assert [row.layer for row in rows if row.bad] == ["died", "nan", "blew", "fell"]


def test_evidence_is_plain() -> None:
    evidence = Evidence(timeline=(ProtocolEvent("step", 1),))
    with pytest.raises(AttributeError):
        evidence.norms = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "suffix"),
    [({}, ""), ({"RANK": "0"}, ""), ({"RANK": "3"}, ".rank3"), ({"GRADGUARD_WORKER": "0"}, ""), ({"GRADGUARD_WORKER": "2"}, ".worker2")],
)
def test_each_process_of_a_launch_has_its_own_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], suffix: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with gradguard(html=tmp_path / "r.html"), pytest.raises(GradGuardError):
        detached()
    assert [path.name for path in tmp_path.iterdir()] == [f"r{suffix}.html"]


def test_a_verified_fix_is_shown_in_its_place(tmp_path: Path, story: Diagnosis) -> None:
    page = pages.HtmlReport(tmp_path / "r.html")
    page.write(story.with_evidence(Evidence(timeline=(ProtocolEvent("step", 1),))))
    tried = Verification(verdict="verified", steps=3)
    fixes = [fix.model_copy(update={"verified": tried}) for fix in story.fixes]
    page.revise(story, story.model_copy(update={"fixes": fixes}))
    text = (tmp_path / "r.html").read_text()
    assert "verified over 3 steps" in text and text.count("gradguard explain") == 1
