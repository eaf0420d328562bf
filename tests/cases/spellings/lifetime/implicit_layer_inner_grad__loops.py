# /// case
# title = "Backward of an implicit layer frees its own inner graph, two losses use the layer"
# source = "https://github.com/pytorch/pytorch/issues/65536"
# outcome = "raises"
# torch_error = "Trying to backward through the graph a second time"
# cause = "graph-freed-shared-subgraph"
# names = ["FixedPoint", "ctx.z_out"]
# fix = "retain_graph=True in the last autograd.grad of backward"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def cell(z, x, weight):
    return torch.tanh(z @ weight.t() + x)


class FixedPoint(torch.autograd.Function):
    """z* = tanh(W z* + x) with the implicit gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        z = torch.zeros_like(x)
        source = iter(range(30))
        while (item_2 := next(source, None)) is not None:
            _ = item_2
            z = cell(z, x, weight)
        with torch.enable_grad():
            ctx.z_in = z.detach().requires_grad_()
            ctx.args = x.detach().requires_grad_(), weight.detach().requires_grad_()
            ctx.z_out = cell(ctx.z_in, *ctx.args)
        return z

    @staticmethod
    def backward(ctx, grad_z):
        v = grad_z
        source_2 = iter(range(15))
        while (item_3 := next(source_2, None)) is not None:
            _ = item_3
            v = grad_z + torch.autograd.grad(ctx.z_out, ctx.z_in, v, retain_graph=True)[0]  # <- raises
        return torch.autograd.grad(ctx.z_out, ctx.args, v)  # <- culprit


class DEQ(nn.Module):
    def __init__(self, d_in=6, width=16):
        super().__init__()
        self.inject = nn.Linear(d_in, width)
        self.weight = nn.Parameter(0.1 * torch.randn(width, width))
        self.classify = nn.Linear(width, 3)
        self.reconstruct = nn.Linear(width, d_in)

    def forward(self, x):
        z = FixedPoint.apply(self.inject(x), self.weight)
        return self.classify(z), self.reconstruct(z)


protos = 2 * torch.randn(3, 6)
model = DEQ()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
source_3 = iter(range(60))
while (item_4 := next(source_3, None)) is not None:
    step = item_4
    y = torch.randint(0, 3, (48,))
    x = protos[y] + torch.randn(48, 6)
    logits, x_rec = model(x)
    class_loss, rec_loss = F.cross_entropy(logits, y), F.mse_loss(x_rec, x)
    optimizer.zero_grad()
    # gradients of the two losses are logged separately, so backpropagate them one by one
    class_loss.backward(retain_graph=True)  # <- related
    class_grad = model.weight.grad.norm().item()
    rec_loss.backward()  # <- related
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step} grad {class_grad:.3f} loss {class_loss.item() + rec_loss.item():.4f}")
