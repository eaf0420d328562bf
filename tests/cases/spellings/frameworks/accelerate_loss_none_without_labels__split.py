# /// case
# title = "The batch has 'label' instead of 'labels', so the model returns no loss"
# source = "https://github.com/huggingface/accelerate/issues/1366"
# outcome = "raises"
# torch_error = "unsupported operand type(s) for /: 'NoneType' and 'int'"
# cause = "transformers-no-loss"
# names = ["label", "labels", "loss"]
# fix = "pass the targets under the name 'labels'"
# needs = ["accelerate", "transformers"]
# ///
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from accelerate_loss_none_without_labels__split_parts import collate, encode, forward


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    config = DistilBertConfig(vocab_size=40, dim=32, n_layers=1, n_heads=2, hidden_dim=64,
                              max_position_embeddings=16, num_labels=2)
    model = DistilBertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(encode(), batch_size=16, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for epoch in range(6):
        for batch in loader:
            outputs = forward(model, batch)
            accelerator.backward(outputs.loss)  # <- raises
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {outputs.loss.item():.3f}")


if __name__ == "__main__":
    main()
