"""Test which values of --header and --extra-body are sent, refused and redacted."""

from __future__ import annotations

import pytest

from dcpbench.errors import UsageError
from dcpbench.plan.command_line import hide_headers
from dcpbench.servers.client import Target
from dcpbench.servers.request_options import GREEDY_FIELDS, OWN_FIELDS, find_secrets, parse_extra_body, parse_headers


def test_headers_are_sent_with_every_request_and_may_replace_the_key() -> None:
    """With an Authorization header the API key is not sent."""
    target = Target.from_url("http://a:1", key="sk-of-the-environment", headers=parse_headers(["X-A: b: c", "X-D:e"]))
    assert b"Authorization: Bearer sk-of-the-environment\r\nX-A: b: c\r\nX-D: e\r\n" in target.encode_request(
        "GET", "/"
    )
    own = Target.from_url("http://a:1", key="sk-of-the-environment", headers=parse_headers(["authorization: Basic x"]))
    assert own.encode_request("GET", "/").count(b"uthorization") == 1
    assert "Basic" not in repr(own)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ": s3cret",
        "s3cret",
        "X-A:",
        "X A: s3cret",
        "X-A: s3cret\nX-B: b",
        "X-A: s3cret\r\nX-B: b",
        "X-A: s3crät s3cret",
        "Host: s3cret",
        "TE: s3cret",
    ],
)
def test_invalid_headers_are_refused_without_echo_of_the_value(text: str) -> None:
    """A value may be a secret."""
    with pytest.raises(UsageError, match=r"^--header .*\.$") as error:
        parse_headers([text])
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize("name", sorted(OWN_FIELDS))
def test_fields_that_dcpbench_sets_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"dcpbench sets {name} itself"):
        parse_extra_body(f'{{"{name}": null, "top_k": 1}}')


@pytest.mark.parametrize("name", sorted(GREEDY_FIELDS))
def test_sampling_fields_are_refused_if_answers_are_compared(name: str) -> None:
    """Loads may have these fields."""
    assert parse_extra_body(f'{{"{name}": 1}}') == {name: 1}
    with pytest.raises(UsageError, match=f"dcpbench sets {name} itself"):
        parse_extra_body(f'{{"{name}": 1}}', greedy=True)


def test_header_values_are_redacted_in_command_lines() -> None:
    """Both syntaxes of the option are redacted, and values of other options stay."""
    words = ["serve", "--header", "A: b c", "--header=D: e", "--header", "f", "--model", "A: b"]
    assert hide_headers(words) == ["serve", "--header", "A: …", "--header=D: …", "--header", "…", "--model", "A: b"]
    assert hide_headers(["--header"]) == ["--header"]
    nested = ["ab", "--a", "--url u --header 'A: b c' --tp 1", "--b=--header=A:b --tp 1", "--both", "--header 'A: b"]
    hidden = ["ab", "--a", "--url u --header 'A: …' --tp 1", "--b='--header=A: …' --tp 1", "--both", "…"]
    assert hide_headers(nested) == hidden
    assert hide_headers(["--b=--header=A:b", "x--header"]) == ["--b='--header=A: …'", "x--header"]


def test_values_and_words_of_secret_headers_are_secrets() -> None:
    """A model's name, which a record contains, is no secret."""
    headers = (("X-Api-Key", "k1"), ("Authorization", "Bearer t2"), ("Cookie", "a=b"), ("X-Model", "deepseek-v3"))
    assert find_secrets(headers) == ["k1", "Bearer t2", "Bearer", "t2", "a=b"]
