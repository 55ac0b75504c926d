"""``deepspeed.runtime.zero.partition_parameters``."""

from zerofunc.compat.deepspeed.parameter_views import ZeroParamStatus
from zerofunc.module.init import Init
from zerofunc.optimizers.parameter_state import GatheredParameters, register_external_parameter

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
