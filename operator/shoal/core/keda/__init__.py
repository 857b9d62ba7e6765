"""What KEDA is told, so that its arithmetic and the HPA's land on what `core/scaling` and `core/placement` decided.

types.py   what is answered for one variant
"""

from shoal.core.keda.types import Answer

__all__ = ["Answer"]
