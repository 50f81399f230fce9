"""Randomly damaged input files are read or refused with an error, and cause no other exception.

`python -m tools.fuzz` does the same a million times, and checks time and memory, too.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from dcpbench.errors import DcpbenchError
from tests.unit.hostile_files import KINDS, damage_text

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 100  # number of damaged files of each kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_damaged_file_is_read_or_refused_with_an_error(kind: str, tmp_path: Path) -> None:
    """Each kind has a fixed seed. Any exception but DcpbenchError would be a traceback for the user."""
    name, _, read = KINDS[kind]
    content = KINDS[kind].content(tmp_path)
    path = tmp_path / name
    path.write_bytes(content)
    read(path)
    rng = random.Random(kind)
    errors = []
    for number in range(ROUNDS):
        wrong = damage_text(content, rng)
        path.write_bytes(wrong)
        try:
            read(path)
        except DcpbenchError as e:
            errors.append(str(e))
        except Exception as e:
            raise AssertionError(f"{kind}, round {number}: {type(e).__name__} of {wrong[:300]!r}") from e
    assert errors, "some damaged files cannot be read"
    assert max(map(len, errors)) < 3_000, "errors are short for every content"
