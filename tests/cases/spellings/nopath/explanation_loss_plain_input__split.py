# /// case
# title = "Explanation loss differentiates the scores by an input that does not require grad"
# source = "https://github.com/PAIR-code/saliency/issues/84"
# outcome = "raises"
# torch_error = "One of the differentiated Tensors does not require grad"
# cause = "input-without-requires-grad"
# also = ["all-frozen", "unused-input"]
# names = ["x"]
# fix = "x.requires_grad_(True) before the forward pass"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

from explanation_loss_plain_input__split_parts import TabularNet, confounded_batch, right_reasons_loss

torch.manual_seed(0)


def main():
    model = TabularNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    irrelevant = torch.zeros(10)
    irrelevant[9] = 1.0
    for step in range(150):
        x, y = confounded_batch()  # <- related
        loss, reason = right_reasons_loss(model, x, y, irrelevant)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"step {step} reason {reason.item():.4f} loss {loss.item():.4f}")


main()
