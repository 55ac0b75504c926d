"""Hugging Face's generate: at stage 3, and by ranks that generate different lengths."""

import pytest
import torch
from torch import distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import zerofunc
from reference import STAGES, engine_of


def language_model():
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 11, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=10, pad_token_id=10)).double().eval()


def generated(model, length, **options):
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=length, max_new_tokens=length, **options
    )


@STAGES
@pytest.mark.world_size(2)
def test_tokens_are_those_of_the_plain_model(stage):
    engine, model = engine_of(language_model(), stage), language_model()
    for options in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}):
        assert torch.equal(generated(engine.module, 4, **options), generated(model, 4, **options))
    sampled = []
    for of in (engine, model):  # the engine hands attributes on
        torch.manual_seed(3)
        sampled.append(generated(of, 4, do_sample=True))
    assert torch.equal(*sampled)


@STAGES
@pytest.mark.world_size(2)
def test_ranks_generate_different_lengths_inside_gathered(stage):
    engine, model = engine_of(language_model(), stage), language_model()
    length = 2 + 5 * dist.get_rank()
    with zerofunc.gathered(engine.module):
        found = generated(engine.module, length, do_sample=False)
    assert torch.equal(found, generated(model, length, do_sample=False))
    loss = engine(input_ids=found[:, :4], labels=found[:, :4]).loss
    engine.backward(loss)
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.world_size(2)
def test_different_lengths_outside_of_gathered_are_a_named_error():
    engine = engine_of(language_model(), 3, zerofunc={"timeout_s": 5})
    with pytest.raises(zerofunc.DivergenceError, match=r"zerofunc\.gathered"):
        generated(engine.module, 2 + 5 * dist.get_rank(), do_sample=False)
        zerofunc.mean(torch.ones(()), engine.module)
