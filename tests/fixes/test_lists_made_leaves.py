"""A loss is computed from a new leaf, which a list of tensors with graphs was copied into."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, said

PROGRAM = """
policy = nn.Linear(3, 2)
opt = torch.optim.Adam(policy.parameters(), 1e-2)
def play(n=4):
    logps = []
    for _ in range(n):
        dist = torch.distributions.Categorical(logits=policy(torch.randn(3)))
        logps.append(dist.log_prob(dist.sample()))
    return logps, torch.randn(n)
def loss_of(logps, returns):
    {copy}
    return -(out * returns).sum()
for _ in range(12):
    loss = loss_of(*play())
    opt.zero_grad()
    loss.backward()
    opt.step()
"""
COPIES = {
    "out = torch.tensor(logps, requires_grad=True)": "torch.tensor(logps, requires_grad=True)",
    "out = torch.as_tensor(logps).requires_grad_()": "torch.as_tensor(logps)",
    "out = torch.tensor(logps, dtype=torch.float32)\n    out.requires_grad = True": "torch.tensor(logps, dtype=torch.float32)",
    "out = torch.FloatTensor(logps).requires_grad_()": "torch.FloatTensor(logps)",
    "import numpy\n    out = torch.from_numpy(numpy.array([float(p) for p in logps])).requires_grad_()": None,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("copy", COPIES)
def test_the_line_that_copies_is_blamed(tmp_path: Path, copy: str) -> None:
    source = PROGRAM.replace("{copy}", copy)
    found = said(tmp_path, source)
    assert [each.code for each in found] == ["GG606"]
    place = found[0].culprit
    assert place is not None and place.function == "loss_of" and (COPIES[copy] is None or place.text == COPIES[copy])
    if "tensor(logps" in copy:
        patch = found[0].fixes[0].patch
        if "out.requires_grad" in copy:  # PyTorch would refuse that line for what has a graph
            assert patch is None and "torch.stack" in found[0].fixes[0].title
            return
        assert patch is not None and "torch.stack(logps)" in patch
        assert not said(tmp_path, applied(source, patch))


@pytest.mark.filterwarnings("ignore")
def test_a_list_of_lists_is_not_stacked(tmp_path: Path) -> None:
    copy = "out = torch.tensor([logps[:2], logps[2:]], requires_grad=True).flatten()"
    found = said(tmp_path, PROGRAM.replace("{copy}", copy))
    assert [each.code for each in found] == ["GG606"] and found[0].fixes[0].patch is None


@pytest.mark.parametrize(
    "copy",
    [
        "out = torch.stack(logps)",
        "out = torch.stack(logps)\n    returns = torch.tensor([p.item() for p in logps])",
    ],
)
def test_stacked_lists_are_sound(tmp_path: Path, copy: str) -> None:
    assert not said(tmp_path, PROGRAM.replace("{copy}", copy))


def test_an_input_that_is_optimised_in_place_is_no_new_leaf(tmp_path: Path) -> None:
    source = """
net = nn.Linear(3, 1)
opt = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(12):
    x = torch.randn(4, 3)
    noise = torch.zeros(4, 3, requires_grad=True)
    (net(x + noise).pow(2).mean()).backward()
    noise.pow(2).sum().backward()
    opt.step()
    opt.zero_grad()
"""
    assert not said(tmp_path, source)
