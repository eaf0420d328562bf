# /// case
# title = "Custom function scales its input in place without marking it dirty"
# source = "https://github.com/pytorch/pytorch/issues/30454"
# outcome = "raises"
# torch_error = "is a view and is being modified inplace. This view was created inside a custom Function"
# cause = "function-contract"
# names = ["ScaleGrad", "logits"]
# fix = "call ctx.mark_dirty on the tensor that forward modifies"
# ///
import torch
from torch import nn
import torch.nn.functional as F


class ScaleGrad(torch.autograd.Function):
    """Multiplies by `factor` without a copy of the big logit matrix."""

    @staticmethod
    def forward(ctx, logits, factor):
        ctx.factor = factor
        logits *= factor  # <- culprit
        return logits  # <- related

    @staticmethod
    def backward(ctx, grad_out):
        return grad_out * ctx.factor, None


class MarginHead(nn.Module):
    """Cosine logits with an additive margin on the true class."""

    def __init__(self, dim, classes, scale=8.0, margin=0.15):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(classes, dim))
        self.scale, self.margin = scale, margin

    def forward(self, emb, label):
        cosine = F.normalize(emb) @ F.normalize(self.prototypes).t()
        logits = ScaleGrad.apply(cosine, self.scale)
        logits[torch.arange(len(label)), label] -= self.scale * self.margin  # <- raises
        return logits


class FaceNet(nn.Module):
    def __init__(self, in_dim=20, dim=16, classes=6):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(in_dim, 32), nn.PReLU(), nn.Linear(32, dim))
        self.head = MarginHead(dim, classes)

    def forward(self, x, label):
        return self.head(self.embed(x), label)


def main():
    torch.manual_seed(0)
    centres = torch.randn(6, 20)
    net = FaceNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    source = iter(range(80))
    while (item_2 := next(source, None)) is not None:
        step = item_2
        label = torch.randint(0, 6, (32,))
        x = centres[label] + 0.7 * torch.randn(32, 20)
        loss = F.cross_entropy(net(x, label), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
