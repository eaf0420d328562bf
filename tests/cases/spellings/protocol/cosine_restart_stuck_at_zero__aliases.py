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


class SnapshotTrainer:
    """Snapshot ensembles: one model is kept at the end of every cosine cycle."""

    def __init__(self, model, lr=0.1, cycle_steps=40):
        self.model, self.lr, self.cycle_steps = model, lr, cycle_steps
        part = model.parameters()
        self.optimizer = torch.optim.SGD(part, lr=lr, momentum=0.9)
        self.snapshots = []

    def new_cycle(self):
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=self.cycle_steps)  # <- culprit

    def run_cycle(self, x, y):
        new_cycle_ = self.new_cycle
        new_cycle_()
        for _ in range(self.cycle_steps):
            i = torch.randint(0, len(x), (64,))
            part_ = self.model(x[i])
            loss = nn.functional.cross_entropy(part_, y[i])
            clear = self.optimizer.zero_grad
            clear()
            differentiate = loss.backward
            differentiate()
            go = self.optimizer.step  # <- related
            go()  # <- related
            go_ = self.scheduler.step
            go_()
        append_ = self.snapshots.append
        append_(copy.deepcopy(self.model).eval())
        item_ = loss.item
        return item_()

    def ensemble_accuracy(self, x, y):
        with torch.no_grad():
            probs = sum(m(x).softmax(1) for m in self.snapshots)
        part__2 = (probs.argmax(1) == y).float().mean()
        return part__2.item()


def waves(n):
    return (x := torch.rand(n, 2) * 4 - 2), (x[:, 1] > torch.sin(3 * x[:, 0])).long()


if __name__ == "__main__":
    torch.manual_seed(0)
    x, y = waves(1000)
    part__3 = nn.Linear(2, 64)
    net = nn.Sequential(part__3, nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    trainer = SnapshotTrainer(net)
    for cycle in range(5):
        run_cycle_ = trainer.run_cycle
        loss = run_cycle_(x, y)
        print(f"cycle {cycle}: loss {loss:.4f} ensemble accuracy {trainer.ensemble_accuracy(x, y):.3f}")
