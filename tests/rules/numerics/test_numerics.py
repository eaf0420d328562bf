"""The numerics rules on real programs: what is said, where it points and in which words; silence on sound ones."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics_programs_broken import BROKEN, HEAD
from numerics_programs_sound import SOUND

from gradguard import gradguard
from gradguard.core.errors import GradGuardError
from gradguard.instrumentation.journal import current_journal
from gradguard.torch_compat.private_api import storage_key


@pytest.fixture(autouse=True)
def _few_modules() -> Iterator[None]:
    gc.collect()  # names are looked up in every module alive: those of the program before must be gone
    yield


def run(program: str, path: Path, level: str = "standard", **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The diagnoses of warning or above, as the report has them, and the program's variables at its end."""
    report = path.with_suffix(".jsonl")
    path.write_text(program)
    variables: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with gradguard(level=level, report=report, **settings):
                exec(compile(program, str(path), "exec"), variables)
    except (GradGuardError, RuntimeError, ValueError):
        pass
    said = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    return [diagnosis for diagnosis in said if diagnosis["severity"] != "info"], variables


def check(said: list[dict[str, Any]], rule: str, program: str) -> dict[str, Any]:
    assert said, "nothing was said"
    first = said[0]
    marked = {number for number, text in enumerate(program.splitlines(), 1) if "# CULPRIT" in text}
    assert first["name"] == rule, first["headline"]
    assert first["culprit"] is not None and first["culprit"]["line"] in marked, first["headline"]
    return first


@pytest.mark.parametrize("slug", sorted(BROKEN))
def test_names_the_line(slug: str, tmp_path: Path) -> None:
    rule, body = BROKEN[slug]
    program = HEAD + body
    said, _ = run(program, tmp_path / f"{slug}.py")
    check(said, rule, program)
    assert len({(diagnosis["code"], (diagnosis["culprit"] or {}).get("line")) for diagnosis in said}) == 1, "one cause, one diagnosis"


@pytest.mark.parametrize("slug", ["acos", "masked_div", "advantage", "lr_big", "dead_relu"])
def test_names_the_line_at_strict(slug: str, tmp_path: Path) -> None:
    rule, body = BROKEN[slug]
    program = HEAD + body
    said, _ = run(program, tmp_path / f"{slug}.py", "strict")
    check(said, rule, program)


@pytest.mark.parametrize("slug", ["data_std", "gcn_degree", "advantage"])
def test_forensic_sees_what_has_no_gradient(slug: str, tmp_path: Path) -> None:
    rule, body = BROKEN[slug]
    program = HEAD + body
    said, _ = run(program, tmp_path / f"{slug}.py", "forensic")
    first = check(said, rule, program)
    assert "non-finite values here, of finite ones" in first["culprit"]["label"]


@pytest.mark.parametrize("level", ["standard", pytest.param("strict", marks=pytest.mark.slow), "forensic"])
@pytest.mark.parametrize("slug", sorted(SOUND))
def test_sound_programs_hear_nothing(slug: str, level: str, tmp_path: Path) -> None:
    said, _ = run(HEAD + SOUND[slug], tmp_path / f"{slug}.py", level)
    assert not said, said[0]["headline"]


WORDS = {
    "masked_div": ["divides 0.0 by 0.0", "masked_mse"],
    "std_one": ["std of one element"],
    "empty_mean": ["averages an empty selection"],
    "ignore_all": ["ignore_index", "-100"],
    "ctc": ["zero_infinity=True"],
    "neg_pow": ["negative number", "fractional power"],
    "tanh_logprob": ["log of 0.0 in", "clamp"],
    "acos": ["acos has an infinite slope", "torch.atan2"],
    "where_div": ["torch.where", "branch that is not taken"],
    "adam_eps0": ["`eps`", "net.emb.weight"],
    "lr_big": ["lr=3", "diverges"],
    "dead_relu": ["dead", "fc1.weight", "net"],
    "categorical": ["0.0 by 0.0", "probs"],
}


@pytest.mark.parametrize("slug", sorted(WORDS))
def test_words(slug: str, tmp_path: Path) -> None:
    said, _ = run(HEAD + BROKEN[slug][1], tmp_path / f"{slug}.py")
    for piece in WORDS[slug]:
        assert piece in said[0]["message"], said[0]["message"]


def test_weights_are_kept_where_the_policy_raises(tmp_path: Path) -> None:
    program = (
        HEAD
        + """
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    out = net(torch.zeros(4, 3)) * 0
    loss = out.sqrt().sum()
    opt.zero_grad(); loss.backward(); opt.step()
"""
    )
    said, variables = run(program, tmp_path / "kept.py", "strict")
    assert said[0]["name"] == "nonfinite-backward"
    assert all(bool(torch.isfinite(p).all()) for p in variables["net"].parameters())


def test_an_exception_from_poisoned_weights_repeats_what_poisoned_them(tmp_path: Path) -> None:
    program = (
        HEAD
        + """
w = nn.Parameter(torch.eye(4))
opt = torch.optim.SGD([w], 0.1)
for step in range(3):
    u, s, v = torch.linalg.svd(w)  # CULPRIT
    loss = (u[:, :2] @ v[:2]).pow(2)[0].sum()
    opt.zero_grad(); loss.backward(); opt.step()
"""
    )
    said, _ = run(program, tmp_path / "svd.py")
    assert [diagnosis["severity"] for diagnosis in said] == ["warning", "error"]
    for diagnosis in said:
        check([diagnosis], "nonfinite-backward", program)
    assert "eye_" in said[0]["message"]


def test_told_again_after_recovery(tmp_path: Path) -> None:
    program = (
        HEAD
        + """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 0.01)
for step in range(12):
    x = torch.randn(4, 3)
    y = net(x)
    loss = y.pow(2).mean()
    if step == 3:
        loss = loss + (y * 0).log().sum()
    if step == 8:
        loss = loss + (y * 0 - 1).sqrt().sum()
    opt.zero_grad()
    loss.backward()
    if torch.isfinite(loss): opt.step()
"""
    )
    said, _ = run(program, tmp_path / "again.py")
    assert [(diagnosis["code"], diagnosis["culprit"]["line"]) for diagnosis in said] == [("GG501", 13), ("GG501", 15)]


def test_watch_finds_the_cause_without_any_trace(tmp_path: Path) -> None:
    program = HEAD + BROKEN["bce_log"][1]
    said, _ = run(program, tmp_path / "watch.py", "watch")
    assert said[0]["name"] == "nonfinite-forward"
    assert "of 0.0" in said[0]["headline"]


def test_nothing_of_the_graph_is_kept(tmp_path: Path) -> None:
    program = (
        HEAD
        + """
import gc, weakref
net = nn.Linear(3, 2)
opt = torch.optim.SGD(net.parameters(), 0.1)
gc.disable()
alive = []
for step in range(6):
    hidden = net(torch.randn(4, 3)).exp()
    loss = (hidden + 1).log().sqrt().sum()
    ref = weakref.ref(hidden)
    opt.zero_grad(); loss.backward()
    del hidden, loss
    alive.append(ref() is not None)
    opt.step()
gc.enable()
"""
    )
    said, variables = run(program, tmp_path / "kept.py")
    assert not said and not any(variables["alive"])


def test_a_rule_that_is_off_says_nothing(tmp_path: Path) -> None:
    said, _ = run(HEAD + BROKEN["masked_div"][1], tmp_path / "off.py", rules={"GG5": "off"})
    assert not said


def test_forensic_sees_a_backward_of_the_users_break() -> None:
    """A custom Function saves nothing that a rule could read: only the hook on its node tells."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1e-30

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * 1e38 * 1e38

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GradGuardError) as caught, gradguard(level="forensic"):
        y = Scale.apply(model(torch.ones(2, 3)))  # type: ignore[no-untyped-call]  # here
        y.sum().backward()
        optimizer.step()
    found = caught.value.diagnosis
    assert found.code == "GG502"
    assert found.culprit is not None
    assert found.culprit.text.startswith("Scale.apply(")
    assert "ScaleBackward" in found.explanation


def test_hooks_on_nodes_do_not_stay() -> None:
    w = torch.ones(3, requires_grad=True)
    loss = (w * 2).sum()
    with gradguard(level="forensic"):
        loss.backward(retain_graph=True)
        first = w.grad.clone()  # type: ignore[union-attr]
        w.grad = None
    loss.backward()
    assert torch.equal(first, w.grad)  # type: ignore[arg-type]


def test_a_hook_on_a_node_does_not_hide_what_forward_had_spoilt() -> None:
    """The normalisation's backward is the first to turn finite gradients into NaN; what it was given was NaN already."""
    torch.manual_seed(0)
    scorer, norm, out = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*scorer.parameters(), *norm.parameters(), *out.parameters()], lr=0.1)
    x, empty = torch.randn(3, 4), torch.tensor([False, True, False])[:, None]
    with pytest.raises(GradGuardError) as caught, gradguard(level="forensic"):
        scores = scorer(x).masked_fill(empty, float("-inf"))
        shares = torch.softmax(scores, dim=-1)  # here
        loss = out(norm(shares)).masked_fill(empty, 0.0).mean()
        loss.backward()
        optimizer.step()
    found = caught.value.diagnosis
    assert found.code == "GG501"
    assert found.culprit is not None
    assert found.culprit.text == "torch.softmax(scores, dim=-1)"


def test_memory_that_is_another_tensors_by_now_tells_nothing() -> None:
    journal = current_journal()
    with gradguard(level="forensic"):
        bad = torch.full((256,), 2.0).acos()
    fact = journal.nonfinite_of(bad)
    assert fact is not None and fact.func == "acos"
    same = bad[:8]  # on the same memory
    del bad
    assert journal.nonfinite_of(same) is fact
    del same
    other = torch.full((256,), float("nan"))
    journal.nonfinite[storage_key(other) or 0] = fact  # where the allocator may have put it
    assert journal.nonfinite_of(other) is None
