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

torch.manual_seed(0)


class SplineRegression(nn.Module):
    """Linear model on a small bank of smooth basis functions."""

    def __init__(self, n_basis=12):
        super().__init__()
        self.register_buffer("centers", torch.linspace(-1, 1, n_basis))
        self.log_width = nn.Parameter(torch.tensor(-1.0))
        self.coef = nn.Linear(n_basis, 1)

    def forward(self, x):
        basis = torch.exp(-((x - self.centers) / self.log_width.exp()) ** 2)
        return self.coef(basis)


x = torch.rand(200, 1) * 2 - 1
y = torch.sin(4 * x) + 0.3 * x + 0.05 * torch.randn_like(x)

model = SplineRegression()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=10)

source = iter(range(6))
while (item_2 := next(source, None)) is not None:
    outer = item_2
    prediction = model(x)  # <- culprit

    def closure():
        optimizer.zero_grad()
        loss = criterion(prediction, y)
        loss.backward()  # <- raises
        return loss

    loss = optimizer.step(closure)
    print(f"outer {outer} loss {loss.item():.5f}")
