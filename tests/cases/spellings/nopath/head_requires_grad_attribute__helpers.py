# /// case
# title = "requires_grad is set as an attribute of the head module, its parameters stay frozen"
# source = "https://github.com/CSCYQJ/MICCAI23-ProtoContra-SFDA/issues/18"
# outcome = "raises"
# torch_error = "element 0 of tensors does not require grad and does not have a grad_fn"
# cause = "all-frozen"
# names = ["outc", "requires_grad"]
# fix = "model.outc.requires_grad_(True)"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def organ_segmenter_forward(owner, x):
    return owner.outc(owner.mid(owner.inc(x)))


class OrganSegmenter(nn.Module):
    def __init__(self, n_classes=3):
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.ReLU())
        self.outc = nn.Conv2d(12, n_classes, 1)

    def forward(self, x):
        return organ_segmenter_forward(self, x)


def adapter_step(owner, scan, label):
    loss = F.cross_entropy(owner.model(scan), label)
    owner.optimizer.zero_grad()
    loss.backward()  # <- raises
    owner.optimizer.step()
    return loss.item()


class Adapter:
    """Adapts the last layer of a source model to a new scanner."""

    def __init__(self, model, lr=5e-2):
        self.model = model
        for p in self.model.parameters():
            p.requires_grad_(False)
        self.model.outc.requires_grad = True  # <- culprit
        self.optimizer = torch.optim.SGD(self.model.outc.parameters(), lr=lr, momentum=0.9)

    def step(self, scan, label):
        return adapter_step(self, scan, label)


def new_scanner(n=6):
    label = torch.randint(0, 3, (n, 4, 4)).repeat_interleave(4, 1).repeat_interleave(4, 2)
    scan = label[:, None].float() - 1 + 0.2 * torch.randn(n, 1, 16, 16)
    return scan, label


adapter = Adapter(OrganSegmenter())
for it in range(60):
    value = adapter.step(*new_scanner())
    if it % 20 == 19:
        print(f"iter {it} loss {value:.4f}")
