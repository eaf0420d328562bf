# /// case
# title = "Custom quantised linear returns the input gradient in its flattened shape"
# source = "https://github.com/ucbrise/actnn/issues/26"
# outcome = "raises"
# torch_error = "returned an invalid gradient at index 0"
# cause = "gradient-shape-mismatch"
# names = ["QuantLinearFn", "grad_tokens"]
# fix = "view the input gradient back to the input's shape"
# ///
import torch
from torch import nn
import torch.nn.functional as F


class QuantLinearFn(torch.autograd.Function):
    """y = x @ q(w).T where only an 8 bit copy of the activations is kept for the backward."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        tokens = x.reshape(-1, x.shape[-1])  # <- related
        scale = tokens.abs().max() / 127
        packed = (tokens / scale).round().to(torch.int8)
        ctx.save_for_backward(packed, scale, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_out):
        packed, scale, weight = ctx.saved_tensors
        grad_flat = grad_out.reshape(-1, grad_out.shape[-1])
        grad_tokens = grad_flat @ weight  # <- culprit
        grad_weight = grad_flat.t() @ (packed.float() * scale)
        return grad_tokens, grad_weight, grad_flat.sum(0)  # <- culprit


class QuantLinear(nn.Linear):
    def forward(self, x):
        return QuantLinearFn.apply(x, self.weight, self.bias)


class PatchMixer(nn.Module):
    def __init__(self, dim=24, classes=4):
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(QuantLinear(dim, 2 * dim), nn.GELU(), QuantLinear(2 * dim, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, patches):
        h = self.embed(patches)
        h = h + self.mlp(self.norm(h))
        return self.head(h.mean(1))


def train(steps=80):
    torch.manual_seed(0)
    model = PatchMixer()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rule = torch.randn(6, 4)
    source = iter(range(steps))
    while (item_2 := next(source, None)) is not None:
        step = item_2
        patches = torch.randn(32, 9, 6)
        label = (patches.mean(1) @ rule).argmax(-1)
        loss = F.cross_entropy(model(patches), label)
        opt.zero_grad()
        loss.backward()  # <- raises
        opt.step()
    return loss.item()


print("final loss", train())
