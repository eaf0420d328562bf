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
    part = z @ weight.t() + x
    return torch.tanh(part)


class FixedPoint(torch.autograd.Function):
    """z* = tanh(W z* + x) with the implicit gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        z = torch.zeros_like(x)
        for _ in range(30):
            z = cell(z, x, weight)
        with torch.enable_grad():
            detach_ = z.detach
            ctx.z_in = detach_().requires_grad_()
            part_ = x.detach().requires_grad_()
            ctx.args = part_, weight.detach().requires_grad_()
            ctx.z_out = cell(ctx.z_in, *ctx.args)
        return z

    @staticmethod
    def backward(ctx, grad_z):
        v = grad_z
        for _ in range(15):
            v = grad_z + torch.autograd.grad(ctx.z_out, ctx.z_in, v, retain_graph=True)[0]  # <- raises
        return torch.autograd.grad(ctx.z_out, ctx.args, v)  # <- culprit


class DEQ(nn.Module):
    def __init__(self, d_in=6, width=16):
        super().__init__()
        self.inject = nn.Linear(d_in, width)
        part__2 = 0.1 * torch.randn(width, width)
        self.weight = nn.Parameter(part__2)
        self.classify = nn.Linear(width, 3)
        self.reconstruct = nn.Linear(width, d_in)

    def forward(self, x):
        inject_ = self.inject
        z = FixedPoint.apply(inject_(x), self.weight)
        part__3 = self.classify(z)
        return part__3, self.reconstruct(z)


protos, model = 2 * torch.randn(3, 6), DEQ()
part__6 = model.parameters()
optimizer = torch.optim.Adam(part__6, lr=1e-2)
for step in range(60):
    y = torch.randint(0, 3, (48,))
    x = protos[y] + torch.randn(48, 6)
    logits, x_rec = model(x)
    part__4 = F.cross_entropy(logits, y)
    class_loss, rec_loss = part__4, F.mse_loss(x_rec, x)
    clear = optimizer.zero_grad
    clear()
    # gradients of the two losses are logged separately, so backpropagate them one by one
    differentiate = class_loss.backward  # <- related
    differentiate(retain_graph=True)  # <- related
    part__5 = model.weight.grad.norm()
    class_grad = part__5.item()
    differentiate_ = rec_loss.backward  # <- related
    differentiate_()  # <- related
    go = optimizer.step
    go()
    if step % 15 == 0:
        print(f"step {step} grad {class_grad:.3f} loss {class_loss.item() + rec_loss.item():.4f}")
