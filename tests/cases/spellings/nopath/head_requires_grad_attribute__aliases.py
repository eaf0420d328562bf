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


class OrganSegmenter(nn.Module):
    def __init__(self, n_classes=3):
        super().__init__()
        part = nn.Conv2d(1, 12, 3, padding=1)
        self.inc = nn.Sequential(part, nn.ReLU())
        part_ = nn.Conv2d(12, 12, 3, padding=1)
        self.mid = nn.Sequential(part_, nn.ReLU())
        self.outc = nn.Conv2d(12, n_classes, 1)

    def forward(self, x):
        inc_ = self.inc
        return self.outc(self.mid(inc_(x)))


class Adapter:
    """Adapts the last layer of a source model to a new scanner."""

    def __init__(self, model, lr=5e-2):
        self.model = model
        for p in self.model.parameters():
            requires_grad__ = p.requires_grad_
            requires_grad__(False)
        self.model.outc.requires_grad = True  # <- culprit
        part__2 = self.model.outc.parameters()
        self.optimizer = torch.optim.SGD(part__2, lr=lr, momentum=0.9)

    def step(self, scan, label):
        model_ = self.model
        loss = F.cross_entropy(model_(scan), label)
        clear = self.optimizer.zero_grad
        clear()
        differentiate = loss.backward  # <- raises
        differentiate()  # <- raises
        go = self.optimizer.step
        go()
        item_ = loss.item
        return item_()


def new_scanner(n=6):
    part__3 = torch.randint(0, 3, (n, 4, 4)).repeat_interleave(4, 1)
    label = part__3.repeat_interleave(4, 2)
    part__4 = label[:, None].float() - 1
    scan = part__4 + 0.2 * torch.randn(n, 1, 16, 16)
    return scan, label


part__5 = OrganSegmenter()
adapter = Adapter(part__5)
for it in range(60):
    go_ = adapter.step
    value = go_(*new_scanner())
    if it % 20 == 19:
        print(f"iter {it} loss {value:.4f}")
