import torch
import torch.nn as nn
import torch.nn.functional as F


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
        self.codebook = self.decay * self.codebook + (1 - self.decay) * centers

    def forward(self, z):
        distance = (z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codebook.t()
                    + self.codebook.pow(2).sum(1))
        usage = F.softmax(-distance, dim=1).mean(dim=0)
        usage_loss = (usage * usage.clamp(min=1e-8).log()).sum()
        codes = distance.argmin(dim=1)
        quantized = self.codebook[codes]
        commitment = F.mse_loss(z, quantized)
        if self.training:
            self.update_codes(z, codes)
        return z + (quantized - z).detach(), commitment + 0.1 * usage_loss


class VQVAE(nn.Module):
    def __init__(self, in_dim=20, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(in_dim, 48), nn.ReLU(), nn.Linear(48, dim))
        self.quantizer = EMAQuantizer(dim=dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, in_dim))

    def forward(self, x):
        quantized, vq_loss = self.quantizer(self.encoder(x))
        return F.mse_loss(self.decoder(quantized), x) + 0.25 * vq_loss
