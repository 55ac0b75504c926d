"""``deepspeed.runtime.zero.partition_parameters``."""

from zerofunc.compat.deepspeed.parameter_views import ZeroParamStatus
from zerofunc.parameter_state import GatheredParameters, register_external_parameter
from zerofunc.sharded_init import Init

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "register_external_parameter"]
