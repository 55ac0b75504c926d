"""A GPT in DeepSpeed's idiom: gradient accumulation, clipping, and the script's own AdamW with two parameter groups."""

import argparse
import json

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_grad
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 24, 32, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.apply(self.initialize)
        self.head.weight = self.tokens.weight

    @staticmethod
    def initialize(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model():
    torch.manual_seed(0)
    return GPT()


def make_data():
    """Arithmetic sequences modulo the vocabulary."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randint(VOCABULARY, (256, 1), generator=generator)
    stride = torch.randint(1, 4, (256, 1), generator=generator)
    return TensorDataset((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY)


def parameter_groups(model):
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def make_optimizer(model):
    return torch.optim.AdamW(parameter_groups(model), lr=3e-3, betas=(0.9, 0.95))


def parse_arguments():
    parser = argparse.ArgumentParser(description="GPT")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = parse_arguments()
    deepspeed.init_distributed()
    model = make_model()
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, optimizer=make_optimizer(model))
    data = make_data()
    sampler = DistributedSampler(data, deepspeed.comm.get_world_size(), deepspeed.comm.get_rank())
    loader = DataLoader(data, engine.train_micro_batch_size_per_gpu(), sampler=sampler)
    watched = engine.module.norm.weight
    total = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (tokens,) in loader:
            tokens = tokens.to(engine.device)
            logits = engine(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            total += loss.item() / engine.gradient_accumulation_steps()
            is_boundary = engine.is_gradient_accumulation_boundary()
            gradient = safe_get_full_grad(watched) if is_boundary else None
            engine.step()
            if is_boundary:
                mean = torch.tensor([total])
                deepspeed.comm.all_reduce(mean)
                total = 0.0
                if deepspeed.comm.get_rank() == 0:
                    norm = engine.get_global_grad_norm()
                    line = {
                        "step": engine.global_steps,
                        "loss": mean.item() / deepspeed.comm.get_world_size(),
                        "grad_norm": None if norm is None else float(norm),
                        "watched": gradient.norm().item(),
                    }
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
