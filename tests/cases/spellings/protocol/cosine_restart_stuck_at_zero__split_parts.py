import copy
import torch
import torch.nn as nn
from torch.optim.lr_scheduler import CosineAnnealingLR


class SnapshotTrainer:
    """Snapshot ensembles: one model is kept at the end of every cosine cycle."""

    def __init__(self, model, lr=0.1, cycle_steps=40):
        self.model, self.lr, self.cycle_steps = model, lr, cycle_steps
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.snapshots = []

    def new_cycle(self):
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=self.cycle_steps)  # <- culprit

    def run_cycle(self, x, y):
        self.new_cycle()
        for _ in range(self.cycle_steps):
            i = torch.randint(0, len(x), (64,))
            loss = nn.functional.cross_entropy(self.model(x[i]), y[i])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()  # <- related
            self.scheduler.step()
        self.snapshots.append(copy.deepcopy(self.model).eval())
        return loss.item()

    def ensemble_accuracy(self, x, y):
        with torch.no_grad():
            probs = sum(m(x).softmax(1) for m in self.snapshots)
        return (probs.argmax(1) == y).float().mean().item()


def waves(n):
    x = torch.rand(n, 2) * 4 - 2
    return x, (x[:, 1] > torch.sin(3 * x[:, 0])).long()
