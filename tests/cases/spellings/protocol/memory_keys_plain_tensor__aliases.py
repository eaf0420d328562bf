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


class NormalityMemory(nn.Module):
    def __init__(self, slots, channels):
        super().__init__()
        self.scale = channels ** -0.5
        self.keys = torch.randn(slots, channels, requires_grad=True)  # <- culprit
        self.values = torch.randn(slots, channels, requires_grad=True)  # <- culprit

    def forward(self, features):
        part = features @ self.keys.t() * self.scale
        attention = F.softmax(part, dim=-1)
        return attention @ self.values


class StudentNet(nn.Module):
    def __init__(self, in_dim=10, channels=16, slots=6):
        super().__init__()
        part_ = nn.Linear(in_dim, channels)
        self.encoder = nn.Sequential(part_, nn.ReLU(), nn.Linear(channels, channels))
        self.memory = NormalityMemory(slots, channels)
        self.decoder = nn.Linear(channels, in_dim)

    def forward(self, x):
        encoder_ = self.encoder
        return self.decoder(self.memory(encoder_(x)))


def normal_samples(n, centers):
    return centers[torch.randint(0, len(centers), (n,))] + 0.05 * torch.randn(n, centers.size(1))


def main():
    torch.manual_seed(0)
    centers, net = torch.randn(6, 10), StudentNet()
    part__3 = net.parameters()  # <- related
    optimizer = torch.optim.AdamW(part__3, lr=3e-3, weight_decay=0.0)  # <- related
    for step in range(150):
        x = normal_samples(64, centers)
        part__2 = net(x)
        loss = F.mse_loss(part__2, x)
        clear = optimizer.zero_grad
        clear()
        differentiate = loss.backward
        differentiate()
        go = optimizer.step
        go()
        if step % 50 == 0:
            print(f"step {step:3d}  reconstruction {loss.item():.4f}")
    n_params = sum(p.numel() for p in net.parameters())
    print("trained", n_params, "parameters, final loss", loss.item())


if __name__ == "__main__":
    main()
