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
        reshape_ = x.reshape  # <- related
        tokens = reshape_(-1, x.shape[-1])  # <- related
        part = tokens.abs().max()
        scale = part / 127
        ctx.save_for_backward((packed := (tokens / scale).round().to(torch.int8)), scale, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_out):
        packed, scale, weight = ctx.saved_tensors
        grad_tokens = (grad_flat := grad_out.reshape(-1, grad_out.shape[-1])) @ weight  # <- culprit
        t_ = grad_flat.t
        grad_weight = t_() @ (packed.float() * scale)
        return grad_tokens, grad_weight, grad_flat.sum(0)  # <- culprit


class QuantLinear(nn.Linear):
    def forward(self, x):
        apply_ = QuantLinearFn.apply
        return apply_(x, self.weight, self.bias)


class PatchMixer(nn.Module):
    def __init__(self, dim=24, classes=4):
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.norm = nn.LayerNorm(dim)
        part_ = QuantLinear(dim, 2 * dim)
        self.mlp = nn.Sequential(part_, nn.GELU(), QuantLinear(2 * dim, dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, patches):
        embed_ = self.embed
        h = embed_(patches)
        h = h + self.mlp(self.norm(h))
        mean_ = h.mean
        return self.head(mean_(1))


def train(steps=80):
    torch.manual_seed(0)
    model = PatchMixer()
    part__3 = model.parameters()
    opt = torch.optim.AdamW(part__3, lr=5e-3)
    rule = torch.randn(6, 4)
    for step in range(steps):
        patches = torch.randn(32, 9, 6)
        mean__2 = patches.mean
        label = (mean__2(1) @ rule).argmax(-1)
        part__2 = model(patches)
        loss = F.cross_entropy(part__2, label)
        clear = opt.zero_grad
        clear()
        differentiate = loss.backward  # <- raises
        differentiate()  # <- raises
        go = opt.step
        go()
    item_ = loss.item
    return item_()


print("final loss", train())
