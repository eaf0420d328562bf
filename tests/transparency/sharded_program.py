"""Run in two processes by `test_sharded.py`: FSDP2 with activation checkpointing and autocast, and DTensor parameters.

Writes, from each rank, a JSON file with checksums of the parameters per level and what was said.
"""

from __future__ import annotations

import json
import sys
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from gradguard import gradguard

LEVELS = ("watch", "standard", "strict", "forensic")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(torch.tanh(self.widen(x)))


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
    try:
        with guard or nullcontext():
            for _ in range(6):
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
    return {"parameters": parameters, "said": said}


def train_dtensor(level: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = gradguard(level=level) if level else None
    with guard or nullcontext():
        for _ in range(5):
            optimizer.zero_grad()
            x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            (x @ weight).pow(2).sum().backward()
            optimizer.step()
    return {"parameters": [checksum(weight.to_local())], "said": [] if guard is None else [d.code for d in guard.diagnoses]}


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().numpy().tobytes())


def main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    result = {
        "sharded": {str(level): train_sharded(level) for level in (None, *LEVELS)},
        "broken": {level: train_sharded(level, broken=True) for level in ("watch", "strict")},
        "dtensor": {str(level): train_dtensor(level) for level in (None, *LEVELS)},
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=2)
