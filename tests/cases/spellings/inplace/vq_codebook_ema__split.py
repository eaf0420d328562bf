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

from vq_codebook_ema__split_parts import VQVAE


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(10, 20)[torch.randint(0, 10, (256,))] + 0.1 * torch.randn(256, 20)
    model = VQVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(80):
        loss = model(x)
        optimizer.zero_grad()
        loss.backward()  # <- raises
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")
