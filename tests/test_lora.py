"""LoRA by PEFT: a frozen base costs no gradients and no optimizer state, and the adapters train as in one process."""

import pytest
import torch
from torch import distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import zerofunc
from reference import STAGES, adamw, assert_same, engine_of, step_reference


def adapted():
    """A tiny random GPT-2 with adapters that do something from the start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11, "n_positions": 8}
    base = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    lora = LoraConfig(
        r=2, lora_alpha=4, target_modules=["c_attn", "c_proj"], init_lora_weights=False, fan_in_fan_out=True
    )
    return get_peft_model(base, lora).double()


def loss(model, step, rank):
    tokens = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(input_ids=tokens, labels=tokens).loss


@STAGES
@pytest.mark.world_size(2)
def test_adapters_train_and_the_base_costs_no_state(stage):
    engine, model = engine_of(adapted(), stage), adapted()
    optimizer = adamw(model)
    for step in range(2):
        engine.backward(loss(engine, step, dist.get_rank()))
        reduced = zerofunc.full_gradients(engine.module)
        engine.step()
        step_reference(model, optimizer, loss, step)
        assert_same(engine, model)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert reduced.keys() == trainable.keys()
    assert all("lora" in name for name in trainable)
    sharding = engine.module.__dict__["_zerofunc"]
    size = dist.get_world_size() if stage else 1
    state = sum(value.numel() for entry in engine.optimizer.state.values() for value in entry.values() if value.dim())
    count = sum(p.numel() for p in trainable.values())
    padding = len(sharding.pages)
    assert count / size * 2 - 2 * padding <= state <= count / size * 2 + 2 * padding
