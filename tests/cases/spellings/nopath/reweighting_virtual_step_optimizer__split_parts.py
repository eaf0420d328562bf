import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call


def make_data(n, noise):
    x = torch.randn(n, 5)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    flip = torch.rand(n) < noise
    return x, torch.where(flip, 1 - y, y)


def per_example_loss(net, x, y):
    return F.cross_entropy(net(x), y, reduction="none")


def example_weights(model, x, y, x_val, y_val, lr=0.1):
    """Weights that would have helped on the clean validation set."""
    meta_model = copy.deepcopy(model)
    eps = torch.zeros(len(x), requires_grad=True)
    meta_loss = (eps * per_example_loss(meta_model, x, y)).sum()
    meta_optimizer = torch.optim.SGD(meta_model.parameters(), lr=lr)
    meta_loss.backward()
    meta_optimizer.step()  # <- culprit
    val_loss = per_example_loss(meta_model, x_val, y_val).mean()
    grad_eps = torch.autograd.grad(val_loss, eps)[0]  # <- raises
    helpful = F.relu(-grad_eps)
    return helpful / helpful.sum().clamp(min=1e-8)
