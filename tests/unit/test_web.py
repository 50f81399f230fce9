"""What pages are made of: data that stays data, and a policy that lets nothing else run."""

from __future__ import annotations

import base64
import hashlib
import json

import pytest

from dcpbench.show import web


@pytest.mark.parametrize(
    "text",
    ["</script><script>alert(1)</script>", "<!--", "&lt;", "\u2028", "'\"\\", "\N{GRINNING FACE}"],
    ids=["script", "comment", "entity", "line", "quotes", "emoji"],
)
def test_strings_come_back_as_they_were_and_hold_no_markup(text: str) -> None:
    block = web.json_block({"name": [text]})
    assert json.loads(block) == {"name": [text]}
    assert not set("<>&\u2028\u2029") & set(block)


def test_what_json_cannot_say_is_null() -> None:
    block = web.json_block({"a": [float("nan"), float("inf"), -float("inf"), 1.5, (2, None)]})
    assert json.loads(block) == {"a": [None, None, None, 1.5, [2, None]]}


def test_the_policy_names_the_scripts_of_the_page_and_allows_no_address() -> None:
    digest = base64.b64encode(hashlib.sha256(b"let a = 1").digest()).decode()
    policy = web.policy(["let a = 1"])
    assert f"script-src 'sha256-{digest}'" in policy
    assert "http" not in policy
    assert "connect-src 'none'" in policy
    assert "script-src 'none'" in web.policy()


def test_plotly_is_what_npm_has() -> None:
    """The file of plotly.js-basic-dist-min 4.1.1, by its digest: nobody edits it in place."""
    digest = hashlib.sha256(web.read(web.PLOTLY).encode()).hexdigest()
    assert digest == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert "</script" not in web.read(web.PLOTLY).lower()
