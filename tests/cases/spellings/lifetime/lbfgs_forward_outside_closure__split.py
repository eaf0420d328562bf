# /// case
# title = "LBFGS closure recomputes the loss but not the forward pass"
# source = "https://github.com/pytorch/pytorch/issues/111369"
# outcome = "raises"
# torch_error = "Trying to backward through the graph a second time"
# cause = "graph-freed-precomputed"
# names = ["prediction", "closure"]
# fix = "run the model inside the closure"
# ///
import torch
from torch import nn, optim

from lbfgs_forward_outside_closure__split_parts import SplineRegression

torch.manual_seed(0)


x = torch.rand(200, 1) * 2 - 1
y = torch.sin(4 * x) + 0.3 * x + 0.05 * torch.randn_like(x)

model = SplineRegression()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=10)

for outer in range(6):
    prediction = model(x)  # <- culprit

    def closure():
        optimizer.zero_grad()
        loss = criterion(prediction, y)
        loss.backward()  # <- raises
        return loss

    loss = optimizer.step(closure)
    print(f"outer {outer} loss {loss.item():.5f}")
