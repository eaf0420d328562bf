# /// case
# title = "Warm restarts by making CosineAnnealingLR anew: the learning rate stays at zero from the second cycle on"
# source = "https://github.com/pytorch/pytorch/issues/78003"
# outcome = "silent"
# torch_error = ""
# cause = "unchanged-parameters"
# also = ["scheduler-order"]
# names = ["scheduler", "lr"]
# fix = "set the groups' lr back before making the new scheduler (or use CosineAnnealingWarmRestarts)"
# ///
import copy
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from cosine_restart_stuck_at_zero__split_parts import SnapshotTrainer, waves


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = waves(1000)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    trainer = SnapshotTrainer(net)
    for cycle in range(5):
        loss = trainer.run_cycle(x, y)
        print(f"cycle {cycle}: loss {loss:.4f} ensemble accuracy {trainer.ensemble_accuracy(x, y):.3f}")
