"""``deepspeed.ops``."""

from zerofunc.compat.deepspeed.ops import adam, lion

__all__ = ["adam", "lion"]
