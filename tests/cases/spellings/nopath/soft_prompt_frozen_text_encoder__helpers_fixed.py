import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
DIM, N_CTX, N_CLASSES = 32, 4, 5


def frozen_text_encoder_forward(owner, embeddings):
    return owner.proj(owner.block(embeddings)[:, -1])


class FrozenTextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True)
        self.proj = nn.Linear(DIM, DIM, bias=False)
        self.requires_grad_(False)

    def forward(self, embeddings):
        return frozen_text_encoder_forward(self, embeddings)


def prompt_learner_class_features(owner):
    prompts = torch.cat([owner.context.expand(N_CLASSES, -1, -1), owner.class_names], dim=1)
    features = owner.text_encoder(prompts)
    return F.normalize(features, dim=-1)


def prompt_learner_forward(owner, image_features):
    return 4.0 * image_features @ owner.class_features().t()


class PromptLearner(nn.Module):
    def __init__(self, text_encoder, class_names):
        super().__init__()
        self.text_encoder = text_encoder
        self.context = nn.Parameter(0.02 * torch.randn(1, N_CTX, DIM))
        self.register_buffer("class_names", class_names)

    def class_features(self):
        return prompt_learner_class_features(self)

    def forward(self, image_features):
        return prompt_learner_forward(self, image_features)


def few_shot_batch(prototypes, n=40):
    labels = torch.randint(0, N_CLASSES, (n,))
    return F.normalize(prototypes[labels] + 0.15 * torch.randn(n, DIM), dim=-1), labels


def finish_batch(loss, optimizer, step):
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f}")


def begin_batch(prototypes, model, optimizer):
    image_features, labels = few_shot_batch(prototypes)
    loss = F.cross_entropy(model(image_features), labels)
    optimizer.zero_grad()
    return loss


def main():
    class_names = 0.5 * torch.randn(N_CLASSES, 2, DIM)
    text_encoder = FrozenTextEncoder().eval()
    model = PromptLearner(text_encoder, class_names)
    target_context = 2.0 * torch.randn(1, N_CTX, DIM).expand(N_CLASSES, -1, -1)
    prototypes = F.normalize(text_encoder(torch.cat([target_context, class_names], dim=1)), dim=-1)
    optimizer = torch.optim.Adam([model.context], lr=0.05)
    for step in range(60):
        loss = begin_batch(prototypes, model, optimizer)
        finish_batch(loss, optimizer, step)


main()
