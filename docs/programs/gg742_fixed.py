import lightning
import torch
from torch import nn


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, number):
        output = self.net(batch)
        return {"loss": output.pow(2).mean(), "output": output.detach()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(96, 4), batch_size=8))
