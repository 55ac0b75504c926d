"""Optimizers: by name, and what is known or can be found out about one."""

from zerofunc.optimizers.lion import Lion
from zerofunc.optimizers.muon import MuonWithAdamW, muon_optimizer
from zerofunc.optimizers.named import build_optimizer, needs_whole_parameters, refuse_known
from zerofunc.optimizers.scope import Scope, scope_of
from zerofunc.optimizers.stepping import is_optimizer, step_with

__all__ = [
    "Lion",
    "MuonWithAdamW",
    "Scope",
    "build_optimizer",
    "is_optimizer",
    "muon_optimizer",
    "needs_whole_parameters",
    "refuse_known",
    "scope_of",
    "step_with",
]
