"""Several names keep old graphs: each is told by what it does, and one fix lets all of them go. And words about optimizers and losses."""

from __future__ import annotations

from pathlib import Path

from tests.running import HEAD, applied, run_source

HISTORY = """
class Log:
    def __init__(self):
        self.kept, self.mean, self.last = [], None, None
    def put(self, loss):
        self.kept.append(loss)
        if self.mean is None:
            self.mean = loss
        else:
            self.mean = 0.9 * self.mean + 0.1 * loss
        self.last = self.mean

def main():
    log, net = Log(), nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(90):
        loss = net(torch.randn(8, 4)).tanh().pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.put(loss)

main()
"""

SCHEDULE = """
net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
opt = torch.optim.SGD(net[1].parameters(), lr=0.01)
plan = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.99**step)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(12):
    loss = net(torch.randn(8, 4)).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    plan.step()
"""

TABLE = """
net = nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(3):
    x, y = torch.randn(8, 4), torch.randn(8)
    gap = y - net(x)
    loss = LOSS
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def test_each_keeper_by_what_it_does(tmp_path: Path) -> None:
    source = HEAD + HISTORY
    found, text = run_source(tmp_path, source)[0]
    labels = {span.line: span.label or "" for span in [found.culprit, *found.related] if span is not None}
    by_text = {source.splitlines()[line - 1].strip().partition(" = ")[0]: label for line, label in labels.items()}
    assert found.code == "GG608"
    assert "own last value" in by_text["self.mean"] and "own last value" not in by_text["self.last"], text
    assert "keeps tensors of every step" in by_text["self.kept.append(loss)"], text
    better = applied(source, found.fixes[0].patch or "")
    assert "loss = loss.detach()" in better
    assert not run_source(tmp_path, better)


def test_a_scheduler_is_made_anew_after_the_new_optimizer(tmp_path: Path) -> None:
    source = HEAD + SCHEDULE
    found, text = next(each for each in run_source(tmp_path, source) if each[0].code == "GG612")
    assert "with these parameters and more" in found.explanation, text
    better = applied(source, found.fixes[0].patch or "")
    assert better.count("plan = ") == 2
    assert not [each for each, _ in run_source(tmp_path, better) if each.code == "GG612"]


def test_only_squares_lead_to_the_mean(tmp_path: Path) -> None:
    for loss, squared in (("gap.pow(2).mean()", True), ("(gap * gap).mean()", True), ("torch.maximum(0.8 * gap, -0.2 * gap).mean()", False),
                          ("gap.abs().mean()", False), ("torch.where(gap.abs() < 1, gap**2, gap.abs()).mean()", False)):  # fmt: skip
        found, text = run_source(tmp_path, HEAD + TABLE.replace("LOSS", loss))[0]
        assert found.code == "GG505" and ("mean of all targets" in found.explanation) is squared, text
