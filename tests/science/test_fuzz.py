"""What somebody else wrote never breaks a verb: a few spoilt inputs of each kind, always the same.

`make fuzz SECONDS=600` gives others, for as long as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import run, strategies, targets
from fuzz.targets import TARGETS
from lab.tiers import long_but

CORPUS = sorted((Path(run.__file__).parent / "corpus").glob("*.json"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_once_broke_a_verb_does_so_no_more(path: Path) -> None:
    targets.replay(path)


@pytest.mark.parametrize("inputs", long_but([2], [20]))
@pytest.mark.parametrize("name", TARGETS)
def test_spoilt_input_of_any_kind_ends_in_words(name: str, inputs: int) -> None:
    broken = strategies.falsify(name, 1, inputs)
    if broken is not None:
        raise AssertionError(f"broken by {broken[0]}") from broken[1]
