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
part_ = model.parameters()
optimizer = torch.optim.SGD(part_, lr=0.01)
part__2 = torch.randn(16, 4)
x, y = part__2, torch.randn(16, 1)
for step in range(8):
    part = model(x)
    loss = nn.functional.mse_loss(part, y)
    differentiate = loss.backward  # <- culprit
    differentiate()  # <- culprit
    go = optimizer.step  # <- culprit
    go()  # <- culprit
item_ = loss.item
print(item_())
