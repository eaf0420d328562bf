import torch
import torch.nn as nn
import torch.nn.functional as F


class OrganSegmenter(nn.Module):
    def __init__(self, n_classes=3):
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.outc = nn.Conv2d(12, n_classes, 1)

    def forward(self, x):
        return self.outc(self.mid(self.inc(x)))


class Adapter:
    """Adapts the last layer of a source model to a new scanner."""

    def __init__(self, model, lr=5e-2):
        self.model = model
        for p in self.model.parameters():
            p.requires_grad_(False)
        self.model.outc.requires_grad = True  # <- culprit
        self.optimizer = torch.optim.SGD(self.model.outc.parameters(), lr=lr, momentum=0.9)

    def step(self, scan, label):
        loss = F.cross_entropy(self.model(scan), label)
        self.optimizer.zero_grad()
        loss.backward()  # <- raises
        self.optimizer.step()
        return loss.item()


def new_scanner(n=6):
    label = torch.randint(0, 3, (n, 4, 4)).repeat_interleave(4, 1).repeat_interleave(4, 2)
    scan = label[:, None].float() - 1 + 0.2 * torch.randn(n, 1, 16, 16)
    return scan, label
