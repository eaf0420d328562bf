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

torch.manual_seed(0)
DIM, N_CTX, N_CLASSES = 32, 4, 5


class FrozenTextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True)
        self.proj = nn.Linear(DIM, DIM, bias=False)
        requires_grad__ = self.requires_grad_
        requires_grad__(False)

    def forward(self, embeddings):
        block_ = self.block
        return self.proj(block_(embeddings)[:, -1])


class PromptLearner(nn.Module):
    def __init__(self, text_encoder, class_names):
        super().__init__()
        self.text_encoder = text_encoder
        part = 0.02 * torch.randn(1, N_CTX, DIM)
        self.context = nn.Parameter(part)
        register_buffer_ = self.register_buffer
        register_buffer_("class_names", class_names)

    def class_features(self):
        expand_ = self.context.expand
        prompts = torch.cat([expand_(N_CLASSES, -1, -1), self.class_names], dim=1)
        with torch.no_grad():  # <- culprit
            text_encoder_ = self.text_encoder
            features = text_encoder_(prompts)
        return F.normalize(features, dim=-1)

    def forward(self, image_features):
        part_ = 4.0 * image_features
        return part_ @ self.class_features().t()


def few_shot_batch(prototypes, n=40):
    labels = torch.randint(0, N_CLASSES, (n,))
    part__2 = F.normalize(prototypes[labels] + 0.15 * torch.randn(n, DIM), dim=-1)
    return part__2, labels


def main():
    class_names = 0.5 * torch.randn(N_CLASSES, 2, DIM)
    part__4 = FrozenTextEncoder()
    text_encoder = part__4.eval()
    model = PromptLearner(text_encoder, class_names)
    prototypes = F.normalize(text_encoder(torch.cat([(target_context := 2.0 * torch.randn(1, N_CTX, DIM).expand(N_CLASSES, -1, -1)), class_names], dim=1)), dim=-1)
    optimizer = torch.optim.Adam([model.context], lr=0.05)
    for step in range(60):
        image_features, labels = few_shot_batch(prototypes)
        part__3 = model(image_features)
        loss = F.cross_entropy(part__3, labels)
        clear = optimizer.zero_grad
        clear()
        differentiate = loss.backward  # <- raises
        differentiate()  # <- raises
        go = optimizer.step
        go()
        if step % 15 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
