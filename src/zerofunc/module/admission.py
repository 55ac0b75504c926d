"""Which modules can be sharded, and which of their parameters travel together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from zerofunc.module.first_values import home_device
from zerofunc.pages.layout import PageLayout, ParameterSpec, build_pages
from zerofunc.pages.paged_tensor import PagedTensor
from zerofunc.ranks.collectives import Axes, DivergenceError


def parameters_to_shard(module: nn.Module, is_sharded: Callable[[torch.Tensor], bool]) -> dict[str, nn.Parameter]:
    """Local. The module's parameters by name, tied ones once.

    Raises:
        ValueError: If there are none, or one cannot be sharded.
    """
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no parameters to shard")
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            raise ValueError(f"parameter {name!r} is sharded already; a parameter belongs to one sharded module")
        if not parameter.is_floating_point() and parameter.requires_grad:
            raise ValueError(f"parameter {name!r} is {parameter.dtype}; trainable parameters are floating point")
        if parameter.layout != torch.strided:
            raise ValueError(f"parameter {name!r} has layout {parameter.layout}; expected a strided tensor")
    _refuse_shared_memory(parameters)
    return parameters


def refuse_unlike(parameters: Mapping[str, nn.Parameter], axes: Axes) -> None:
    """Collective where there are drafts. Refuse parameters that ranks have built with different values.

    Raises:
        DivergenceError: On every rank, with the names.
    """
    drafted = {name: p._place.page for name, p in parameters.items() if isinstance(p, PagedTensor)}
    pages = {name: page for name, page in drafted.items() if page.built}
    if not pages or axes.num_ranks == 1:
        return
    mine = [page.built[0] if page.built and page.built[1] == page.versions() else -1 for page in pages.values()]
    found = axes.gather_objects(mine, f"checksums of {len(mine)} parameters that Init has built")
    unlike = [name for name, sums in zip(pages, zip(*found, strict=True), strict=True) if len(set(sums)) > 1]
    if unlike:
        raise DivergenceError(
            f"ranks have built {', '.join(unlike[:10])}{' …' if len(unlike) > 10 else ''} inside zerofunc.Init with "
            "different values: give them by PyTorch's generators, which draw alike on all ranks there, or by others "
            "that were seeded alike; or build the module outside of Init."
        )


def refuse_writers(module: nn.Module, num_ranks: int) -> None:
    """Local. Refuse layers whose forward writes into a parameter what depends on this rank's data.

    Raises:
        ValueError: If there is one, and more than one rank.
    """
    for name, inner in module.named_modules():
        if num_ranks > 1 and isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.max_norm is not None:
            raise ValueError(
                f"{name or 'the module'}, a {type(inner).__name__}, has max_norm: its forward renormalises the rows "
                "that this rank looks up, so that ranks would come to hold different weights. Leave max_norm out, and "
                "scale in forward(): e * (max_norm / e.norm(dim=-1, keepdim=True)).clamp(max=1)."
            )


def _refuse_shared_memory(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that are views of the same memory: on pages they would be copies of one another."""
    held = [(p, name) for name, p in parameters.items() if type(p) is nn.Parameter and p.numel() and not p.is_meta]
    ranges = sorted((p.data_ptr(), p.data_ptr() + _span(p), name) for p, name in held)
    last, owner = 0, ""
    for start, stop, name in ranges:
        if start < last:
            raise ValueError(
                f"parameters {owner!r} and {name!r} share memory without being one object, which sharding cannot keep. "
                "Register one nn.Parameter in both places, or compute the one from the other in forward()."
            )
        if stop > last:
            last, owner = stop, name


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in sizes) + 1) * tensor.itemsize


def specs_of(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], unsplit: Iterable[str], param_dtype: torch.dtype | None
) -> list[ParameterSpec]:
    """Local. What the layout needs to know of the parameters.

    Raises:
        ValueError: If ``unsplit`` names what is not a module.
    """
    insides = _unsplit(module, parameters, unsplit)
    return [
        ParameterSpec(name, parameter.shape, _key(parameter, param_dtype), inside)
        for (name, parameter), inside in zip(parameters.items(), insides, strict=True)
    ]


def _key(parameter: nn.Parameter, param_dtype: torch.dtype | None) -> tuple[torch.dtype, torch.device, bool]:
    dtype = param_dtype if param_dtype is not None and parameter.is_floating_point() else parameter.dtype
    return dtype, home_device() if parameter.is_meta else parameter.device, parameter.requires_grad


def _unsplit(module: nn.Module, parameters: Iterable[str], unsplit: Iterable[str]) -> list[str | None]:
    known = {name for name, _ in module.named_modules()}
    wanted = sorted(unsplit, key=len)
    for name in wanted:
        if name not in known:
            raise ValueError(f"unsplit names {name!r}, which is not a module of {type(module).__name__}")
    return [next((outer for outer in wanted if is_inside(name, outer)), None) for name in parameters]


def is_inside(name: str, outer: str) -> bool:
    """Whether something of this name lies inside a module of that name; the root's is empty."""
    return not outer or name.startswith(f"{outer}.")


def layouts_of(specs: list[ParameterSpec], num_shards: int, page_bytes: int) -> list[PageLayout]:
    """Local. The pages of about ``page_bytes`` that the parameters are packed into."""
    itemsize = max(spec.key[0].itemsize for spec in specs)
    return list(build_pages(specs, num_shards, max(1, page_bytes // itemsize)))
