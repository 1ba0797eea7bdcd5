"""Reports of Nsight Systems as canonical tables."""

from __future__ import annotations

#: how the warning begins of a report whose exporter here does not give NCCL's payloads
NO_PAYLOADS = "NCCL's payloads were not read"
