"""A classifier in DeepSpeed's idiom: the engine's loader, and optimizer and schedule from the JSON."""

import argparse
import json

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))


def make_data():
    generator = torch.Generator().manual_seed(1)
    centers = torch.randn(5, 16, generator=generator)
    labels = torch.randint(5, (256,), generator=generator)
    return TensorDataset(centers[labels] + torch.randn(256, 16, generator=generator), labels)


def parse_arguments():
    parser = argparse.ArgumentParser(description="classifier")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args()


def main():
    args = parse_arguments()
    deepspeed.init_distributed()
    model = make_model()
    engine, _, loader, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        training_data=make_data(),
    )
    for _ in range(args.epochs):
        for inputs, labels in loader:
            inputs, labels = inputs.to(engine.device), labels.to(engine.device)
            loss = F.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()

            mean = loss.detach().clone()
            deepspeed.comm.all_reduce(mean)
            if deepspeed.comm.get_rank() == 0:
                mean = mean.item() / deepspeed.comm.get_world_size()
                print(
                    json.dumps({"step": engine.global_steps, "loss": mean, "lr": scheduler.get_last_lr()}), flush=True
                )


if __name__ == "__main__":
    main()
