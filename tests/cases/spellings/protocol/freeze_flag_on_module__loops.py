# /// case
# title = "module.requires_grad = False is a plain attribute: the layer to be frozen is trained"
# source = "https://github.com/CSCYQJ/MICCAI23-ProtoContra-SFDA/issues/18"
# outcome = "silent"
# torch_error = ""
# cause = "unintended-training"
# names = ["outc"]
# fix = "model.outc.requires_grad_(False)"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F


class SegNet(nn.Module):
    def __init__(self, n_classes=3):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.outc = nn.Conv2d(16, n_classes, 1)

    def forward(self, x):
        f = torch.relu(self.features(x))
        return f, self.outc(f)


def scan(n, offset=0.0):
    label = torch.randint(0, 3, (n, 4, 4)).repeat_interleave(3, 1).repeat_interleave(3, 2)
    return label.unsqueeze(1).float() + offset + 0.2 * torch.randn(n, 1, 12, 12), label


def train_source(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    source_2 = iter(range(80))
    while (item_2 := next(source_2, None)) is not None:
        _ = item_2
        image, label = scan(8)
        loss = F.cross_entropy(model(image)[1], label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("source loss", loss.item())


def adapt(model, steps=40):
    model.outc.requires_grad = False  # <- culprit
    prototypes = model.outc.weight.detach().flatten(1).clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    source_3 = iter(range(steps))
    while (item_3 := next(source_3, None)) is not None:
        step = item_3
        image, _ = scan(8, offset=0.5)
        features, logits = model(image)
        p = logits.softmax(1)
        entropy = -(p * p.clamp_min(1e-6).log()).sum(1).mean()
        pseudo = logits.detach().argmax(1)
        align = 1 - F.cosine_similarity(features.movedim(1, -1), prototypes[pseudo], dim=-1).mean()
        loss = entropy + 0.1 * align
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(step, "entropy", round(entropy.item(), 4), "alignment", round(align.item(), 4))


torch.manual_seed(0)
model = SegNet()
train_source(model)
adapt(model)
