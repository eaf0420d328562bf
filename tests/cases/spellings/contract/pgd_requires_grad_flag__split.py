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

from pgd_requires_grad_flag__split_parts import ConvNet, PGD, stripes


def train(steps=60):
    torch.manual_seed(0)
    model = ConvNet()
    attack = PGD(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(steps):
        image, label = stripes(32)
        adv = attack(image, label)
        loss = 0.5 * (F.cross_entropy(model(image), label) + F.cross_entropy(model(adv), label))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())


train()
