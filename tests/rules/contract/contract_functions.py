"""Custom Functions and hooks that break their contract."""

from __future__ import annotations

from contract_case import Case

FUNCTIONS = [
    Case("relu_in_place_unmarked", "GG407", '''
class InplaceRelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.clamp_(min=0)  # <<
        ctx.save_for_backward(x)
        return x
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * (x > 0)

net = nn.Linear(3, 3)
h = InplaceRelu.apply(net(torch.randn(2, 3)))
h += 1
h.sum().backward()
''', ("InplaceRelu", "x", "mark_dirty")),
    Case("gradient_reversal_then_in_place", "GG407", '''
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return -ctx.lam * g, None

class Domain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
    def forward(self, feats):
        rev = Reverse.apply(feats, 0.5)
        rev.mul_(2)  # <<
        return self.fc(rev)
enc, dom = nn.Linear(4, 3), Domain()
dom(enc(torch.randn(5, 4))).sum().backward()
''', ("Reverse", "rev")),
    Case("numpy_backward", "GG407", '''
class Sinc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        grad = g.numpy() * np.cos(x.detach().numpy())
        return grad  # <<

net = nn.Linear(2, 2)
Sinc.apply(net(torch.randn(3, 2))).sum().backward()
''', ("Sinc", "ndarray")),
    Case("saves_a_number", "GG407", '''
class Pow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.save_for_backward(x, n)  # <<
        return x ** n
    @staticmethod
    def backward(ctx, g):
        x, n = ctx.saved_tensors
        return g * n * x ** (n - 1), None
Pow.apply(torch.randn(3, requires_grad=True), 3).sum().backward()
''', ("Pow", "n")),
    Case("called_like_a_layer", "GG407", '''
class Sq(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x ** 2
    @staticmethod
    def backward(ctx, g):
        return g
x = torch.randn(3, requires_grad=True)
y = Sq()(x)  # <<
''', ("Sq", "apply")),
    Case("second_derivative_misses_a_term", "GG407", '''
class Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        s = torch.sigmoid(z)
        ctx.gate = s  # <<
        return F.softplus(z)
    @staticmethod
    def backward(ctx, g):
        return g * ctx.gate

class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(2, 8), nn.Linear(8, 1)
    def forward(self, x):
        return self.l2(Softplus.apply(self.l1(x))).sum()
net = Energy()
opt = torch.optim.Adam(net.parameters())
for step in range(3):
    pos = torch.randn(5, 2, requires_grad=True)
    force, = torch.autograd.grad(net(pos), pos, create_graph=True)
    loss = (force + pos).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
''', ("Softplus", "gate")),
    Case("swish_keeps_its_sigmoid", "GG407", '''
class SwishFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.sig = x.sigmoid()  # <<
        return x * ctx.sig
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * (ctx.sig + x * ctx.sig * (1 - ctx.sig))
critic = nn.Sequential(nn.Linear(2, 6))
out = nn.Linear(6, 1)
x = torch.randn(4, 2, requires_grad=True)
score = out(SwishFn.apply(critic(x)))
g, = torch.autograd.grad(score.sum(), x, create_graph=True)
penalty = (g.norm(dim=1) - 1).pow(2).mean()
penalty.backward()
''', ("SwishFn", "sig")),
    Case("tensor_hook_changes_the_shape", "GG408", '''
net = nn.Linear(3, 3)
def average(grad):
    return grad.mean(0)  # <<
out = net(torch.randn(4, 3))
out.register_hook(average)
out.sum().backward()
''', ("average", "out", "register_hook")),
    Case("parameter_hook_returns_a_number", "GG408", '''
net = nn.Linear(3, 3)
norms = []
def log_norm(grad):
    value = grad.norm().item()
    norms.append(value)
    return value  # <<
net.weight.register_hook(log_norm)
net(torch.randn(2, 3)).sum().backward()
''', ("log_norm", "net.weight")),
    Case("module_hook_returns_a_bare_tensor", "GG408", '''
class Clip:
    def __init__(self, limit):
        self.limit = limit
    def attach(self, module):
        module.register_full_backward_hook(self.clip)
    def clip(self, module, grad_input, grad_output):
        return grad_input[0].clamp(-self.limit, self.limit)  # <<
net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
clip = Clip(0.1)
clip.attach(net[2])
net(torch.randn(7, 4)).pow(2).mean().backward()
''', ("clip", "register_full_backward_hook", "7")),
    Case("hook_in_half_precision", "GG408", '''
net = nn.Linear(3, 3)
h = net(torch.randn(4, 3))
h.register_hook(lambda g: g.half())  # <<
h.sum().backward()
''', ("h",)),
    Case("hooked_relu_in_place", "GG408", '''
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 2, 3),
            nn.ReLU(inplace=True),  # <<
            nn.Conv2d(2, 2, 3),
        )
    def forward(self, x):
        return self.body(x)
net = Net()
def seen(module, gi, go):
    pass
for m in net.modules():
    if isinstance(m, nn.Conv2d):
        m.register_full_backward_hook(seen)
net(torch.randn(1, 1, 8, 8)).sum().backward()
''', ("ReLU", "register_full_backward_hook")),
    Case("grad_cam_target_written", "GG408", '''
class Cam:
    def __init__(self, layer):
        self.grads = None
        layer.register_full_backward_hook(self.save)
    def save(self, module, gi, go):
        self.grads = go[0]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 3, 3)
        self.fc = nn.Linear(3, 2)
    def forward(self, x):
        maps = self.features(x)
        maps.relu_()  # <<
        return self.fc(maps.mean((2, 3)))
net = Net()
cam = Cam(net.features)
net(torch.randn(2, 1, 6, 6)).sum().backward()
''', ("maps", "features", "register_full_backward_hook")),
    Case("hook_on_what_has_no_gradient", "GG408", '''
net = nn.Linear(2, 2)
feats = net(torch.randn(3, 2)).detach()
feats.register_hook(print)  # <<
''', ("feats", "register_hook")),
]  # fmt: skip
