"""The cut of a live graph: which module made a node, what is folded, and what stands where in the picture."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradguard.analysis.graph.earlier_steps import lines_of
from gradguard.analysis.graph.folding import fold
from gradguard.analysis.graph.graph_part import LiveGraph
from gradguard.analysis.graph.module_paths import ModulePaths
from gradguard.analysis.graph.walk import is_accumulate, op_name, walk
from gradguard.analysis.live.names import Names
from gradguard.analysis.run_facts.footprint import Footprint, kinds_of
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.errors import GradGuardError
from gradguard.instrumentation.journal import Journal
from gradguard.reporting.html.layered import layered
from gradguard.runtime.guard import gradguard

_LABELS = [("net", str(i // 100), str(i // 10 % 10)) for i in range(3_000)]


@pytest.mark.parametrize("labels", [_LABELS, [("cell",)] * 3_000, [()] * 3_000, [(i,) for i in range(3_000)]])
@pytest.mark.parametrize("pins", [[2_999], [1_500, 2_999], [0, 1, 2, 2_999], list(range(0, 3_000, 7))])
@pytest.mark.parametrize("room", [12, 30])
def test_stretches_cover_all_in_order_and_leave_pins_alone(labels: list[tuple[str, ...]], pins: list[int], room: int) -> None:
    found = fold(labels, pins, room, [2_999])
    assert [i for stretch in found for i in stretch] == list(range(3_000))
    assert len(found) <= room
    alone = {stretch.start for stretch in found if len(stretch) == 1}
    assert set(pins[-(room // 3) :]) <= alone


def test_what_is_near_a_fault_is_unfolded_and_modules_are_whole() -> None:
    found = fold(_LABELS, [1_555], 30, [2_999])
    assert all(len(stretch) == 1 for stretch in found if 1_553 <= stretch.start <= 1_557)
    groups = [{_LABELS[i][:2] for i in stretch} for stretch in found if 1 < len(stretch) <= 100]
    assert all(len(group) == 1 for group in groups), "a stretch of a module's size is one module"


def test_what_fits_is_not_folded() -> None:
    assert [len(stretch) for stretch in fold([("a",)] * 9, [4, 8], 30)] == [1] * 9
    assert fold([], [], 5) == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.hidden = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.hidden(self.embed(x)) + 1)


def test_modules_are_told_by_their_parameters_and_never_guessed() -> None:
    model = Tied()
    loss = model(torch.arange(7)).sum() + 0.1 * model.hidden[0].weight.pow(2).sum()
    nodes = [node for node, _ in walk([loss.grad_fn]) if not is_accumulate(node)][::-1]
    evident, groups = ModulePaths(Names([], [model])).of(nodes, {})
    told = {op_name(node): ".".join(path) for node, path in evident.items()}
    assert told["linear"] == "Tied.hidden.0" or told["linear"] == "hidden.0"
    assert not {"matmul", "embedding"} & told.keys(), "whose weight is tied to another's"
    assert "pow" not in told, "a penalty is no part of the module"
    assert set(groups) == set(nodes)


def test_layout_has_no_overlap_and_runs_downwards() -> None:
    edges = [(5, 4), (5, 3), (4, 2), (3, 2), (2, 1), (5, 1), (1, 0), (3, 0)]
    layout = layered([(100.0, 40.0)] * 6, edges)
    for one, other in combinations(layout.boxes, 2):
        assert abs(one.x - other.x) >= 100 or abs(one.y - other.y) >= 40
    for (user, source), way in zip(edges, layout.ways, strict=True):
        assert layout.boxes[user].y < layout.boxes[source].y
        assert all(above[1] <= below[1] for above, below in pairwise(way))
    inside = [(box, point) for box in layout.boxes for way in layout.ways for point in way[1:-1] if abs(point[1] - box.y) < 20]
    assert all(abs(point[0] - box.x) > 50 for box, point in inside), "no edge runs through a box"
    assert all(box.x - 50 >= 0 and box.x + 50 <= layout.width for box in layout.boxes)


def test_lines_are_taken_over_from_the_same_graph_only() -> None:
    journal, x = Journal(), torch.ones(2, requires_grad=True)

    def graph(*kinds: str) -> list[object]:
        value = x
        for kind in kinds:
            value = getattr(value, kind)()
        return [node for node, _ in walk([value.grad_fn]) if not is_accumulate(node)]

    nodes = graph("sin", "cos", "exp")
    assert lines_of(nodes, journal, []).calls == {}
    assert lines_of(nodes, journal, [Footprint(kinds_of(graph("sin", "sin", "exp")))]).calls == {}
    assert lines_of(nodes, journal, [Footprint(kinds_of(graph("sin", "cos", "exp")))]).calls == {}, "of which no call is recorded"


def test_a_graph_of_fifty_thousand_nodes_makes_a_small_page(tmp_path) -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x * self.scale)

    def run() -> None:
        cells = nn.ModuleList(Cell() for _ in range(250))
        x = torch.ones(2)
        try:
            with gradguard(level="standard", html=tmp_path / "page.html"):
                for _ in range(100):
                    for cell in cells:
                        x = cell(x)
                kept = torch.sigmoid(x)
                loss = kept.sum()
                kept.mul_(2)
                loss.backward()
        except GradGuardError:
            pass

    run()
    text = (tmp_path / "page.html").read_text()
    (walked,) = re.findall(r"(\d+) nodes? (?:in|of) the (?:whole )?graph", text)
    assert 10_000 < int(walked) <= 20_000
    assert f"the first {walked} nodes of the graph" in text
    assert len(text) < 300_000
    assert "cells.248" in text and "sigmoid" in text


def test_a_deep_graph_in_training_that_goes_on_is_not_walked_to_its_end(tmp_path) -> None:
    model, off = nn.Linear(2, 2), nn.Linear(2, 2)
    x = model(torch.ones(2))
    for _ in range(30_000):
        x = torch.sin(x)
    incident = SimpleNamespace(error=None, journal=Journal(), call=None, names=Names([], [model, off]), moment="finding")
    graph = LiveGraph(incident, Diagnosis(code="GG000", name="x", headline="x"), [x])
    assert len(graph.nodes) <= 20_000 and not graph.whole
