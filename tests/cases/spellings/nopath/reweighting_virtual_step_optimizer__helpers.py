# /// case
# title = "Example weights are differentiated through an optimizer.step()"
# source = "https://github.com/danieltan07/learning-to-reweight-examples/issues/5"
# outcome = "raises"
# torch_error = "appears to not have been used in the graph"
# cause = "unused-input"
# names = ["eps", "meta_optimizer"]
# fix = "make the virtual step out of place, with create_graph=True"
# ///
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

torch.manual_seed(0)


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


def finish_batch(loss, optimizer, step, model, x_val, y_val):
    loss.backward()
    optimizer.step()
    if step % 20 == 19 or step == 0:
        clean = per_example_loss(model, x_val, y_val).mean().item()
        print(f"step {step} validation loss {clean:.4f}")


def begin_batch(model, x_val, y_val, optimizer):
    x, y = make_data(100, noise=0.4)
    w = example_weights(model, x, y, x_val, y_val)
    loss = (w * per_example_loss(model, x, y)).sum()
    optimizer.zero_grad()
    return loss


def main():
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x_val, y_val = make_data(64, noise=0.0)
    for step in range(80):
        loss = begin_batch(model, x_val, y_val, optimizer)
        finish_batch(loss, optimizer, step, model, x_val, y_val)


if __name__ == "__main__":
    main()
