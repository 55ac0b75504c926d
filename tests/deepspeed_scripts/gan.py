"""A GAN in DeepSpeed's idiom: two engines, of which the second one's loss goes through the first one's module."""

import argparse
import json

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

BATCH, NOISE, WIDTH = 16, 4, 32


def make_generator():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(NOISE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def make_discriminator():
    torch.manual_seed(1)
    layers = [nn.Linear(2, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1)]
    return nn.Sequential(*layers)


def real_points(step, rank):
    """Points near a circle."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    angles = 2 * torch.pi * torch.rand(BATCH, generator=generator)
    points = torch.stack([angles.cos(), angles.sin()], 1)
    return points + 0.05 * torch.randn(BATCH, 2, generator=generator), torch.randn(BATCH, NOISE, generator=generator)


def loss_of(logits, is_real):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def parse_arguments():
    parser = argparse.ArgumentParser(description="GAN")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=20)
    deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = parse_arguments()
    deepspeed.init_distributed()
    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    model_d, model_g = make_discriminator(), make_generator()
    engine_d, _, _, _ = deepspeed.initialize(args=args, model=model_d, model_parameters=model_d.parameters())
    engine_g, _, _, _ = deepspeed.initialize(args=args, model=model_g, model_parameters=model_g.parameters())
    for step in range(args.steps):
        real, noise = (tensor.to(engine_d.device) for tensor in real_points(step, rank))
        fake = engine_g(noise)

        loss_d = loss_of(engine_d(real), True) + loss_of(engine_d(fake.detach()), False)
        engine_d.backward(loss_d)
        engine_d.step()

        engine_d.module.requires_grad_(False)
        loss_g = loss_of(engine_d(fake), True)
        engine_g.backward(loss_g)
        engine_g.step()
        engine_d.module.requires_grad_(True)

        losses = torch.stack([loss_d.detach(), loss_g.detach()])
        deepspeed.comm.all_reduce(losses)
        if rank == 0:
            loss_d, loss_g = (losses / size).tolist()
            print(json.dumps({"step": step + 1, "loss": loss_d, "loss_g": loss_g}), flush=True)


if __name__ == "__main__":
    main()
