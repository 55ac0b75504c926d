"""Leaf modules: those whose parameters are fetched together, such as a mixture-of-experts block.

Ranks may then use different experts. A mark on a module is read by ``initialize``, which keeps the module on one page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from zerofunc.training.settings import LEAF_MARK, class_names

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether a module is marked as a leaf."""
    return bool(model.__dict__.get(LEAF_MARK, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` that are marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or take the mark away."""
    model.__dict__[LEAF_MARK] = flag


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The modules of these classes (or names of classes), marked. Call it before ``initialize``."""
    return _marked(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Iterable[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The modules of these classes, without mark."""
    return _marked(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, leaf_module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The modules of these names, marked, and the names that no module has."""
    return _marked_by(model, leaf_module_names, str.__eq__, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, leaf_module_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The modules whose names end so, marked, and the suffixes that no name has."""
    return _marked_by(model, leaf_module_suffixes, str.endswith, raise_if_not_found)


def _marked(
    model: nn.Module, classes: Iterable[type[nn.Module] | str], flag: bool, must_exist: bool
) -> list[nn.Module]:
    wanted = set(classes)
    kinds = [(module, type(module)) for module in model.modules()]
    found = [module for module, kind in kinds if not wanted.isdisjoint({kind, *class_names(kind)})]
    if must_exist and not found:
        raise ValueError(f"leaf_module_classes: {type(model).__name__} has no module of {wanted}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _marked_by(
    model: nn.Module, wanted: Iterable[str], fits: Callable[[str, str], bool], must_exist: bool
) -> tuple[list[nn.Module], list[str]]:
    wanted, modules = list(wanted), dict(model.named_modules())
    found = [module for name, module in modules.items() if any(fits(name, one) for one in wanted)]
    missing = [one for one in wanted if not any(fits(name, one) for name in modules)]
    if must_exist and missing:
        raise ValueError(f"{type(model).__name__} has no module named so: {', '.join(missing)}")
    for module in found:
        set_z3_leaf_module(module, True)
    return found, missing
