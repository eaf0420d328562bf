"""Class numbers and indices that come as floats, integers that are to require grad: which tensor it is, and where it became so."""

from __future__ import annotations

from contract_case import Case

_NET = "net = nn.Linear(4, 3)\nx = torch.randn(5, 4)\n"

TARGETS = [
    Case(
        "float_targets_of_a_loss_module",
        "GG404",
        _NET
        + """
y = torch.tensor([0., 1., 2., 1., 0.])  # <<
out = net(x)
loss = nn.CrossEntropyLoss(label_smoothing=0.1)(out, y)
""",
        ("`y` is float32", ".long()"),
    ),
    Case(
        "float_targets_cast_in_numpy",
        "GG404",
        _NET
        + """
labels = np.arange(5).astype("float32")  # <<
targets = torch.from_numpy(labels)
scores = net(x)
F.nll_loss(F.log_softmax(scores, 1), targets).backward()
""",
        ("targets", ".long()"),
    ),
    Case(
        "float_targets_of_a_loader",
        "GG404",
        _NET
        + """
from torch.utils.data import DataLoader, TensorDataset
class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.criterion = nn.Linear(4, 3), nn.NLLLoss()
    def forward(self, x, target):
        return self.criterion(F.log_softmax(self.body(x), 1), target=target)
data = TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)).float())  # <<
task = Task()
for rows, wanted in DataLoader(data, batch_size=4):
    task(rows, wanted).backward()
""",
        ("target", ".long()"),
        False,
    ),
    Case(
        "float_targets_in_the_call",
        "GG404",
        _NET
        + """
h = net(x)
F.multi_margin_loss(h, torch.ones(5)).backward()  # <<
""",
        ("int64",),
        False,
    ),
    Case(
        "float_indices_of_gather",
        "GG404",
        _NET
        + """
picked = torch.ones(5, 1)  # <<
q = net(x)
chosen = q.gather(1, picked)
""",
        ("`picked` is float32", ".long()"),
        False,
    ),
    Case(
        "float_indices_of_index_select",
        "GG404",
        _NET
        + """
table = net(x)
rows = torch.linspace(0, 4, 3)  # <<
part = torch.index_select(table, 0, rows)
""",
        ("rows", ".long()"),
        False,
    ),
    Case(
        "float_indices_in_brackets",
        "GG404",
        _NET
        + """
table = net(x)
order = torch.tensor([1.0, 0.0])  # <<
part = table[order]
""",
        ("order", ".long()"),
        False,
    ),
    Case(
        "float_indices_of_an_embedding",
        "GG404",
        """
words = nn.Embedding(10, 3)
tokens = torch.tensor([[1.0, 2.0]])  # <<
words(tokens).sum().backward()
""",
        ("tokens", ".long()"),
    ),
    Case(
        "scores_rounded_to_classes",
        "GG404",
        _NET
        + """
predicted = net(x).argmax(1)  # <<
F.cross_entropy(predicted, torch.tensor([0, 1, 2, 0, 1])).backward()
""",
        ("predicted", "argmax"),
        False,
    ),
    Case(
        "integers_told_to_require_grad",
        "GG404",
        """
steps = torch.tensor([1, 2, 3])  # <<
steps.requires_grad = True
""",
        ("steps", "int64"),
        False,
    ),
    Case(
        "integers_made_to_require_grad",
        "GG404",
        """
scale = torch.zeros(3, dtype=torch.int32, requires_grad=True)  # <<
""",
        ("int32", "torch.float32"),
        False,
    ),
    Case(
        "integers_drawn_as_real_numbers",
        "GG404",
        """
noise = torch.randn(3, dtype=torch.long)  # <<
""",
        ("randn", "int64"),
        False,
    ),
]

SOUND_TARGETS = [
    Case(
        "probabilities_and_class_numbers",
        "",
        _NET
        + """
F.cross_entropy(net(x), torch.softmax(torch.randn(5, 3), 1)).backward()
y = torch.tensor([0.0, 1, 2, 1, 0])
F.cross_entropy(net(x), y.long()).backward()
net(x).gather(1, y.long()[:, None]).sum().backward()
F.smooth_l1_loss(net(x)[:, 0], y).backward()
""",
    ),
]
