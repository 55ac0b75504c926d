"""Language models of transformers, on input embeddings."""

import torch
import transformers as hf

from zoo.numerics import Called

TOKENS = 3
SIZES = {"vocab_size": 5, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}


def tokens():
    return torch.randn(2, TOKENS, 8)


def last_logits(model, x):
    return model(inputs_embeds=x, use_cache=False).logits[:, -1]


def logits(model, x):
    return model(inputs_embeds=x).logits


def translated(model, x):
    return model(inputs_embeds=x, decoder_inputs_embeds=x.flip(1)[:, :2], use_cache=False).logits[:, -1]


def decoder(model):
    return Called(model, last_logits), tokens()


def encoder(model):
    return Called(model, logits), tokens()


def translator(model):
    return Called(model, translated), tokens()


# -- decoders ---------------------------------------------------------------------------------------------------------


def gpt2():
    return decoder(hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=5, n_positions=8, n_embd=8, n_layer=2, n_head=2)))


def gpt_neox():
    return decoder(hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES, max_position_embeddings=8)))


def opt():
    config = hf.OPTConfig(
        vocab_size=5, hidden_size=8, ffn_dim=12, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=8,
        max_position_embeddings=8, bos_token_id=0, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    return decoder(hf.OPTForCausalLM(config))


def llama():
    return decoder(hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, num_key_value_heads=1, max_position_embeddings=8)))


def qwen3():
    config = hf.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=4, max_position_embeddings=8)
    return decoder(hf.Qwen3ForCausalLM(config))


def gemma2():
    """Tanh-capped logits, a sliding window, tied embeddings."""
    config = hf.Gemma2Config(
        **SIZES, num_key_value_heads=1, head_dim=4, max_position_embeddings=8, sliding_window=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return decoder(hf.Gemma2ForCausalLM(config))


def falcon():
    """One key for all heads, ALiBi, attention and MLP in parallel."""
    config = hf.FalconConfig(vocab_size=5, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, alibi=True)
    return decoder(hf.FalconForCausalLM(config))


# -- mixtures of experts ----------------------------------------------------------------------------------------------


def mixtral():
    config = hf.MixtralConfig(
        **SIZES, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=8,
        experts_implementation="batched_mm",
    )  # fmt: skip
    return decoder(hf.MixtralForCausalLM(config))


def qwen2_moe():
    """Routed experts and a shared one behind a gate."""
    config = hf.Qwen2MoeConfig(
        **SIZES, num_key_value_heads=1, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=6,
        shared_expert_intermediate_size=6, max_position_embeddings=8, experts_implementation="eager",
    )  # fmt: skip
    return decoder(hf.Qwen2MoeForCausalLM(config))


# -- state space ------------------------------------------------------------------------------------------------------


def mamba():
    config = hf.MambaConfig(vocab_size=5, hidden_size=8, state_size=3, num_hidden_layers=1, conv_kernel=2, expand=1)
    return decoder(hf.MambaForCausalLM(config))


# -- encoders ---------------------------------------------------------------------------------------------------------

ENCODER = {**SIZES, "max_position_embeddings": 8, "num_labels": 2, "pad_token_id": 0}


def bert():
    return encoder(hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)))


def roberta():
    return encoder(hf.RobertaForSequenceClassification(hf.RobertaConfig(**ENCODER)))


def albert():
    """One layer's parameters used in both."""
    return encoder(hf.AlbertForSequenceClassification(hf.AlbertConfig(**ENCODER, embedding_size=8)))


def electra():
    return encoder(hf.ElectraForSequenceClassification(hf.ElectraConfig(**ENCODER, embedding_size=8)))


def deberta():
    """Attention over contents and relative positions."""
    config = hf.DebertaV2Config(
        **ENCODER, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=4, pooler_hidden_size=8
    )
    return encoder(hf.DebertaV2ForSequenceClassification(config))


def modernbert():
    config = hf.ModernBertConfig(
        **ENCODER, local_attention=2, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2
    )
    return encoder(hf.ModernBertForSequenceClassification(config))


# -- encoder and decoder ----------------------------------------------------------------------------------------------


def t5():
    """Relative position biases, shared by all layers; tied embeddings."""
    config = hf.T5Config(vocab_size=5, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2,
                         relative_attention_num_buckets=4, feed_forward_proj="gated-gelu")  # fmt: skip
    return translator(hf.T5ForConditionalGeneration(config))


def bart():
    config = hf.BartConfig(
        vocab_size=5, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=12, decoder_ffn_dim=12,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    return translator(hf.BartForConditionalGeneration(config))
