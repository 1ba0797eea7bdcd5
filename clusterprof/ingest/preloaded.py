"""What a reading process has imported when it starts: it is a copy of one that imports this."""

from __future__ import annotations

from clusterprof.priority import without_pandas

without_pandas()  # before pyarrow looks for it

from clusterprof.ingest import gathered  # noqa: E402
from clusterprof.ingest.kineto import trace  # noqa: E402
from clusterprof.ingest.nsys import exported, sqlite  # noqa: E402

__all__ = ["exported", "gathered", "sqlite", "trace"]
