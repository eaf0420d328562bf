# /// case
# title = "Explanation loss differentiates the scores by an input that does not require grad"
# source = "https://github.com/PAIR-code/saliency/issues/84"
# outcome = "raises"
# torch_error = "One of the differentiated Tensors does not require grad"
# cause = "input-without-requires-grad"
# also = ["all-frozen", "unused-input"]
# names = ["x"]
# fix = "x.requires_grad_(True) before the forward pass"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def tabular_net_forward(owner, x):
    return F.log_softmax(owner.net(x), dim=1)


class TabularNet(nn.Module):
    def __init__(self, n_features=10, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_features, width), nn.Softplus(), nn.Linear(width, 2))

    def forward(self, x):
        return tabular_net_forward(self, x)


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


def finish_batch(loss, optimizer, step, reason):
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step} reason {reason.item():.4f} loss {loss.item():.4f}")


def begin_batch(model, irrelevant, optimizer):
    x, y = confounded_batch()  # <- related
    loss, reason = right_reasons_loss(model, x, y, irrelevant)
    optimizer.zero_grad()
    return loss, reason


def main():
    model = TabularNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    irrelevant = torch.zeros(10)
    irrelevant[9] = 1.0
    for step in range(150):
        loss, reason = begin_batch(model, irrelevant, optimizer)
        finish_batch(loss, optimizer, step, reason)


main()
