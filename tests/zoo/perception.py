"""Vision, speech, and both with text: models of transformers, on pixels, spectra and samples."""

import torch
import transformers as hf

from zoo.numerics import Called

SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}


def pixels(size, channels=1):
    return torch.randn(2, channels, size, size)


def logits(model, x):
    return model(x).logits


# -- vision -----------------------------------------------------------------------------------------------------------


def vit():
    config = hf.ViTConfig(**SIZES, image_size=4, patch_size=2, num_channels=1, num_labels=2)
    return Called(hf.ViTForImageClassification(config), logits), pixels(4)


def dinov2():
    """Layer scale and interpolated positions."""
    config = hf.Dinov2Config(**SIZES, image_size=4, patch_size=2, num_channels=1, num_labels=2)
    return Called(hf.Dinov2ForImageClassification(config), logits), pixels(4)


def swin():
    """Attention in shifted windows, with patches merged between the layers."""
    config = hf.SwinConfig(
        image_size=4, patch_size=1, num_channels=1, embed_dim=4, depths=[2, 1], num_heads=[1, 2], window_size=2,
        drop_path_rate=0.0, num_labels=2,
    )  # fmt: skip
    return Called(hf.SwinForImageClassification(config), logits), pixels(4)


def convnext():
    """Depth-wise convolutions."""
    config = hf.ConvNextConfig(
        num_channels=1, patch_size=2, hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, num_labels=2
    )
    return Called(hf.ConvNextForImageClassification(config), logits), pixels(4)


def resnet():
    """BatchNorm in evaluation mode and max pooling."""
    config = hf.ResNetConfig(num_channels=1, embedding_size=4, hidden_sizes=[4, 6], depths=[1, 1], num_labels=2)
    return Called(hf.ResNetForImageClassification(config), logits), pixels(6)


# -- speech -----------------------------------------------------------------------------------------------------------


def wav2vec2():
    """Convolutions over samples, GroupNorm, and a weight-normed convolution for positions."""
    config = hf.Wav2Vec2Config(
        vocab_size=5, **SIZES, conv_dim=(4, 4), conv_stride=(2, 2), conv_kernel=(3, 2), num_conv_pos_embeddings=3,
        num_conv_pos_embedding_groups=2, classifier_proj_size=6, num_labels=2, apply_spec_augment=False,
    )  # fmt: skip
    return Called(hf.Wav2Vec2ForSequenceClassification(config), logits), torch.randn(2, 16)


def dictated(model, x):
    start = torch.full((len(x), 2), 3)
    return model(x, decoder_input_ids=start, use_cache=False).logits[:, -1]


def whisper():
    config = hf.WhisperConfig(
        vocab_size=5, num_mel_bins=3, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12, max_source_positions=3,
        max_target_positions=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return Called(hf.WhisperForConditionalGeneration(config), dictated), torch.randn(2, 3, 6)


# -- images and text --------------------------------------------------------------------------------------------------


def matched(model, x):
    texts = torch.tensor([[1, 3, 2], [3, 4, 2]])
    return model(input_ids=texts, pixel_values=x, attention_mask=torch.ones_like(texts)).logits_per_image


def clip():
    """Two towers and a learnt temperature."""
    text = {**SIZES, "vocab_size": 5, "max_position_embeddings": 4, "eos_token_id": 2, "bos_token_id": 1,
            "pad_token_id": 0}  # fmt: skip
    vision = {**SIZES, "image_size": 4, "patch_size": 2, "num_channels": 1}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=6, logit_scale_init_value=0.5)
    return Called(hf.CLIPModel(config), matched), pixels(4)
