"""A model with a tie, a buffer and a frozen layer, and its data: the same wherever they are built."""

import torch
from torch import nn


class Tiny(nn.Module):
    """A model of the next token, of 72 parameters; no size is a multiple of two ranks' alignment."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.frozen = nn.Embedding(7, 3), nn.Linear(3, 5), nn.Linear(5, 6)
        self.back, self.head = nn.Linear(6, 3, bias=False), nn.Linear(3, 7)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens):
        if self.training:
            self.seen += 1
        return self.head(self.back(torch.tanh(self.frozen(torch.tanh(self.mix(self.embedding(tokens)))))))


def built():
    """The model as every rank begins with it."""
    torch.manual_seed(3)
    return Tiny()


def groups(model):
    """Two groups of parameters, with settings of their own."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def loss(model, step, rank):
    """The loss of one rank in one step."""
    tokens = torch.randint(0, 7, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.05, "warmup_num_steps": 6}}
BASE = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5}}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}}, "scheduler": WARMUP}
CASES = {
    "stage0": (0, {}),
    "stage0_bf16": (0, {**BF16, **ADAMW}),
    "stage1": (1, {}),
    "stage2_bf16": (2, {**BF16, **ADAMW}),
    "stage2_fp16": (2, {**FP16, **ADAMW}),
    "stage3": (3, {}),
    "stage3_bf16": (3, {**BF16, **ADAMW}),
}
"""By name: the ZeRO stage, and what is configured; without an optimizer it is torch's AdamW over :func:`groups`."""


def config(case):
    """The configuration of a case, for DeepSpeed and for zerofunc."""
    stage, more = CASES[case]
    return {**BASE, "zero_optimization": {"stage": stage}, **more}


def optimizer(model, case):
    """The optimizer that is not in the configuration, or None."""
    return None if "optimizer" in CASES[case][1] else torch.optim.AdamW(groups(model), lr=0.05)
