"""The models, the cells that each is judged on, and how."""

import functools
import importlib
from dataclasses import replace

from zerofunc.verify.cells import CELLS
from zerofunc.verify.run import CANNOT, OK, Setting, judge, plain_fails

MODELS = {
    f"zoo.{family}:{name}": family
    for family, names in {
        "language": "gpt2 gpt_neox opt llama qwen3 gemma2 falcon mixtral qwen2_moe mamba "
        "bert roberta albert electra deberta modernbert t5 bart",
        "perception": "vit dinov2 swin convnext resnet wav2vec2 whisper clip",
        "diffusion": "dit sd3 unet",
        "atoms": "graph_convolution graph_attention schnet",
        "equivariant": "tensor_products",
    }.items()
    for name in names.split()
}

# Every model is judged on these: each kind of derivative that goes through other code.
SPREAD = [
    "grad", "jvp", "vmap(grad)", "jvp(grad)", "grad(grad)", "functional_call: per-sample grad",
    "autograd gradient penalty + loss", "func.grad penalty + loss", "MeanFlow (jvp, target detached)",
    "backward through a jvp", "forces + energy", "shards: jvp(grad)", "checkpoint: backward through a jvp",
]  # fmt: skip
# These are judged on every cell but linearize, which takes as long as all others together. A GPT-2 is among the models
# of zerofunc.verify.
THOROUGH = {"zoo.diffusion:dit", "zoo.atoms:schnet"}
EVERY = [cell.name for cell in CELLS if cell.models is None and cell.name != "linearize"]

# Plain forwards whose gradient is differentiated again later, which nothing announces: see zerofunc.second_order.
UNANNOUNCED = {
    "autograd.grad, create_graph", "autograd.functional.hessian", "autograd.functional.hvp", "autograd.functional.jvp",
    "autograd gradient penalty + loss", "score matching (autograd.grad)",
}  # fmt: skip
ALONE = "engine alone"
PAGE_BYTES = 4096  # several pages per model


def cells_of(model):
    """Names of the cells that a model is judged on."""
    return EVERY if model in THOROUGH else SPREAD


def __getattr__(name):
    """The factory of a model with elementary operations: ``zoo.catalogue:elementary_language_gpt2``."""
    kind, family, model = name.split("_", 2)
    if kind != "elementary":
        raise AttributeError(name)
    return functools.partial(_elementary, getattr(importlib.import_module(f"zoo.{family}"), model))


def _elementary(factory):
    module, example = factory()
    module.elementary = True
    return module, example


def _second_order(module):
    module.second_order = True


def judge_model(model, stage, names):
    """Collective. The outcomes of the named cells on this rank.

    The model runs on the engine as it comes from its library, and is compared with the same one of elementary
    operations in plain PyTorch, which has every derivative. Where plain PyTorch cannot do the cell with the model as it
    comes, "ok" becomes "engine alone", and the detail says why.
    """
    as_it_comes = Setting(model, page_bytes=PAGE_BYTES)
    elementary = f"zoo.catalogue:elementary_{model.removeprefix('zoo.').replace(':', '_')}"
    outcomes = []
    for cell in [cell for cell in CELLS if cell.name in names]:
        cannot = plain_fails(as_it_comes, cell)
        prepare = _second_order if cannot and cell.name in UNANNOUNCED else cell.prepare
        outcome = judge(as_it_comes, stage, replace(cell, models=(model, elementary), prepare=prepare))
        alone = cannot and outcome.status == OK
        outcomes.append(replace(outcome, status=ALONE, detail=cannot) if alone else outcome)
    return outcomes


def failures(outcomes):
    """The outcomes that show a fault of the engine."""
    return [outcome for outcome in outcomes if outcome.status not in (OK, ALONE, CANNOT)]
