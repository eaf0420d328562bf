# /// case
# title = "Memory module: keys and values are plain tensors and stay at their random initial values"
# source = "https://github.com/SimonThomine/RememberingNormality/issues/7"
# outcome = "silent"
# torch_error = ""
# cause = "optimizer-missing-parameters"
# names = ["keys", "values"]
# fix = "wrap them in nn.Parameter"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F


def normality_memory_forward(owner, features):
    attention = F.softmax(features @ owner.keys.t() * owner.scale, dim=-1)
    return attention @ owner.values


class NormalityMemory(nn.Module):
    def __init__(self, slots, channels):
        super().__init__()
        self.scale = channels ** -0.5
        self.keys = torch.randn(slots, channels, requires_grad=True)  # <- culprit
        self.values = torch.randn(slots, channels, requires_grad=True)  # <- culprit

    def forward(self, features):
        return normality_memory_forward(self, features)


def student_net_forward(owner, x):
    return owner.decoder(owner.memory(owner.encoder(x)))


class StudentNet(nn.Module):
    def __init__(self, in_dim=10, channels=16, slots=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(in_dim, channels), nn.ReLU(), nn.Linear(channels, channels))
        self.memory = NormalityMemory(slots, channels)
        self.decoder = nn.Linear(channels, in_dim)

    def forward(self, x):
        return student_net_forward(self, x)


def normal_samples(n, centers):
    return centers[torch.randint(0, len(centers), (n,))] + 0.05 * torch.randn(n, centers.size(1))


def finish_batch(loss, optimizer, step):
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3d}  reconstruction {loss.item():.4f}")


def begin_batch(centers, net, optimizer):
    x = normal_samples(64, centers)
    loss = F.mse_loss(net(x), x)
    optimizer.zero_grad()
    return loss


def main():
    torch.manual_seed(0)
    centers = torch.randn(6, 10)
    net = StudentNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.0)  # <- related
    for step in range(150):
        loss = begin_batch(centers, net, optimizer)
        finish_batch(loss, optimizer, step)
    n_params = sum(p.numel() for p in net.parameters())
    print("trained", n_params, "parameters, final loss", loss.item())


if __name__ == "__main__":
    main()
