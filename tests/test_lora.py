"""PEFT: adapters of low rank on a frozen base, which costs no gradient, no optimizer state and no traffic."""

import pytest
import torch
from torch import distributed as dist

import zerofunc
from reference import ADAMW, adamw, assert_same, config, engine_of, stages, step_reference, values

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def llama():
    """Two layers whose base has 12 times as many parameters as their adapters."""
    torch.manual_seed(0)
    sizes = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(sizes).double()


def adapted(**more):
    options = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **more}
    model = peft.get_peft_model(llama(), peft.LoraConfig(**options)).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def tokens_of(step, rank, length=5):
    return torch.randint(1, 31, (2, length), generator=torch.Generator().manual_seed(100 * step + rank))


def loss(model, step, rank):
    tokens = tokens_of(step, rank)
    return model(input_ids=tokens, labels=tokens).loss


def train_both(engine, model, steps=2, loss=loss):
    optimizer = adamw(model)
    for step in range(steps):
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, loss, step)
        assert_same(engine, model)


@stages(3)
@pytest.mark.world_size(1, 2)
def test_adapters_train_and_the_base_costs_nothing(stage):
    engine, model = engine_of(adapted(), stage, zerofunc={"page_bytes": 2048}), adapted()
    sizes = {trains: 0 for trains in (True, False)}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.nbytes
    assert sizes[False] > 12 * sizes[True]
    assert set(zerofunc.shards(engine.module)) == {n for n, p in model.named_parameters() if p.requires_grad}

    of_ranks = dist.get_world_size()
    of_shards, of_parameters = (of_ranks if stage >= first else 1 for first in (1, 3))
    padding = 64 * len(engine.module.__dict__["_zerofunc"].pages)
    train_both(engine, model, steps=1)
    before = engine.usage().held_bytes
    engine.backward(loss(engine, 1, dist.get_rank()))
    after = engine.usage()
    assert after.held_bytes - before == pytest.approx(sizes[True] / of_shards, abs=padding)
    assert after.gradient_peak_bytes <= 2 * sizes[True] + padding
    expected = (sizes[False] + sizes[True]) / of_parameters + 2 * sizes[True] / of_shards
    assert before == pytest.approx(expected, abs=padding)


@stages(3)
@pytest.mark.world_size(2)
def test_only_adapters_are_reduced(stage):
    engine = engine_of(adapted(), stage)
    with zerofunc.gathered(engine.module):
        before = engine.usage().moved_bytes
        engine.backward(loss(engine, 0, dist.get_rank()))
        moved = engine.usage().moved_bytes - before
    trained = sum(parameter.nbytes for parameter in engine.module.parameters() if parameter.requires_grad)
    frozen = sum(parameter.nbytes for parameter in engine.module.parameters() if not parameter.requires_grad)
    assert trained / 4 < moved < 3 * trained < frozen


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.world_size(2)
def test_adapters_train_through_checkpointed_layers(stage, reentrant):
    def checkpointed():
        model = adapted()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    train_both(engine_of(checkpointed(), stage), checkpointed())


VARIANTS = [
    {"use_dora": True},
    {"use_rslora": True, "target_modules": "all-linear"},
    {"modules_to_save": ["lm_head"]},
    {"target_modules": ["embed_tokens", "q_proj"]},
    {"bias": "lora_only"},
    {"lora_dropout": 0.3},
]


@pytest.mark.parametrize("more", VARIANTS, ids="-".join)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.world_size(2)
def test_variants_train(stage, more):
    engine, model = engine_of(adapted(**more), stage), adapted(**more)
    if "lora_dropout" in more:
        engine.eval()
        model.eval()
    train_both(engine, model)


def preference(model, step, rank):
    """DPO: the model without its adapters is the reference model."""
    tokens = tokens_of(step, rank)
    wrapped = getattr(model, "module", model)
    with torch.no_grad(), wrapped.disable_adapter():
        base = model(input_ids=tokens).logits.log_softmax(-1)
    own = model(input_ids=tokens).logits.log_softmax(-1)
    return -torch.nn.functional.logsigmoid(own - base).mean()


@stages(3)
@pytest.mark.world_size(2)
def test_the_base_is_the_reference_model_of_a_preference_loss(stage):
    train_both(engine_of(adapted(), stage), adapted(), loss=preference)


@stages(3)
@pytest.mark.world_size(2)
def test_adapters_are_switched_between_steps(stage):
    def two():
        model = adapted()
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        return model.double()

    wrapped, model = two(), two()
    engine = zerofunc.initialize(wrapped, config(stage), torch.optim.AdamW(wrapped.parameters(), **ADAMW))[0]
    optimizer = adamw(model)
    for step, name in enumerate(["default", "second", "default"]):
        for one in (engine.module, model):
            one.set_adapter(name)
        engine.backward(loss(engine, step, dist.get_rank()))
        engine.step()
        step_reference(model, optimizer, loss, step)
        assert_same(engine, model)


@stages(3)
@pytest.mark.world_size(2)
def test_adapters_are_merged_and_taken_out_again(stage):
    engine, model = engine_of(adapted(), stage), adapted()
    train_both(engine, model, steps=1)
    x = tokens_of(5, 0)
    with torch.no_grad():
        before = engine(input_ids=x).logits
        for one in (engine.module, model):
            one.merge_adapter()
        assert_same(engine, model)
        torch.testing.assert_close(engine(input_ids=x).logits, before)
        for one in (engine.module, model):
            one.unmerge_adapter()
        assert_same(engine, model, rtol=1e-8)
        torch.testing.assert_close(engine(input_ids=x).logits, before)


@stages(3)
@pytest.mark.world_size(2)
def test_adapters_are_saved_and_loaded(stage, tmp_path):
    engine, model = engine_of(adapted(), stage), adapted()
    train_both(engine, model, steps=1)
    with zerofunc.gathered(engine.module):
        if dist.get_rank() == 0:
            engine.module.save_pretrained(tmp_path)
    dist.barrier()
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path).double()
    adapters = {name: value for name, value in values(model).items() if "lora" in name}
    found = values(loaded)
    torch.testing.assert_close({name: found[name] for name in adapters}, adapters)
    fresh = engine_of(adapted(), stage)
    peft.set_peft_model_state_dict(fresh.module, peft.get_peft_model_state_dict(model))
    assert_same(fresh, model)
