"""GG609: a spectral norm whose power iteration never ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import said

SOURCE = """
from torch.nn.utils import spectral_norm
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = spectral_norm(nn.Linear(6, 16))
        self.head = nn.Linear(16, 1)
    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

critic = Critic()
opt = torch.optim.SGD(critic.parameters(), lr=1e-3)
{before}
for it in range({steps}):
    opt.zero_grad()
    critic(torch.randn(8, 6)).pow(2).mean().backward()
    opt.step()
"""


@pytest.mark.parametrize(
    ("before", "culprit"),
    [
        ("critic.eval()", "critic.eval()"),
        ("def freeze(net):\n    return net.train(False)\nfreeze(critic)", "net.train(False)"),
        ("for part in critic.modules():\n    part.training = False", None),
    ],
    ids=["eval", "helper", "flag"],
)
@pytest.mark.parametrize("level", ["watch", "standard"])
def test_trained_in_eval_mode(before: str, culprit: str | None, level: str, tmp_path: Path) -> None:
    (diagnosis,) = said(tmp_path, SOURCE.format(before=before, steps=40), level)
    assert diagnosis.code == "GG609" and "`critic.body` does not normalise" in diagnosis.headline
    assert (diagnosis.culprit and diagnosis.culprit.text) == culprit
    assert [fact.name for fact in diagnosis.tensors] == ["critic.body.weight_orig"]
    assert diagnosis.fixes[0].title == "Call `critic.train()` before training"


@pytest.mark.parametrize(
    "before",
    [
        "",
        "critic(torch.randn(2, 6))\ncritic.eval()",  # one forward in train mode is enough
        "critic.eval()\nwith torch.no_grad():\n    critic(torch.randn(2, 6))\ncritic.train()",  # a check before training
        "other = Critic()\nfor _ in range(20):\n    other(torch.randn(2, 6))\ncritic.load_state_dict(other.state_dict())\ncritic.eval()",
    ],
    ids=["train", "one forward", "validated first", "loaded"],
)
def test_an_estimate_that_was_made_is_right(before: str, tmp_path: Path) -> None:
    assert said(tmp_path, SOURCE.format(before=before, steps=40)) == []


def test_the_new_one_iterates_by_itself(tmp_path: Path) -> None:
    source = SOURCE.format(before="critic.eval()", steps=40)
    assert said(tmp_path, source.replace("torch.nn.utils import", "torch.nn.utils.parametrizations import")) == []
