"""Train one model in two processes, whose gradients DistributedDataParallel averages (gloo, so that it runs on any machine).

    torchrun --nproc-per-node 2 -m gradguard run examples/two_ranks.py

`--break`: the forward pass calls `model.module`, past DistributedDataParallel, which then averages nothing: each process trains a model
of its own. Nothing is raised.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--break", dest="broken", action="store_true", help="run the program with its bug")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)  # each rank has data of its own

    for step in range(1, options.steps + 1):
        points = torch.randn(32, 4)
        target = points.sum(dim=1, keepdim=True)
        prediction = model.module(points) if options.broken else model(points)
        loss = nn.functional.mse_loss(prediction, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
