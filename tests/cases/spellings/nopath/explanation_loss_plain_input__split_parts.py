import torch
import torch.nn as nn
import torch.nn.functional as F


class TabularNet(nn.Module):
    def __init__(self, n_features=10, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_features, width), nn.Softplus(), nn.Linear(width, 2))

    def forward(self, x):
        return F.log_softmax(self.net(x), dim=1)


def right_reasons_loss(model, x, y, irrelevant, weight=5.0):
    """Cross entropy plus a penalty on gradients at features that must not matter."""
    log_probs = model(x)
    answer = F.nll_loss(log_probs, y)
    input_grad = torch.autograd.grad(log_probs.sum(), x, create_graph=True)[0]  # <- culprit # <- raises
    reason = (irrelevant * input_grad).pow(2).sum(1).mean()
    return answer + weight * reason, reason


def confounded_batch(n=64):
    y = torch.randint(0, 2, (n,))
    x = torch.randn(n, 10)
    x[:, 0] += 2.0 * y - 1
    x[:, 9] = 3.0 * y + 0.1 * torch.randn(n)  # the scanner id leaks the label
    return x, y
