"""Files that anybody may hand us, damaged at random: each is read, or refused in a sentence, and nothing else.

`python -m tools.fuzz` does the same a million times, and looks at time and memory, too.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from dcpbench.errors import DcpbenchError
from tests.unit.hostile_files import KINDS, damaged

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 100  # damaged files of each kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    """A fixed seed for each kind. Whatever is no DcpbenchError would be a traceback on somebody's terminal."""
    name, _, read = KINDS[kind]
    content = KINDS[kind].content(tmp_path)
    path = tmp_path / name
    path.write_bytes(content)
    read(path)
    rng = random.Random(kind)
    said = []
    for number in range(ROUNDS):
        wrong = damaged(content, rng)
        path.write_bytes(wrong)
        try:
            read(path)
        except DcpbenchError as e:
            said.append(str(e))
        except Exception as e:
            raise AssertionError(f"{kind}, round {number}: {type(e).__name__} of {wrong[:300]!r}") from e
    assert said, "some of these cannot be read"
    assert max(map(len, said)) < 3_000, "sentences, whatever the files hold"
