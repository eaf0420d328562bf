"""Run in two processes by `test_sharded.py`: FSDP2 with activation checkpointing and autocast, FSDP2 of a model that was made on
the meta device, DTensor parameters, tensor parallel and pipeline, and failures on one rank alone.

Writes, from each rank, a JSON file with checksums of the parameters per level, what was said, and how many collectives each step made.
All gradients are looked at after each backward call, which otherwise happens as time allows.
"""

from __future__ import annotations

import json
import sys
import zlib
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from gradguard import gradguard
from gradguard.monitors import numerics

LEVELS = ("watch", "standard", "strict", "forensic")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.widen(x))) / self.scale  # saved, and freed before backward gathers it again


class Net(nn.Module):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 1)
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        chance = torch.sigmoid(self.head(x))
        if self.broken:
            chance += 1
        return chance


def collectives() -> int:
    """How many this rank has made so far."""
    assert dist.group.WORLD is not None
    return int(dist.group.WORLD._get_sequence_number_for_group())


def train_sharded(level: str | None, broken: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net(broken)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    guard = gradguard(net, optimizer, level=level) if level else None
    said: list[dict[str, Any]] = []
    made = []
    try:
        with guard or nullcontext():
            for _ in range(6):
                made.append(collectives())
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = net(torch.randn(4, 8)).pow(2).mean()
                loss.backward()
                optimizer.step()
    except RuntimeError:
        assert broken
    if guard is not None:
        said = [json.loads(diagnosis.model_dump_json()) for diagnosis in guard.diagnoses]
    parameters = [] if broken else [checksum(p.to_local()) for p in net.parameters()]  # left unsharded by a failure
    return {"parameters": parameters, "said": said, "collectives": differences(made)}


def train_meta(level: str | None) -> dict[str, Any]:
    """As PyTorch's own FSDP2 example does it: `to_empty` swaps each parameter, and so do `to` and `load_state_dict` of DTensors."""
    guard = gradguard(level=level) if level else None
    said: list[str] = []
    made = []
    with guard or nullcontext():
        with torch.device("meta"):
            net = nn.Sequential(Block(), nn.Linear(8, 1))
        fully_shard(net[0])
        fully_shard(net)
        net.to_empty(device="cpu")
        for i, parameter in enumerate(net.parameters()):
            nn.init.constant_(parameter, 0.05 * (i + 1))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        for step in range(12):
            made.append(collectives())
            optimizer.zero_grad()
            net(torch.full((4, 8), 0.1 * step)).pow(2).mean().backward()
            optimizer.step()
            if step == 5:
                optimizer.zero_grad()
                net.load_state_dict(net.state_dict())
            elif step == 8:
                optimizer.zero_grad()
                net.double().float()
        optimizer.zero_grad()
    if guard is not None:
        said = [diagnosis.code for diagnosis in guard.diagnoses]
    net.double()  # after the guard is left
    return {"parameters": [checksum(p.to_local()) for p in net.parameters()], "said": said, "collectives": differences(made)}


def train_dtensor(level: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = gradguard(level=level) if level else None
    made = []
    with guard or nullcontext():
        for _ in range(30):
            made.append(collectives())
            optimizer.zero_grad()
            x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            (x @ weight).pow(2).sum().backward()
            optimizer.step()
    said = [] if guard is None else [d.code for d in guard.diagnoses]
    return {"parameters": [checksum(weight.to_local())], "said": said, "collectives": differences(made)}


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def train_tensor_parallel(level: str | None) -> dict[str, Any]:
    """Both ranks are to see the same batches."""
    torch.manual_seed(0)
    net = nn.Sequential(Feed(), Feed())
    plan = {f"{i}.{name}": style() for i in range(2) for name, style in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    parallelize_module(net, init_device_mesh("cpu", (2,)), plan)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    guard = gradguard(level=level) if level else None
    made = []
    with guard or nullcontext():
        for _ in range(10):
            made.append(collectives())
            optimizer.zero_grad()
            (net(torch.randn(4, 8)) - 1).pow(2).mean().backward()
            optimizer.step()
    said = [] if guard is None else [d.code for d in guard.diagnoses]
    return {"parameters": [checksum(p.to_local()) for p in net.parameters()], "said": said, "collectives": differences(made)}


def train_pipelined(level: str | None) -> dict[str, Any]:
    """Two stages. At its first step a pipeline computes on memory that nothing has written to, and leaves what comes out."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    guard = gradguard(level=level) if level else None
    made = []
    with guard or nullcontext():
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        part = (nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 8))[rank]
        schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), n_microbatches=4, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.SGD(part.parameters(), lr=1e-2)
        for _ in range(10):
            made.append(collectives())
            x = torch.randn(8, 8)
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x + 1, losses=[])
            optimizer.step()
    said = [] if guard is None else [d.code for d in guard.diagnoses]
    return {"parameters": [checksum(p) for p in part.parameters()], "said": said, "collectives": differences(made)}


FAILING = ("again", "in place", "no path", "not finite", "shape", "leaf", "not a scalar")


def fail_alone(level: str, kind: str) -> dict[str, Any]:
    """A step that goes wrong on one rank, while the other takes no part in a diagnosis: the collectives of its own that each rank makes."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = gradguard(level=level, actions__silent="log")
    with guard:
        for _ in range(4):
            x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            optimizer.zero_grad()
            hidden = torch.tanh(x @ weight)
            loss = hidden.pow(2).sum()
            loss.backward()
            optimizer.step()
        made = collectives()
        hidden = torch.tanh(x * weight)  # nothing is communicated from here on
        if dist.get_rank() == 0:
            try:
                if kind == "again":
                    loss.backward()
                elif kind == "in place":
                    hidden += 1
                    hidden.backward(hidden.detach())
                elif kind == "no path":
                    hidden.detach().backward(hidden.detach())
                elif kind == "not finite":
                    (hidden * float("nan")).log().sum().backward()
                elif kind == "shape":
                    torch.cat([hidden, torch.ones(5, 5)])
                elif kind == "leaf":
                    weight += 1
                else:
                    hidden.backward()
            except RuntimeError:
                pass
        made = collectives() - made
    return {"said": [diagnosis.code for diagnosis in guard.diagnoses], "collectives": made}


def differences(counts: list[int]) -> list[int]:
    """From one to the next."""
    return [after - before for before, after in pairwise(counts)]


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().numpy().tobytes())


def main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    numerics._FULL_SHARE = numerics._FULL_SHARE_TRACED = 0
    result = {
        "sharded": {str(level): train_sharded(level) for level in (None, *LEVELS)},
        "broken": {level: train_sharded(level, broken=True) for level in ("watch", "strict")},
        "meta": {str(level): train_meta(level) for level in (None, *LEVELS)},
        "alone": {level: {kind: fail_alone(level, kind) for kind in FAILING} for level in LEVELS},
        "tensor parallel": {str(level): train_tensor_parallel(level) for level in (None, *LEVELS)},
        "pipeline": {str(level): train_pipelined(level) for level in (None, *LEVELS)},
        "dtensor": {str(level): train_dtensor(level) for level in (None, *LEVELS)},
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=2)
