"""Tensors of dtypes (and devices) that do not go together."""

from __future__ import annotations

from contract_case import Case

DTYPES = [
    Case("targets_from_numpy", "GG404", '''
class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.x = np.random.rand(8, 3)
        self.y = np.random.rand(8, 1)
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return torch.tensor(self.x[i], dtype=torch.float32), torch.tensor(self.y[i])  # <<
net = nn.Linear(3, 1)
loader = torch.utils.data.DataLoader(Data(), batch_size=4)
criterion = nn.HuberLoss()
for inputs, target in loader:
    loss = criterion(net(inputs), target)
    loss.backward()
''', ("target", "float64")),
    Case("rows_of_a_dataset_in_a_nested_encoder", "GG404", '''
class Table(torch.utils.data.Dataset):
    def __init__(self, counts, flags):
        self.counts, self.flags = np.log1p(counts), flags.astype(np.float32)
    def __len__(self):
        return len(self.counts)
    def __getitem__(self, i):
        return torch.from_numpy(self.flags[i]), torch.from_numpy(self.counts[i])  # <<
class Encoder(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 4), nn.ReLU())
    def forward(self, x):
        return self.layers(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.flags, self.counts = Encoder(2), Encoder(3)
    def forward(self, flags, counts):
        return self.flags(flags) + self.counts(counts)
class Fitter:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
    def fit(self):
        for flags, counts in self.loader:
            self.model(flags, counts).mean().backward()
table = Table(np.random.poisson(3.0, (8, 3)), np.random.rand(8, 2) < 0.5)
Fitter(Model(), torch.utils.data.DataLoader(torch.utils.data.Subset(table, range(6)), batch_size=3)).fit()
''', ("counts", "counts.layers", "float64", "__getitem__")),
    Case("doubles_of_unknown_origin_enter_a_model", "GG404", '''
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    def forward(self, x):
        return self.layers(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(4, 1)
    def forward(self, image):
        return self.head(self.encoder(image))
def read(count):
    yield from map(torch.from_numpy, np.random.rand(count, 5, 3))
model = Model()
for frames in read(3):
    model(frames).mean().backward()  # <<
''', ("frames.float()", "float64")),
    Case("one_layer_in_another_dtype_is_no_matter_of_the_inputs", "GG404", '''
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(3, 4, dtype=torch.float64)
    def forward(self, x):
        return self.layers(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(3, 1)
    def forward(self, image):
        return self.head(image) + self.encoder(image).sum()  # <<
model = Model()
def read(count):
    yield from map(torch.from_numpy, np.random.default_rng(0).random((count, 5, 3), np.float32))
for frames in read(3):
    model(frames).mean().backward()
''', ("image.double()", "encoder.layers", "float32")),
    Case("inputs_from_numpy_in_a_layer", "GG404", '''
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 4), nn.Linear(4, 1)
    def forward(self, x):
        h = F.relu(self.fc1(x))
        return self.fc2(h)
features = np.random.randn(10, 3)
data = torch.from_numpy(features)  # <<
net = Net()
for epoch in range(2):
    net(data).mean().backward()
''', ("data", "float64")),
    Case("class_labels_as_floats", "GG404", '''
def batch():
    x = torch.randn(6, 3)
    labels = torch.zeros(6)  # <<
    labels[3:] = 1
    return x, labels
net = nn.Linear(3, 2)
x, labels = batch()
loss = F.cross_entropy(net(x), labels)
loss.backward()
''', ("labels", "int64")),
    Case("mask_as_bce_target", "GG404", '''
net = nn.Linear(3, 1)
x = torch.randn(6, 3)
target = (x.sum(1, keepdim=True) > 0).long()  # <<
loss = F.binary_cross_entropy(torch.sigmoid(net(x)), target)
loss.backward()
''', ("target", "int64", "binary_cross_entropy")),
    Case("one_hot_soft_targets", "GG404", '''
net = nn.Linear(3, 4)
labels = torch.randint(0, 4, (5,))
soft = F.one_hot(labels, 4)  # <<
loss = nn.CrossEntropyLoss(label_smoothing=0.1)(net(torch.randn(5, 3)), soft)
loss.backward()
''', ("soft",)),
    Case("tensor_dataset", "GG404", '''
from torch.utils.data import DataLoader, TensorDataset
X = np.random.rand(8, 3).astype(np.float32)
Y = np.random.randint(0, 2, size=(8, 1))
ds = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))  # <<
net = nn.Linear(3, 1)
for xb, yb in DataLoader(ds, batch_size=4):
    F.binary_cross_entropy_with_logits(net(xb), yb).backward()
''', ("yb", "int64")),
    Case("embedding_of_float_tokens", "GG404", '''
emb = nn.Embedding(10, 4)
tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # <<
emb(tokens).sum().backward()
''', ("tokens", "float32")),
    Case("state_in_double", "GG404", '''
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.i, self.h = nn.Linear(2, 3), nn.Linear(3, 3)
    def init(self, n):
        return torch.zeros(n, 3, dtype=torch.float64)  # <<
    def forward(self, x, h):
        return torch.tanh(self.i(x) + self.h(h))
cell = Cell()
h = cell.init(4)
for t in range(2):
    h = cell(torch.randn(4, 2), h)
h.sum().backward()
''', ("h", "float64")),
    Case("weights_matrix_product", "GG404", '''
basis = torch.as_tensor(np.eye(3))  # <<
coef = nn.Parameter(torch.randn(4, 3))
out = coef @ basis
out.sum().backward()
''', ("basis", "float64")),
    Case("rewards_written_into_a_buffer", "GG404", '''
advantage = torch.tensor([1, 0, 2])  # <<
baseline = torch.rand(3)
advantage -= baseline
''', ("advantage",)),
    Case("loss_in_another_function", "GG404", '''
def smooth(pred, truth):
    return F.huber_loss(pred, truth, delta=0.5)
def train(net, steps):
    truth = torch.arange(5).unsqueeze(1)  # <<
    for _ in range(steps):
        loss = smooth(net(torch.randn(5, 2)), truth)
        loss.backward()
train(nn.Linear(2, 1), 2)
''', ("truth", "int64")),
    Case("plain_attribute_left_behind", "GG405", '''
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.scale = torch.ones(3)  # <<
    def forward(self, x):
        return self.fc(x) * self.scale
net = Scaled().to("meta")
net(torch.randn(2, 3, device="meta")).sum().backward()
''', ("self.scale", "meta")),
    Case("batch_not_moved", "GG405", '''
net = nn.Linear(3, 1).to("meta")
def epoch():
    for _ in range(2):
        batch = torch.randn(4, 3)  # <<
        net(batch).sum().backward()
epoch()
''', ("batch", "cpu")),
]  # fmt: skip
