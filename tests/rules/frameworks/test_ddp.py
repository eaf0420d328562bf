"""DistributedDataParallel over gloo: in one process where that is enough to fail, in two where ranks must differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gradguard import GradGuardError, gradguard
from gradguard.core.diagnosis import Diagnosis

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.spare = nn.Parameter(torch.ones(4))
        self.spare.requires_grad_(False)
        self.on = False
        self.depth = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        for i, layer in enumerate(self.layers):
            if i >= self.depth:
                continue
            x = layer(x)
        if self.on:
            x = self.extra(x)
        return x


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.block = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


def diagnosis(run: Callable[[], None]) -> Diagnosis:
    with pytest.raises(GradGuardError) as caught, gradguard(level="standard"):
        run()
    return caught.value.diagnosis


def test_unused_submodule_is_named_with_its_condition() -> None:
    def run() -> None:
        ddp = DistributedDataParallel(Net())
        for _ in range(2):
            ddp(torch.randn(2, 4)).sum().backward()

    found = diagnosis(run)
    assert (found.code, found.rank) == ("GG701", 0)
    assert found.culprit is not None and found.culprit.text == "self.extra(x)"
    assert "`extra`" in found.headline and "self.on" in found.headline
    assert [fact.name for fact in found.tensors] == ["extra.weight", "extra.bias"]
    assert any(span.text == "DistributedDataParallel(Net())" for span in found.related)


def test_unused_layer_of_a_list() -> None:
    def run() -> None:
        net = Net()
        net.depth, net.on = 2, True
        ddp = DistributedDataParallel(net)
        for _ in range(2):
            ddp(torch.randn(2, 4)).sum().backward()

    found = diagnosis(run)
    assert found.code == "GG701" and "layers.2" in found.headline
    assert found.culprit is not None and found.culprit.text == "layer(x)"


def test_frozen_after_wrapping() -> None:
    def run() -> None:
        net = Net()
        net.on = True
        ddp = DistributedDataParallel(net)
        net.body.requires_grad_(False)
        for _ in range(2):
            ddp(torch.randn(2, 4)).sum().backward()

    found = diagnosis(run)
    assert found.code == "GG701" and "frozen after" in found.headline
    assert found.culprit is not None and found.culprit.text == "net.body.requires_grad_(False)"


def test_static_graph_that_changes() -> None:
    def run() -> None:
        net = Net()
        ddp = DistributedDataParallel(net, static_graph=True)
        for step in range(4):
            net.on = step > 1
            ddp(torch.randn(2, 4)).sum().backward()

    found = diagnosis(run)
    assert found.code == "GG704" and "`extra`" in found.headline
    assert found.culprit is not None and found.culprit.text == "self.extra(x)"
    assert [span.text for span in found.related] == ["net.on = step > 1", "DistributedDataParallel(net, static_graph=True)"]


def test_reentrant_checkpoints_of_one_block() -> None:
    def run() -> None:
        ddp = DistributedDataParallel(Twice())
        for _ in range(2):
            ddp(torch.randn(2, 4)).sum().backward()

    found = diagnosis(run)
    assert found.code == "GG702" and "block" in found.headline
    assert found.culprit is not None and found.culprit.text == "checkpoint(self.block, x, use_reentrant=True)"


def test_reentrant_checkpoint_in_a_helper_that_is_given_the_block() -> None:
    class Helped(Twice):
        def run(self, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(part, x, use_reentrant=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for _ in range(2):
                x = self.run(self.block, x)
            return x

    def run() -> None:
        ddp = DistributedDataParallel(Helped())
        for _ in range(2):
            ddp(torch.randn(2, 4)).sum().backward()

    found = diagnosis(run)
    assert found.code == "GG702" and "reentrant" in found.headline
    assert "use_reentrant=False" in found.fixes[0].title


def test_parameter_used_outside_of_forward() -> None:
    def run() -> None:
        net = Net()
        ddp = DistributedDataParallel(net, find_unused_parameters=True)
        for _ in range(2):
            loss = ddp(torch.randn(2, 4)).sum() + net.extra.weight.norm()
            loss.backward()

    found = diagnosis(run)
    assert found.code == "GG702"
    assert found.culprit is not None and found.culprit.text == "net.extra.weight"


class Told:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Teller(nn.Module):
    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.body, self.plain = nn.Linear(4, 4), plain

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.body(x)
        if self.plain:
            return Told(logits)
        return {"logits": logits}


def test_output_in_which_no_tensor_is_found() -> None:
    def run() -> None:
        ddp = DistributedDataParallel(Teller(plain=True), find_unused_parameters=True)
        for _ in range(2):
            out = ddp(torch.randn(2, 4))
            out.logits.sum().backward()

    found = diagnosis(run)
    assert found.code == "GG702" and "`Told`" in found.headline
    assert found.culprit is not None and found.culprit.text == "return Told(logits)"
    ddp = DistributedDataParallel(Teller(plain=False), find_unused_parameters=True)
    with gradguard() as guard:
        ddp(torch.randn(2, 4))["logits"].sum().backward()
    assert not guard.diagnoses


@pytest.mark.skipif(not hasattr(fsdp, "fully_shard"), reason="newer than this torch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("late", [False, True])
def test_optimizer_made_before_the_model_is_sharded(late: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with gradguard() as guard:
        opt = None if late else torch.optim.SGD(model.parameters(), lr=0.01)
        fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        opt = opt or torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(14):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            opt.step()
            opt.zero_grad()
    assert [each.code for each in guard.diagnoses] == ([] if late else ["GG604"])
    if not late:
        culprit = guard.diagnoses[0].culprit
        assert "`fully_shard`" in guard.diagnoses[0].headline and culprit is not None and "SGD(" in culprit.text


def test_sound_training_is_silent(recwarn: pytest.WarningsRecorder) -> None:
    net = Net()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with gradguard(level="standard") as guard:
        for step in range(6):
            net.on = step % 2 == 0
            ddp(torch.randn(2, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not guard.diagnoses


def test_no_hook_on_modules_outlasts_the_guard() -> None:
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with gradguard() as guard:
        for step in range(30):
            ddp(torch.randn(2, 4)).pow(2).mean().backward()
            assert hooks or step > 6
            assert not hooks or step < 26
            optimizer.step()
            optimizer.zero_grad()
    with gradguard():
        other = DistributedDataParallel(nn.Linear(4, 4))
        other(torch.randn(2, 4)).sum().backward()
    assert not hooks and not guard.diagnoses


PROGRAM = """
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Scorer(nn.Linear):
    def sharpened(self, x):
        return 2 * self(x)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x)


def squares(net, x):
    return net(x).pow(2).mean()


@torch.no_grad()
def guess(net, x):
    return net(x)


def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{{folder}}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = Scorer(4, 1)
    ddp = DDP(net)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    for step in range(8):
        x = torch.randn(4, 4)
{body}
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(os.path.dirname(os.path.abspath(__file__)),), nprocs=2)
"""

BODIES = {
    "no_sync": ("GG703", "ddp.no_sync()", "with ddp.no_sync():\n    ddp(x).pow(2).mean().backward()"),
    "one_rank": (
        "GG706",
        "nn.utils.clip_grad_norm_(net.parameters(), 0.01)",
        "ddp(x).pow(2).mean().backward()\nif rank == 0:\n    nn.utils.clip_grad_norm_(net.parameters(), 0.01)",
    ),
    "inside": (
        "GG703",
        "ddp.module.sharpened(x)",
        "ddp.module.sharpened(x).pow(2).mean().backward()\nseen = [torch.zeros_like(net.weight) for _ in range(2)]\n"
        "dist.all_gather(seen, net.weight.detach())",
    ),
    "handed_on": (
        "GG703",
        "squares(bare, x)",
        "bare = ddp.module if isinstance(ddp, DDP) else ddp\nguess(bare, x)\nsquares(bare, x).backward()",
    ),
    "beside": ("GG703", "net(x)", "ddp(x).pow(2).mean().backward()\nnet(x).abs().mean().backward()"),
    "submodule_beside": (
        "GG703",
        "net.inner(x)",
        "if step == 0:\n    net = Whole()\n    ddp = DDP(net)\n    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)\n"
        "ddp(x).pow(2).mean().backward()\nnet.inner(x).abs().mean().backward()",
    ),
    "cast_and_back": (
        "GG706",
        "ddp.double()",
        "if step == 0:\n    ddp.double()\n    ddp.float()\nddp(x).pow(2).mean().backward()",
    ),
    "cast_within": (
        "GG706",
        "ddp.module.half()",
        "if step == 0:\n    ddp.module.half().float()\nddp(x).pow(2).mean().backward()",
    ),
    "cast_by_a_function": (
        "GG706",
        "m.to(torch.float64)",
        "def wider(m):\n    m.to(torch.float64)\n    return m\nif step == 0:\n    wider(net).to(torch.float32)\n"
        "ddp(x).pow(2).mean().backward()",
    ),
    "cast_to_what_it_is": (None, None, "if step == 0:\n    ddp.float()\n    net.to('cpu')\nddp(x).pow(2).mean().backward()"),
    "cast_and_wrapped_again": (
        None,
        None,
        "if step == 0:\n    ddp.double()\n    ddp.float()\n    ddp = DDP(net)\nddp(x).pow(2).mean().backward()",
    ),
    "one_backward": (None, None, "(ddp(x).pow(2).mean() + net(x).abs().mean()).backward()"),
    "looked_at": (None, None, "net(x).abs().mean().item()\nddp(x).pow(2).mean().backward()\nnet(x).sum().item()"),
    "averaged_last": (None, None, "with ddp.no_sync():\n    ddp(x).pow(2).mean().backward()\nddp(x).pow(2).mean().backward()"),
    "handed_on_without_grad": (None, None, "bare = ddp.module\nguess(bare, x)\nsquares(ddp, x).backward()"),
    "thawed": (
        "GG706",
        "switch(net.bias, True)",
        "if step == 0:\n    def switch(p, flag):\n        p.requires_grad = flag\n    switch(net.bias, False)\n"
        "    ddp = DDP(net)\n    switch(net.bias, True)\nddp(x).pow(2).mean().backward()",
    ),
    "skips": ("GG705", "continue", "loss = ddp(x).pow(2).mean()\nif x.sum() < 0:\n    continue\nloss.backward()"),
    "by_hand": (
        None,
        None,
        "with ddp.no_sync():\n    ddp(x).pow(2).mean().backward()\nfor p in net.parameters():\n    dist.all_reduce(p.grad)",
    ),
}


# each starts three processes, some ten seconds in all: further spellings of what the others show
_SLOW = {"handed_on", "submodule_beside", "cast_within", "cast_by_a_function", "cast_to_what_it_is", "one_backward", "looked_at"}
_SLOW |= {"averaged_last", "handed_on_without_grad"}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) if kind in _SLOW else kind for kind in BODIES])
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    code, text, body = BODIES[kind]
    lines = "\n".join("        " + line for line in body.splitlines())
    program, report = tmp_path / "train.py", tmp_path / "report.jsonl"
    program.write_text(dedent(PROGRAM).format(body=lines))
    command = [sys.executable, "-m", "gradguard", "run", "--report", str(report), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"})
    said = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    if code is None:
        assert done.returncode == 0 and not said, done.stderr
        return
    assert [each["code"] for each in said] == [code], done.stderr
    assert said[0]["culprit"]["text"] == text
    assert said[0]["rank"] in (0, 1)
    if kind in ("beside", "submodule_beside", "cast_and_back", "cast_within", "cast_by_a_function", "handed_on", "inside"):
        assert said[0]["step"] <= 2 or kind == "inside", said[0]["step"]
    if code == "GG705":
        assert done.returncode and "ddp-rank-skips-backward" in done.stderr and "ProcessRaisedException" in done.stderr
    else:
        assert done.returncode == 0
