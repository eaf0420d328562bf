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


def heteroscedastic_net_forward(owner, x):
    params = owner.head(owner.body(x))
    # column 0 is the mean, column 1 has to be positive
    params[:, 1] = nn.functional.softplus(params[:, 1]) + owner.min_std  # <- culprit # <- related
    return Normal(params[:, 0], params[:, 1])


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
        return heteroscedastic_net_forward(self, x)


def negative_log_likelihood(dist, y):
    return -dist.log_prob(y).mean()


def finish_batch(nll, optimizer, epoch):
    nll.backward()  # <- raises
    optimizer.step()
    if epoch % 20 == 0:
        print(f"epoch {epoch} loss {nll.item():.4f}")


def begin_batch(net, x, y, optimizer):
    nll = negative_log_likelihood(net(x), y)
    optimizer.zero_grad()
    return nll


def fit(net, x, y, epochs=60):
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for epoch in range(epochs):
        nll = begin_batch(net, x, y, optimizer)
        finish_batch(nll, optimizer, epoch)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.rand(512, 3) * 4 - 2
    noise = torch.randn(512) * (0.1 + 0.3 * x[:, 1].abs())
    y = torch.sin(2 * x[:, 0]) + noise
    fit(HeteroscedasticNet(3), x, y)
