# /// case
# title = "Example weights are differentiated through an optimizer.step()"
# source = "https://github.com/danieltan07/learning-to-reweight-examples/issues/5"
# outcome = "raises"
# torch_error = "appears to not have been used in the graph"
# cause = "unused-input"
# names = ["eps", "meta_optimizer"]
# fix = "make the virtual step out of place, with create_graph=True"
# ///
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call

from reweighting_virtual_step_optimizer__split_parts import example_weights, make_data, per_example_loss

torch.manual_seed(0)


def main():
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x_val, y_val = make_data(64, noise=0.0)
    for step in range(80):
        x, y = make_data(100, noise=0.4)
        w = example_weights(model, x, y, x_val, y_val)
        loss = (w * per_example_loss(model, x, y)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19 or step == 0:
            clean = per_example_loss(model, x_val, y_val).mean().item()
            print(f"step {step} validation loss {clean:.4f}")


if __name__ == "__main__":
    main()
