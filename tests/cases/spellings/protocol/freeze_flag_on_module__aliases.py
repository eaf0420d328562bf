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
        part = nn.Conv2d(1, 16, 3, padding=1)
        self.features = nn.Sequential(part, nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.outc = nn.Conv2d(16, n_classes, 1)

    def forward(self, x):
        part_ = self.features(x)
        f = torch.relu(part_)
        return f, self.outc(f)


def scan(n, offset=0.0):
    part__2 = torch.randint(0, 3, (n, 4, 4)).repeat_interleave(3, 1)
    label = part__2.repeat_interleave(3, 2)
    unsqueeze_ = label.unsqueeze
    return unsqueeze_(1).float() + offset + 0.2 * torch.randn(n, 1, 12, 12), label


def train_source(model):
    parameters_ = model.parameters
    optimizer = torch.optim.Adam(parameters_(), lr=5e-3)
    for _ in range(80):
        image, label = scan(8)
        part__3 = model(image)
        loss = F.cross_entropy(part__3[1], label)
        clear = optimizer.zero_grad
        clear()
        differentiate = loss.backward
        differentiate()
        go = optimizer.step
        go()
    print("source loss", loss.item())


def adapt(model, steps=40):
    model.outc.requires_grad = False  # <- culprit
    prototypes, optimizer = model.outc.weight.detach().flatten(1).clone(), torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        image, _ = scan(8, offset=0.5)
        features, logits = model(image)
        softmax_ = logits.softmax
        p = softmax_(1)
        part__4 = (p * p.clamp_min(1e-6).log()).sum(1).mean()
        entropy = -part__4
        detach_ = logits.detach
        pseudo = detach_().argmax(1)
        align = 1 - F.cosine_similarity(features.movedim(1, -1), prototypes[pseudo], dim=-1).mean()
        loss = entropy + 0.1 * align
        clear_ = optimizer.zero_grad
        clear_()
        differentiate_ = loss.backward
        differentiate_()
        go_ = optimizer.step
        go_()
        if step % 10 == 0:
            print(step, "entropy", round(entropy.item(), 4), "alignment", round(align.item(), 4))


torch.manual_seed(0)
train_source((model := SegNet()))
adapt(model)
