# /// case
# title = "Adversarial example keeps its history, so requires_grad cannot be set in the next iteration"
# source = "https://github.com/Harry24k/adversarial-attacks-pytorch/issues/2"
# outcome = "raises"
# torch_error = "you can only change requires_grad flags of leaf variables"
# cause = "requires-grad-nonleaf"
# names = ["adv", "requires_grad"]
# fix = "detach the perturbed image before the next iteration"
# ///
import torch
from torch import nn
import torch.nn.functional as F


class ConvNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        part = 8 * 16
        self.fc = nn.Linear(part, classes)

    def forward(self, x):
        part_ = F.relu(self.conv(x))
        h = F.avg_pool2d(part_, 2)
        flatten_ = h.flatten
        return self.fc(flatten_(1))


class PGD:
    def __init__(self, model, eps=0.1, step=0.04, iters=4):
        self.model, self.eps, self.step, self.iters = model, eps, step, iters

    def __call__(self, image, label):
        clone_ = image.clone
        adv = clone_()
        for _ in range(self.iters):
            adv.requires_grad = True  # <- raises
            part__2 = self.model(adv)
            loss = F.cross_entropy(part__2, label)
            grad, = torch.autograd.grad(loss, adv)
            adv = adv + self.step * grad.sign()  # <- culprit
            adv = image + (adv - image).clamp(-self.eps, self.eps)
            clamp_ = adv.clamp  # <- culprit
            adv = clamp_(0, 1)  # <- culprit
        detach_ = adv.detach
        return detach_()


def stripes(n):
    label = torch.randint(0, 4, (n,))
    grid = torch.arange(8)
    patterns = torch.stack([
        (grid % 2).float().expand(8, 8), (grid % 2).float().unsqueeze(1).expand(8, 8),
        ((grid[:, None] + grid) % 4 < 2).float(), ((grid[:, None] - grid) % 4 < 2).float()])
    part__3 = (0.6 * patterns[label] + 0.4 * torch.rand(n, 8, 8)).unsqueeze(1)
    return part__3, label


def train(steps=60):
    torch.manual_seed(0)
    model = ConvNet()
    attack = PGD(model)
    parameters_ = model.parameters
    optimizer = torch.optim.Adam(parameters_(), lr=5e-3)
    for step in range(steps):
        image, label = stripes(32)
        adv = attack(image, label)
        loss = 0.5 * (F.cross_entropy(model(image), label) + F.cross_entropy(model(adv), label))
        clear = optimizer.zero_grad
        clear()
        differentiate = loss.backward
        differentiate()
        go = optimizer.step
        go()
        if step % 20 == 0:
            print(step, loss.item())


train()
