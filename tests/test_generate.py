"""`generate` of transformers at every stage, and ranks that generate different lengths."""

import pytest
import torch
from torch import distributed as dist

import zerofunc
from reference import adamw, assert_same, config, engine_of, stages, step_reference

transformers = pytest.importorskip("transformers")

END = 3


def llama():
    torch.manual_seed(0)
    sizes = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=0, eos_token_id=END, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(sizes).double()


def prompt(rank, length=3):
    return torch.randint(4, 11, (2, length), generator=torch.Generator().manual_seed(rank))


def loss(model, step, rank):
    tokens = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(input_ids=tokens, labels=tokens).loss


def generate(model, tokens, **more):
    torch.manual_seed(5)
    mask = torch.ones_like(tokens)
    return model.generate(tokens, attention_mask=mask, **{"max_new_tokens": 6, "do_sample": False, **more})


WAYS = {
    "greedy": {"min_new_tokens": 6},
    "without a cache": {"min_new_tokens": 6, "use_cache": False},
    "sampled": {"min_new_tokens": 6, "do_sample": True, "top_k": 5},
    "beams": {"min_new_tokens": 6, "num_beams": 3},
}


@pytest.mark.parametrize("way", WAYS)
@stages(3)
@pytest.mark.world_size(1, 2)
def test_generating_equals_one_process_and_training_goes_on(stage, way):
    engine, model = engine_of(llama(), stage), llama()
    optimizer, rank = adamw(model), dist.get_rank()
    for step in range(2):
        for one in (engine, model):
            one.eval()
        expected = generate(model, prompt(rank), **WAYS[way])
        assert torch.equal(generate(engine, prompt(rank), **WAYS[way]), expected)
        assert torch.equal(generate(engine.module, prompt(rank), **WAYS[way]), expected)
        for one in (engine, model):
            one.train()
        engine.backward(loss(engine, step, rank))
        engine.step()
        step_reference(model, optimizer, loss, step)
        assert_same(engine, model)


@stages(3)
@pytest.mark.world_size(2)
def test_ranks_generate_different_lengths_inside_gathered(stage):
    """As in reinforcement learning: each rank writes as long as it likes, then all train on what they wrote."""
    engine, model = engine_of(llama(), stage), llama()
    optimizer, rank = adamw(model), dist.get_rank()

    def likelihood(model, step, rank):
        return model(input_ids=written[step][rank], labels=written[step][rank]).loss

    written = []
    for step in range(2):
        lengths = [2 + 5 * rank for rank in range(2)]
        with zerofunc.gathered(engine.module):
            mine = generate(engine, prompt(rank), min_new_tokens=lengths[rank], max_new_tokens=lengths[rank])
        written.append([generate(model, prompt(r), min_new_tokens=n, max_new_tokens=n) for r, n in enumerate(lengths)])
        assert torch.equal(mine, written[step][rank])
        with zerofunc.gathered(engine.module):
            engine.backward(likelihood(engine, step, rank))
        engine.step()
        step_reference(model, optimizer, likelihood, step)
        assert_same(engine, model)


@pytest.mark.world_size(2)
def test_ranks_that_end_at_different_times_wait_for_each_other_where_they_are_told_to():
    """`synced_gpus` of transformers: a rank that has ended runs on until all have."""
    engine, model = engine_of(llama(), 3), llama()
    lengths = [2 + 5 * rank for rank in range(2)]
    mine = {"min_new_tokens": lengths[dist.get_rank()], "max_new_tokens": lengths[dist.get_rank()]}
    found = generate(engine, prompt(dist.get_rank()), **mine, synced_gpus=True)
    assert torch.equal(found, generate(model, prompt(dist.get_rank()), **mine))


@pytest.mark.world_size(2)
def test_ranks_that_generate_different_lengths_elsewhere_are_told_what_to_do():
    engine = engine_of(llama(), 3, zerofunc={"timeout_s": 3.04})
    length = 2 + 5 * dist.get_rank()
    with pytest.raises(zerofunc.DivergenceError, match=r"zerofunc\.gathered"):
        generate(engine, prompt(dist.get_rank()), min_new_tokens=length, max_new_tokens=length)
        zerofunc.mean(torch.ones(()), engine.module)  # where the others are not


@stages(3)
@pytest.mark.world_size(2)
def test_a_frozen_model_without_an_optimizer_is_an_engine_too(stage):
    """A reference or reward model: nothing to train, sharded for its memory."""
    frozen = {k: v for k, v in config(stage).items() if k != "optimizer"}
    engine, optimizer, _, _ = zerofunc.initialize(llama().requires_grad_(False).eval(), frozen)
    assert optimizer is None
    tokens = prompt(dist.get_rank())
    torch.testing.assert_close(engine(tokens).logits, llama().eval()(tokens).logits)
    assert torch.equal(generate(engine, tokens), generate(llama().eval(), tokens))
    with pytest.raises(ValueError, match="does not require a gradient"):
        engine.backward(loss(engine, 0, dist.get_rank()))
