# /// case
# title = "Stochastic binariser's backward returns one gradient for two inputs"
# source = "https://github.com/1zb/pytorch-image-comp-rnn/issues/4"
# outcome = "raises"
# torch_error = "returned an incorrect number of gradients (expected 2, got 1)"
# cause = "gradient-count-mismatch"
# names = ["StochasticSign", "backward", "training"]
# fix = "return None for the non-tensor argument"
# ///
import torch
from torch import nn

from binarizer_missing_none__split_parts import PatchCodec, patches


def main():
    torch.manual_seed(0)
    codec = PatchCodec()
    solver = torch.optim.Adam(codec.parameters(), lr=2e-3)
    for step in range(150):
        batch = patches(16)
        residual = (codec(batch) - batch).abs().mean()
        solver.zero_grad()
        residual.backward()  # <- raises
        solver.step()
        if step % 30 == 0:
            print(f"{step:4d} l1 {residual.item():.4f}")


if __name__ == "__main__":
    main()
