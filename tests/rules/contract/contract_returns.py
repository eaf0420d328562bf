"""Gradients of a wrong shape: of several returns the one that ran, and parameters whose `.data` has another shape than the graph."""

from __future__ import annotations

from contract_case import Case

_GATE = """
class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(x, rows)
        ctx.few = len(rows) < 2
        return x[rows] * 2
    @staticmethod
    def backward(ctx, grad):
"""
_RUN = """
net = nn.Linear(3, 3)
Gate.apply(net(torch.randn(5, 3)), torch.tensor({rows}, dtype=torch.long)).sum().backward()
"""
_WHOLE = """
        full = torch.zeros_like(x)
        full[rows] = 2 * grad
        return full, None
"""

RETURNS = [
    Case(
        "early_return_for_no_rows",
        "GG402",
        _GATE
        + """
        x, rows = ctx.saved_tensors
        if rows.numel() == 0:
            return x[rows], None  # <<
"""
        + _WHOLE
        + _RUN.format(rows=[]),
        ("Gate", "zeros_like"),
    ),
    Case(
        "flag_on_ctx_decides",
        "GG402",
        _GATE
        + """
        x, rows = ctx.saved_tensors
        if not ctx.few:
            full = torch.zeros_like(x)
            full[rows] = 2 * grad
            return full, None
        else:
            part = 2 * grad  # <<
            return part, None
"""
        + _RUN.format(rows=[1]),
        ("Gate", "part"),
    ),
    Case(
        "the_shape_decides_where_the_condition_is_not_known",
        "GG402",
        _GATE
        + """
        x, rows = ctx.saved_tensors
        if grad.abs().sum() > 1e-3:
            return 2 * grad, None  # <<
"""
        + _WHOLE
        + _RUN.format(rows=[1, 2]),
        ("Gate",),
    ),
    Case(
        "a_name_bound_in_the_branch_that_ran",
        "GG402",
        _GATE
        + """
        x, rows = ctx.saved_tensors
        if len(rows) < 3:
            result = grad * 2  # <<
        else:
            result = torch.zeros_like(x)
            result[rows] = grad * 2
        return result, None
"""
        + _RUN.format(rows=[1, 2]),
        ("Gate", "result"),
    ),
    Case(
        "data_of_another_shape",
        "GG402",
        """
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
for step in range(3):
    loss = net(torch.randn(4, 6)).pow(2).mean()
    loss.backward()
    net.zero_grad()
    if step == 1:
        keep = net[0].weight.detach().norm(dim=1).argsort()[:5]
        net[0].weight = nn.Parameter(net[0].weight[keep])
        net[0].bias = nn.Parameter(net[0].bias[keep])
        net[2].weight.data = net[2].weight.data[:, keep]  # <<
""",
        ("data", "nn.Parameter"),
    ),
    Case(
        "data_of_another_shape_in_a_loop",
        "GG402",
        """
net = nn.Conv1d(3, 6, 3)
history = []
def shrink(module, left):
    for p in module.parameters():
        p.data = p.data[:left].clone()  # <<
for step in range(3):
    history.append(net(torch.randn(2, 3, 8)).pow(2).mean())
    history[-1].backward()
    net.zero_grad(set_to_none=True)
    if step == 0:
        shrink(net, 4)
""",
        ("data",),
    ),
    Case(
        "data_of_another_shape_of_a_method",
        "GG402",
        """
class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(6, 3))
    def forward(self):
        return self.rows.pow(2).sum()
    def prune(self):
        kept = self.rows.detach()[::2]
        self.rows.data = kept  # <<
table = Table()
loss = table()
loss.backward()
table.rows.grad = None
table.prune()
new = table()
new.backward()
""",
        ("rows", "data"),
    ),
    Case(
        "gradient_of_the_old_shape_is_still_there",
        "GG402",
        """
net = nn.Linear(4, 6)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    net(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
    net.weight.data, net.bias.data = net.weight.data[:4].clone(), net.bias.data[:4].clone()  # <<
""",
        ("net.", "grad"),
    ),
    Case(
        "gradient_of_the_old_shape_of_a_method",
        "GG402",
        """
class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(6))
    def grow(self):
        self.rows.data = torch.cat([self.rows.data, torch.zeros(1)])  # <<
table = Table()
for _ in range(3):
    table.rows.pow(2).sum().backward()
    table.grow()
""",
        ("rows", "grad = None"),
    ),
    Case(
        "gradient_of_the_old_shape_in_a_loop",
        "GG402",
        """
def pruned(parameters, left):
    for p in parameters:
        p.data = p.data[:left].clone()  # <<
weights = [nn.Parameter(torch.randn(6, 3)) for _ in range(2)]
def run():
    for step in range(3):
        sum(w.exp().sum() for w in weights).backward()
        pruned(weights, 5 - step)
run()
""",
        ("data", "backward"),
    ),
]

SOUND_RETURNS = [
    Case(
        "data_of_another_shape_after_the_graph_is_gone",
        "",
        """
net = nn.Linear(4, 6)
for step in range(3):
    net(torch.randn(2, 4)).sum().backward()
    net.zero_grad(set_to_none=True)
    net.weight.data = net.weight.data[: 5 - step].clone()
    net.bias.data = net.bias.data[: 5 - step].clone()
""",
    ),
    Case(
        "gradient_cleared_with_the_shape",
        "",
        """
rows = nn.Parameter(torch.randn(6))
for _ in range(3):
    rows.pow(2).sum().backward()
    rows.data = torch.cat([rows.data, torch.zeros(1)])
    rows.grad = None
""",
    ),
    Case(
        "a_hook_fails_beside_a_gradient_of_the_old_shape",
        "",
        """
rows = nn.Parameter(torch.randn(3))
rows.pow(2).sum().backward()
rows.data = torch.zeros(4)
loss = rows.pow(2)
loss.register_hook(lambda grad: torch.ones(3) * torch.ones(4))
try:
    loss.sum().backward()
except RuntimeError:
    pass
""",
    ),
    Case(
        "no_rows_and_zeros_for_them",
        "",
        _GATE
        + """
        x, rows = ctx.saved_tensors
        if rows.numel() == 0:
            return torch.zeros_like(x), None
"""
        + _WHOLE
        + _RUN.format(rows=[]),
    ),
]
