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


def snapshot_trainer_new_cycle(owner):
    owner.scheduler = CosineAnnealingLR(owner.optimizer, T_max=owner.cycle_steps)  # <- culprit


def finish_batch(loss, owner):
    loss.backward()
    owner.optimizer.step()  # <- related
    owner.scheduler.step()


def begin_batch(x, owner, y):
    i = torch.randint(0, len(x), (64,))
    loss = nn.functional.cross_entropy(owner.model(x[i]), y[i])
    owner.optimizer.zero_grad()
    return loss


def snapshot_trainer_run_cycle(owner, x, y):
    owner.new_cycle()
    for _ in range(owner.cycle_steps):
        loss = begin_batch(x, owner, y)
        finish_batch(loss, owner)
    owner.snapshots.append(copy.deepcopy(owner.model).eval())
    return loss.item()


def snapshot_trainer_ensemble_accuracy(owner, x, y):
    with torch.no_grad():
        probs = sum(m(x).softmax(1) for m in owner.snapshots)
    return (probs.argmax(1) == y).float().mean().item()


class SnapshotTrainer:
    """Snapshot ensembles: one model is kept at the end of every cosine cycle."""

    def __init__(self, model, lr=0.1, cycle_steps=40):
        self.model, self.lr, self.cycle_steps = model, lr, cycle_steps
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.snapshots = []

    def new_cycle(self):
        return snapshot_trainer_new_cycle(self)

    def run_cycle(self, x, y):
        return snapshot_trainer_run_cycle(self, x, y)

    def ensemble_accuracy(self, x, y):
        return snapshot_trainer_ensemble_accuracy(self, x, y)


def waves(n):
    x = torch.rand(n, 2) * 4 - 2
    return x, (x[:, 1] > torch.sin(3 * x[:, 0])).long()


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = waves(1000)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    trainer = SnapshotTrainer(net)
    for cycle in range(5):
        loss = trainer.run_cycle(x, y)
        print(f"cycle {cycle}: loss {loss:.4f} ensemble accuracy {trainer.ensemble_accuracy(x, y):.3f}")
