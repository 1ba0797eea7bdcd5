"""What a process of ours does not import, though it is installed."""

from __future__ import annotations

import sys


class _WithoutPandas:
    @staticmethod
    def find_spec(name: str, _path: object, _target: object = None) -> None:
        """Raise ModuleNotFoundError for pandas."""
        if name == "pandas":
            raise ModuleNotFoundError("this process does without pandas", name=name)


def without_pandas() -> None:
    """Let pandas be missing in this process.

    pyarrow looks for it when it is first given a list, to ask whether that is one of its arrays: a
    fifth of the time in which two large reports are merged, and 40 MB of each process.
    """
    sys.meta_path.insert(0, _WithoutPandas)
