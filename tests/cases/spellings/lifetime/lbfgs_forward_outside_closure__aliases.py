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
        register_buffer_ = self.register_buffer
        register_buffer_("centers", torch.linspace(-1, 1, n_basis))
        part = torch.tensor(-1.0)
        self.log_width = nn.Parameter(part)
        self.coef = nn.Linear(n_basis, 1)

    def forward(self, x):
        part_ = ((x - self.centers) / self.log_width.exp()) ** 2
        basis = torch.exp(-part_)
        coef_ = self.coef
        return coef_(basis)


part__2 = torch.rand(200, 1) * 2
x = part__2 - 1
part__3 = torch.sin(4 * x) + 0.3 * x
y = part__3 + 0.05 * torch.randn_like(x)

model, criterion = SplineRegression(), nn.MSELoss()
part__4 = model.parameters()
optimizer = optim.LBFGS(part__4, lr=0.5, max_iter=10)

for outer in range(6):
    prediction = model(x)  # <- culprit

    def closure():
        clear = optimizer.zero_grad
        clear()
        loss = criterion(prediction, y)
        differentiate = loss.backward  # <- raises
        differentiate()  # <- raises
        return loss

    go = optimizer.step
    loss = go(closure)
    print(f"outer {outer} loss {loss.item():.5f}")
