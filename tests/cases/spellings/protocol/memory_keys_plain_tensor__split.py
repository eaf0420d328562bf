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

from memory_keys_plain_tensor__split_parts import StudentNet, normal_samples


def main():
    torch.manual_seed(0)
    centers = torch.randn(6, 10)
    net = StudentNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.0)  # <- related
    for step in range(150):
        x = normal_samples(64, centers)
        loss = F.mse_loss(net(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  reconstruction {loss.item():.4f}")
    n_params = sum(p.numel() for p in net.parameters())
    print("trained", n_params, "parameters, final loss", loss.item())


if __name__ == "__main__":
    main()
