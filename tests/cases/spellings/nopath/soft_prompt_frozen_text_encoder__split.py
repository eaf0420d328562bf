# /// case
# title = "Learned prompt is passed through the frozen text encoder under no_grad"
# source = "https://github.com/raoyongming/DenseCLIP/issues/5"
# outcome = "raises"
# torch_error = "element 0 of tensors does not require grad and does not have a grad_fn"
# cause = "no-grad-mode"
# names = ["context", "class_features"]
# fix = "freeze with requires_grad_(False) only, run the encoder with grad"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

from soft_prompt_frozen_text_encoder__split_parts import DIM, FrozenTextEncoder, N_CLASSES, N_CTX, PromptLearner, few_shot_batch

torch.manual_seed(0)


def main():
    class_names = 0.5 * torch.randn(N_CLASSES, 2, DIM)
    text_encoder = FrozenTextEncoder().eval()
    model = PromptLearner(text_encoder, class_names)
    target_context = 2.0 * torch.randn(1, N_CTX, DIM).expand(N_CLASSES, -1, -1)
    prototypes = F.normalize(text_encoder(torch.cat([target_context, class_names], dim=1)), dim=-1)
    optimizer = torch.optim.Adam([model.context], lr=0.05)
    for step in range(60):
        image_features, labels = few_shot_batch(prototypes)
        loss = F.cross_entropy(model(image_features), labels)
        optimizer.zero_grad()
        loss.backward()  # <- raises
        optimizer.step()
        if step % 15 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
