# /// case
# title = "The gradient of earlier steps is never cleared"
# source = "seed documents"
# outcome = "silent"
# torch_error = ""
# cause = "stale-gradients"
# names = ["zero_grad"]
# fix = "call optimizer.zero_grad() in the loop"
# ///
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(16, 4), torch.randn(16, 1)


def finish_batch(loss, optimizer):
    loss.backward()  # <- culprit
    optimizer.step()  # <- culprit


def begin_batch(model, x, y):
    loss = nn.functional.mse_loss(model(x), y)
    return loss
for step in range(8):
    loss = begin_batch(model, x, y)
    finish_batch(loss, optimizer)
print(loss.item())
