# /// case
# title = "Codebook updated by moving average before the loss that was computed with it is backpropagated"
# source = "https://github.com/zalandoresearch/pytorch-vq-vae/issues/5"
# outcome = "raises"
# torch_error = "has been modified by an inplace operation"
# cause = "inplace-module-buffer"
# names = ["codebook"]
# fix = "replace the buffer by a new tensor instead of writing into it"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F


def ema_quantizer_forward(owner, z):
    distance = (z.pow(2).sum(1, keepdim=True) - 2 * z @ owner.codebook.t()  # <- related
                + owner.codebook.pow(2).sum(1))
    usage = F.softmax(-distance, dim=1).mean(dim=0)
    usage_loss = (usage * usage.clamp(min=1e-8).log()).sum()
    codes = distance.argmin(dim=1)
    quantized = owner.codebook[codes]
    commitment = F.mse_loss(z, quantized)
    if owner.training:
        owner.update_codes(z, codes)
    return z + (quantized - z).detach(), commitment + 0.1 * usage_loss


class EMAQuantizer(nn.Module):
    def __init__(self, num_codes=16, dim=8, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(num_codes, dim))

    @torch.no_grad()
    def update_codes(self, z, codes):
        onehot = F.one_hot(codes, len(self.codebook)).float()
        count = onehot.sum(dim=0).unsqueeze(1)
        centers = torch.where(count > 0, onehot.t() @ z / count.clamp(min=1), self.codebook)
        self.codebook.mul_(self.decay).add_(centers, alpha=1 - self.decay)  # <- culprit

    def forward(self, z):
        return ema_quantizer_forward(self, z)


def vqvae_forward(owner, x):
    quantized, vq_loss = owner.quantizer(owner.encoder(x))
    return F.mse_loss(owner.decoder(quantized), x) + 0.25 * vq_loss


class VQVAE(nn.Module):
    def __init__(self, in_dim=20, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(in_dim, 48), nn.ReLU(), nn.Linear(48, dim))
        self.quantizer = EMAQuantizer(dim=dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, in_dim))

    def forward(self, x):
        return vqvae_forward(self, x)


def finish_batch(loss, optimizer, step):
    loss.backward()  # <- raises
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}")


def begin_batch(model, x, optimizer):
    loss = model(x)
    optimizer.zero_grad()
    return loss


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(10, 20)[torch.randint(0, 10, (256,))] + 0.1 * torch.randn(256, 20)
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(80):
        loss = begin_batch(model, x, optimizer)
        finish_batch(loss, optimizer, step)
