# /// case
# title = "Epoch loss is summed up and backpropagated for every batch"
# source = "https://discuss.pytorch.org/t/runtimeerror-trying-to-backward-through-the-graph-a-second-time-but-the-buffers-have-already-been-freed-specify-retain-graph-true-when-calling-backward-the-first-time/6795/2"
# outcome = "raises"
# torch_error = "Trying to backward through the graph a second time"
# cause = "graph-freed-accumulated-loss"
# names = ["total_loss"]
# fix = "backward on the batch loss, accumulate loss.item()"
# ///
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from running_total_loss_backward__split_parts import SmallConvNet, make_dataset, train_one_epoch

torch.manual_seed(0)


if __name__ == "__main__":
    loader = DataLoader(make_dataset(), batch_size=32, shuffle=True)
    model = SmallConvNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(5):
        mean_loss = train_one_epoch(model, loader, nn.CrossEntropyLoss(), optimizer)
        print(f"epoch {epoch} loss {float(mean_loss):.4f}")
