"""Sound programs that look like the broken ones: none of this family's rules may speak."""

from __future__ import annotations

from contract_case import Case

SOUND = [
    Case("vector_jacobian_product", "", '''
net = nn.Linear(3, 2)
out = net(torch.randn(4, 3))
out.backward(torch.ones_like(out))
losses = F.cross_entropy(net(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1]), reduction="none")
losses.mean().backward()
'''),
    Case("mask_and_scale_on_ctx", "", '''
class LeakyFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.mask = torch.where(x > 0, 1.0, slope)
        ctx.positive = (x > 0).float()
        ctx.shape = x.shape
        ctx.slope = slope
        return torch.where(x > 0, x, slope * x)
    @staticmethod
    def backward(ctx, g):
        return g * ctx.mask * (ctx.positive + (1 - ctx.positive)), None
l1, l2 = nn.Linear(2, 5), nn.Linear(5, 1)
for _ in range(2):
    x = torch.randn(3, 2, requires_grad=True)
    g, = torch.autograd.grad(l2(torch.tanh(LeakyFn.apply(l1(x), 0.1))).sum(), x, create_graph=True)
    g.pow(2).sum().backward()
'''),
    Case("kept_on_ctx_but_differentiated_once", "", '''
class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.slope = torch.cos(x)
        return torch.sin(x)
    @staticmethod
    def backward(ctx, g):
        return g * ctx.slope
net = nn.Linear(2, 1)
for _ in range(3):
    x = torch.randn(3, 2, requires_grad=True)
    g, = torch.autograd.grad(Sine.apply(net(x)).sum(), x, create_graph=True)
    Sine.apply(net(torch.randn(3, 2))).mean().backward()
'''),
    Case("constant_buffer_on_ctx", "", '''
class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, table):
        ctx.table = table.sqrt()
        ctx.save_for_backward(x)
        return x.pow(2) * ctx.table
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * 2 * x * ctx.table, None
net, table = nn.Linear(2, 2), torch.rand(2)
x = torch.randn(3, 2, requires_grad=True)
g, = torch.autograd.grad(Weighted.apply(net(x), table).sum(), x, create_graph=True)
g.pow(2).sum().backward()
'''),
    Case("marked_dirty", "", '''
class Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * (x > 0)
net = nn.Linear(2, 2)
(Relu.apply(net(torch.randn(3, 2))) + 1).sum().backward()
'''),
    Case("hooks_that_behave", "", '''
net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
norms = []
def log(module, gi, go):
    norms.append(go[0].norm().item())
def double(module, gi, go):
    return tuple(None if g is None else 2 * g for g in gi)
net[0].register_full_backward_hook(log)
net[2].register_full_backward_hook(double)
net[0].weight.register_hook(lambda g: g.clamp(-1, 1))
out = net(torch.randn(4, 2))
out.register_hook(lambda g: None)
out.mean().backward()
'''),
    Case("mixed_dtypes_that_promote", "", '''
net = nn.Linear(2, 1)
y = torch.from_numpy(np.random.rand(4, 1))
F.mse_loss(net(torch.randn(4, 2)), y).backward()
F.cross_entropy(nn.Linear(2, 3)(torch.randn(4, 2)), torch.tensor([0, 1, 2, 0])).backward()
'''),
    Case("attack_with_detach", "", '''
net = nn.Linear(3, 2)
adv = torch.rand(4, 3)
for _ in range(3):
    adv.requires_grad = True
    g, = torch.autograd.grad(net(adv).sum(), adv)
    adv = (adv + 0.1 * g.sign()).detach()
'''),
    Case("deepcopy_of_a_clean_model", "", '''
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.last = None
    def forward(self, x):
        y = self.fc(x)
        self.last = y.detach()
        return y
net = Net()
net(torch.randn(3, 2)).sum().backward()
ema = copy.deepcopy(net)
'''),
    Case("own_exception_in_backward", "", '''
class Picky(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, g):
        raise ValueError("not today")
try:
    Picky.apply(torch.randn(2, requires_grad=True)).sum().backward()
except ValueError as error:
    assert type(error) is ValueError and str(error) == "not today"
else:
    raise AssertionError
'''),
]  # fmt: skip
