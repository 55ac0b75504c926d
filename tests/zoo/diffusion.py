"""Denoisers of diffusers, on noisy latents; time and condition are fixed."""

import diffusers
import torch

from zoo.numerics import Called

STEP = torch.tensor([7])


def dit():
    """Attention modulated by adaptive LayerNorm with gates."""
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=1, out_channels=1, num_layers=1, sample_size=2,
        patch_size=1, num_embeds_ada_norm=3, norm_num_groups=1,
    )  # fmt: skip
    return Called(model, conditioned_on_class), torch.randn(2, 1, 2, 2)


def conditioned_on_class(model, x):
    classes = torch.full((len(x),), 1)
    return model(x, timestep=STEP.expand(len(x)), class_labels=classes).sample.flatten(1)


def sd3():
    """Two streams, image and text, with joint attention."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=2, patch_size=1, in_channels=1, out_channels=1, num_layers=2, attention_head_dim=4,
        num_attention_heads=2, joint_attention_dim=6, caption_projection_dim=8, pooled_projection_dim=5,
        pos_embed_max_size=2,
    )  # fmt: skip
    return Called(model, conditioned_on_text), torch.randn(2, 1, 2, 2)


def conditioned_on_text(model, x):
    text = torch.linspace(-1, 1, 12, dtype=x.dtype).reshape(1, 2, 6).expand(len(x), 2, 6)
    pooled = torch.linspace(-1, 1, 5, dtype=x.dtype).expand(len(x), 5)
    step = STEP.expand(len(x))
    return model(x, encoder_hidden_states=text, pooled_projections=pooled, timestep=step).sample.flatten(1)


def unet():
    """Convolutions, GroupNorm, attention in the middle, skip connections."""
    model = diffusers.UNet2DModel(
        sample_size=4, in_channels=1, out_channels=1, block_out_channels=(4, 6), layers_per_block=1,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
        attention_head_dim=3, norm_num_groups=2,
    )  # fmt: skip
    return Called(model, denoised), torch.randn(2, 1, 4, 4)


def denoised(model, x):
    return model(x, timestep=STEP.expand(len(x))).sample.mean(-1).flatten(1)
