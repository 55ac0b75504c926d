"""The DeepSpeed JSON as typed, frozen records: `load_config` reads, checks and resolves it."""

from zerofunc.config.judgement import Defaults, Judgement, judge, load_config
from zerofunc.config.reading import ConfigError
from zerofunc.config.records import (
    Bf16Config,
    Config,
    DataTypesConfig,
    EngineConfig,
    FileMonitorConfig,
    Fp16Config,
    LeafModuleConfig,
    OffloadConfig,
    OptimizerConfig,
    SchedulerConfig,
    TorchAutocastConfig,
    WandbConfig,
    ZeroConfig,
)

__all__ = [
    "Bf16Config",
    "Config",
    "ConfigError",
    "DataTypesConfig",
    "Defaults",
    "EngineConfig",
    "FileMonitorConfig",
    "Fp16Config",
    "Judgement",
    "LeafModuleConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "TorchAutocastConfig",
    "WandbConfig",
    "ZeroConfig",
    "judge",
    "load_config",
]
