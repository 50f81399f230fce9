"""Get the help pages of commands."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from unittest import mock

import pytest

from dcpbench import cli


@functools.cache
def get_help(*command: str) -> str:
    """Return the help text without colours and boxes."""
    wide = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    with (
        mock.patch.dict(os.environ, wide),
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.raises(SystemExit) as end,
    ):
        cli.main([*command, "--help"])
    assert not end.value.code
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", printed.getvalue()).split())
