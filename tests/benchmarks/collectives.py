"""What the record of collectives costs: two gloo ranks that do nothing but all-reduce sixteen numbers.

    python tests/benchmarks/collectives.py [--pairs 40] [--calls 200]

Segments with and without the record alternate in one pair of processes under one guard, so that drift of the machine hits both alike.
Printed are the median ratio of their wall times, and the median difference of the training thread's CPU time. Nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gradguard import gradguard
from gradguard.probes.collective_ring import ring


def segment(calls: int, x: torch.Tensor) -> tuple[float, float]:
    """Seconds of the wall's clock and of this thread's."""
    wall, own = time.perf_counter(), time.thread_time()
    for _ in range(calls):
        dist.all_reduce(x)
    return time.perf_counter() - wall, time.thread_time() - own


def work(rank: int, folder: str, pairs: int, calls: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    x = torch.zeros(16)
    walls, owns, bares = [], [], []
    with gradguard(level="watch"):
        assert ring.on
        segment(calls, x)
        for i in range(2 * pairs):
            order = (False, True) if i % 2 else (True, False)
            found = {}
            for ring.on in order:
                found[ring.on] = segment(calls, x)
            walls.append(found[True][0] / found[False][0])
            owns.append((found[True][1] - found[False][1]) / calls)
            bares.append(found[False][0] / calls)
    ring.on = True
    if rank == 0:
        bare = statistics.median(bares)
        print(f"| all_reduce of two ranks | bare {1e6 * bare:.0f} us | with the record x{statistics.median(walls):.3f} |")
        print(f"| | CPU time of a call | {1e6 * statistics.median(owns):+.1f} us |")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder, options.pairs, options.calls), nprocs=2)
