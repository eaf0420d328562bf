# /// case
# title = "Softplus written back into one column of the network's output"
# source = "https://github.com/pytorch/pytorch/issues/114505"
# outcome = "raises"
# torch_error = "has been modified by an inplace operation"
# cause = "inplace-modified-saved-tensor"
# names = ["params"]
# fix = "build the scale as a new tensor instead of assigning it into params[:, 1]"
# ///
import torch
from torch import nn
from torch.distributions import Normal


class HeteroscedasticNet(nn.Module):
    """Predicts mean and standard deviation of the target."""

    def __init__(self, in_features, hidden=48):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(in_features, hidden), nn.SiLU(),
            nn.Linear(hidden, hidden), nn.SiLU(),
        )
        self.head = nn.Linear(hidden, 2)
        self.min_std = 1e-3

    def forward(self, x):
        body_ = self.body
        params = self.head(body_(x))
        # column 0 is the mean, column 1 has to be positive
        part = nn.functional.softplus(params[:, 1])  # <- culprit  # <- related
        params[:, 1] = part + self.min_std  # <- culprit # <- related
        return Normal(params[:, 0], params[:, 1])


def negative_log_likelihood(dist, y):
    part_ = dist.log_prob(y).mean()
    return -part_


def fit(net, x, y, epochs=60):
    parameters_ = net.parameters
    optimizer = torch.optim.Adam(parameters_(), lr=5e-3)
    for epoch in range(epochs):
        part__2 = net(x)
        nll = negative_log_likelihood(part__2, y)
        clear = optimizer.zero_grad
        clear()
        differentiate = nll.backward  # <- raises
        differentiate()  # <- raises
        go = optimizer.step
        go()
        if epoch % 20 == 0:
            print(f"epoch {epoch} loss {nll.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    part__3 = torch.rand(512, 3) * 4
    x = part__3 - 2
    part__4 = torch.randn(512)
    noise = part__4 * (0.1 + 0.3 * x[:, 1].abs())
    part__5 = torch.sin(2 * x[:, 0])
    y = part__5 + noise
    part__6 = HeteroscedasticNet(3)
    fit(part__6, x, y)
