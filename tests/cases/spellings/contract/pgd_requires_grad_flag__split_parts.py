import torch
from torch import nn
import torch.nn.functional as F


class ConvNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 16, classes)

    def forward(self, x):
        h = F.avg_pool2d(F.relu(self.conv(x)), 2)
        return self.fc(h.flatten(1))


class PGD:
    def __init__(self, model, eps=0.1, step=0.04, iters=4):
        self.model, self.eps, self.step, self.iters = model, eps, step, iters

    def __call__(self, image, label):
        adv = image.clone()
        for _ in range(self.iters):
            adv.requires_grad = True  # <- raises
            loss = F.cross_entropy(self.model(adv), label)
            grad, = torch.autograd.grad(loss, adv)
            adv = adv + self.step * grad.sign()  # <- culprit
            adv = image + (adv - image).clamp(-self.eps, self.eps)
            adv = adv.clamp(0, 1)  # <- culprit
        return adv.detach()


def stripes(n):
    label = torch.randint(0, 4, (n,))
    grid = torch.arange(8)
    patterns = torch.stack([
        (grid % 2).float().expand(8, 8), (grid % 2).float().unsqueeze(1).expand(8, 8),
        ((grid[:, None] + grid) % 4 < 2).float(), ((grid[:, None] - grid) % 4 < 2).float()])
    return (0.6 * patterns[label] + 0.4 * torch.rand(n, 8, 8)).unsqueeze(1), label
