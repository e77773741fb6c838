"""A PyTorch Lightning program: its DDP strategy asks for gloo on a CPU."""

import os
import sys

import pytorch_lightning as lightning
import torch


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        data, target = batch
        loss = torch.nn.functional.cross_entropy(self.layers(data), target)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


lightning.seed_everything(1)
samples = torch.utils.data.TensorDataset(torch.randn(256, 20), torch.randint(3, (256,)))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Classifier()
trainer.fit(model, torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True))
assert torch.distributed.get_backend() == "gloo"
if trainer.is_global_zero:
    torch.save({**model.state_dict(), "loss": trainer.callback_metrics["loss"]}, sys.argv[1])
if type(torch.distributed.group.WORLD).__name__ == "ProcessGroup":
    os._exit(
        0
    )  # Gloo's own threads may abort a process that ends (torch 2.13); ours must not need this
