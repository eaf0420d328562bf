"""Backward from a vector, gradients of the wrong shape or number, and gradients that do not exist."""

from __future__ import annotations

from contract_case import Case

ROOTS = [
    Case("unreduced_loss_module", "GG401", '''
net = nn.Linear(4, 2)
criterion = nn.MSELoss(reduction="none")
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    opt.zero_grad()
    error = criterion(net(x), y)  # <<
    error.backward()
    opt.step()
''', ("error", "reduction")),
    Case("sum_over_one_dimension", "GG401", '''
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def loss(self, x, y):
        diff = self.fc(x) - y
        return diff.pow(2).sum(dim=1)  # <<

head = Head()
per_row = head.loss(torch.randn(5, 4), torch.randn(5, 3))
per_row.backward()
''', ("per_row", "[5]")),
    Case("scaled_and_regularised_after", "GG401", '''
net = nn.Linear(4, 3)
def penalty(model):
    return sum(p.pow(2).sum() for p in model.parameters())
def train():
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    ce = F.cross_entropy(net(x), y, reduction="none")  # <<
    loss = ce * 0.5 + 1e-3 * penalty(net)
    loss.backward()
train()
''', ("loss", "ce")),
    Case("several_losses_stacked", "GG401", '''
net = nn.Linear(3, 3)
out = net(torch.randn(4, 3))
parts = []
for k in range(3):
    parts.append(F.mse_loss(out[:, k], torch.zeros(4)))
total = torch.stack(parts)  # <<
total.backward()
''', ("total",)),
    Case("grad_of_many_outputs", "GG401", '''
net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
def residual(points):
    points = points.requires_grad_()
    u = net(points)
    du, = torch.autograd.grad(u, points, create_graph=True)  # <<
    return du.pow(2).mean()
residual(torch.rand(6, 2)).backward()
''', ("u", "autograd.grad")),
    Case("attribute_holds_the_loss", "GG401", '''
class Trainer:
    def __init__(self):
        self.net = nn.Linear(2, 1)
        self.loss = None
    def forward(self, x):
        self.loss = (self.net(x) - 1).abs()  # <<
    def step(self):
        self.forward(torch.randn(4, 2))
        self.loss.backward()
Trainer().step()
''', ("self.loss",)),
    Case("gradient_argument_of_a_batch", "GG402", '''
net = nn.Linear(4, 3)
out = net(torch.randn(5, 4))
weight = torch.ones(5)  # <<
out.backward(weight)
''', ("weight", "[5]", "[5, 3]")),
    Case("gradient_argument_inline", "GG402", '''
net = nn.Linear(4, 1)
loss = net(torch.randn(5, 4)).mean()
loss.backward(gradient=torch.ones(5))  # <<
''', ("loss",)),
    Case("bias_gradient_not_summed", "GG402", '''
class BiasAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        return x + bias
    @staticmethod
    def backward(ctx, grad):
        flat = grad.flatten()  # <<
        return grad, flat  # <<

bias = nn.Parameter(torch.zeros(3))
BiasAdd.apply(torch.randn(4, 3, requires_grad=True), bias).sum().backward()
''', ("BiasAdd", "bias", "flat")),
    Case("gradients_of_two_inputs_exchanged", "GG402", '''
class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, image, text, weight):
        ctx.save_for_backward(image, text, weight)
        return torch.einsum("bi,bj,ijk->bk", image, text, weight)
    @staticmethod
    def backward(ctx, g):
        image, text, weight = ctx.saved_tensors
        a = torch.einsum("bk,bi,ijk->bj", g, image, weight)
        b = torch.einsum("bk,bj,ijk->bi", g, text, weight)
        c = torch.einsum("bi,bj,bk->ijk", image, text, g)
        return a, b, c  # <<

see, read, weight = nn.Linear(3, 4), nn.Linear(3, 5), nn.Parameter(torch.randn(4, 5, 2))
x = torch.randn(6, 3)
Fuse.apply(see(x), read(x), weight).sum().backward()
''', ("Fuse", "image", "text", "b, a, c")),
    Case("unreduced_gradient_with_the_shape_of_the_input", "GG402", '''
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gain, x):
        ctx.save_for_backward(gain, x)
        return x * gain.t()
    @staticmethod
    def backward(ctx, g):
        gain, x = ctx.saved_tensors
        grad_gain = g * x  # <<
        return grad_gain, g * gain.t()

gain, net = nn.Parameter(torch.ones(4, 1)), nn.Linear(3, 4)
Scale.apply(gain, net(torch.randn(6, 3))).sum().backward()
''', ("Scale", "gain", "grad_gain")),
    Case("gradient_of_a_pooled_input", "GG402", '''
class MeanPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[1]
        return x.mean(1)
    @staticmethod
    def backward(ctx, g):
        return g / ctx.n  # <<

net = nn.Linear(3, 4)
MeanPool.apply(net(torch.randn(2, 5, 3))).sum().backward()
''', ("MeanPool", "x")),
    Case("grad_assigned_with_wrong_shape", "GG402", '''
w = nn.Parameter(torch.randn(3, 2))
g = torch.randn(2, 3)
w.grad = g  # <<
''', ("w",)),
    Case("context_arguments_forgotten", "GG403", '''
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, shift):
        ctx.factor = factor
        return x * factor + shift
    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None  # <<

x = torch.randn(3, requires_grad=True)
Scale.apply(x, 2.0, 1.0).sum().backward()
''', ("Scale", "shift")),
    Case("gradients_for_ctx_too", "GG403", '''
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        grad_x = 3 * x ** 2 * g
        return grad_x, g  # <<

Cube.apply(torch.randn(3, requires_grad=True)).sum().backward()
''', ("Cube",)),
    Case("backward_takes_one_of_two_gradients", "GG403", '''
class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clamp(min=0), x.clamp(max=0)
    @staticmethod
    def backward(ctx, g):  # <<
        return g

a, b = Split.apply(torch.randn(3, requires_grad=True))
(a.sum() + b.sum()).backward()
''', ("Split",)),
    Case("second_derivative_of_fused_attention", "GG406", '''
from torch import autograd
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
    def forward(self, x):
        y, _ = self.attn(x, x, x, need_weights=False)  # <<
        return y.mean()
block = Block()
def r1(x):
    x.requires_grad_()
    g, = autograd.grad(block(x), x, create_graph=True)
    return g.pow(2).sum()
r1(torch.randn(2, 3, 8)).backward()
''', ("scaled_dot_product_attention",)),
    Case("second_derivative_of_cdist", "GG406", '''
pts = torch.randn(4, 2, requires_grad=True)
dist = torch.cdist(pts, pts * 2)  # <<
force, = torch.autograd.grad(dist.sum(), pts, create_graph=True)
force.pow(2).sum().backward()
''', ("cdist",)),
    Case("no_derivative_at_all", "GG406", '''
a = torch.rand(3, requires_grad=True)
cdf = torch.special.gammainc(a + 1, torch.rand(3))  # <<
cdf.sum().backward()
''', (), ),
    Case("weight_of_a_loss_is_trained", "GG406", '''
class_weight = nn.Parameter(torch.ones(3))
net = nn.Linear(2, 3)
loss = F.cross_entropy(net(torch.randn(4, 2)), torch.randint(0, 3, (4,)), weight=class_weight)  # <<
loss.backward()
''', ("class_weight", "weight")),
    Case("once_differentiable_under_a_penalty", "GG406", '''
import torch.autograd.function as fn
class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()
    @staticmethod
    @fn.once_differentiable  # <<
    def backward(ctx, g):
        x, = ctx.saved_tensors
        s = x.sigmoid()
        return g * (s + x * s * (1 - s))
class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 4), nn.Linear(4, 1)
    def forward(self, x):
        return self.b(Swish.apply(self.a(x)))
d = D()
x = torch.randn(3, 2, requires_grad=True)
g, = torch.autograd.grad(d(x).sum(), x, create_graph=True)
gp = (g.norm(dim=1) - 1).pow(2).mean()
gp.backward()
''', ("Swish", "once_differentiable")),
    Case("function_without_backward", "GG406", '''
class Quant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # <<
        return (x * 8).round() / 8
net = nn.Linear(2, 2)
Quant.apply(net(torch.randn(3, 2))).sum().backward()
''', ("Quant", "backward")),
    Case("frozen_by_flag_on_a_result", "GG409", '''
enc = nn.Linear(3, 3)
feats = enc(torch.randn(2, 3))
feats = F.relu(feats)  # <<
feats.requires_grad = False
nn.Linear(3, 1)(feats).sum().backward()
''', ("feats", "requires_grad")),
    Case("optimised_image", "GG409", '''
net = nn.Conv2d(1, 2, 3)
image = torch.rand(1, 1, 6, 6)
for i in range(4):
    image.requires_grad_(True)
    image.requires_grad = True
    score = net(image).mean()
    g, = torch.autograd.grad(score, image)
    image = torch.clamp(image + 0.1 * g, 0, 1)  # <<
''', ("image",)),
    Case("scaled_parameter_is_frozen", "GG409", '''
class Emb:
    def __init__(self):
        self.table = torch.randn(5, 2, requires_grad=True) * 0.01  # <<
    def freeze(self):
        self.table.requires_grad_(False)
Emb().freeze()
''', ("self.table",)),
    Case("cache_of_activations_is_copied", "GG410", '''
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.cache = {}
    def forward(self, x):
        out = self.fc(x)
        self.cache["out"] = out  # <<
        return out.sum()
net = Net()
net(torch.randn(3, 2)).backward()
target = copy.deepcopy(net)
''', ("cache", "deepcopy")),
    Case("hook_keeps_outputs_on_the_module", "GG410", '''
net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
def keep(module, args, output):
    module.output = output  # <<
for m in net:
    m.register_forward_hook(keep)
net(torch.randn(4, 2)).mean().backward()
best = copy.deepcopy(net)
''', ("output", "net")),
    Case("history_of_losses_is_copied", "GG410", '''
class Recorder:
    def __init__(self):
        self.losses = []
    def add(self, loss):
        self.losses.append(loss)  # <<
rec = Recorder()
net = nn.Linear(2, 1)
for _ in range(2):
    loss = net(torch.randn(3, 2)).mean()
    loss.backward()
    rec.add(loss)
snapshot = copy.deepcopy(rec)
''', ("losses",)),
    Case("derived_weight_in_init", "GG410", '''
class Low(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 1)), nn.Parameter(torch.randn(1, 4))
        self.weight = self.a @ self.b  # <<
    def forward(self, x):
        return x @ self.weight
ema = torch.optim.swa_utils.AveragedModel(Low())
''', ("weight",)),
]  # fmt: skip
