"""What clients and servers have said is shown as text, whatever it looks like."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire_client.snapshot import RequestState
from quire_dashboard.frame import request_names
from quire_dashboard.words import as_code, as_text, printable


def test_a_label_is_one_short_line_of_what_can_be_seen() -> None:
    assert printable("report 7", 64) == "report 7"
    assert printable("a\nb\u202ec\x00d\u2028e", 64) == "a\ufffdb\ufffdc\ufffdd\ufffde"
    assert printable("x" * 64, 64) == "x" * 64
    assert printable("x" * 65, 64) == "x" * 63 + "…"
    (name,) = request_names([RequestState(id="0123456789", label="y" * 4_000_000)])
    assert name == "y" * 63 + "… (012345)"


@pytest.mark.parametrize(
    ("text", "code"), [("a", "`a`"), ("a`b``c", "```a`b``c```"), ("`", "`` ` ``"), ("`a", "`` `a ``")]
)
def test_code_spans_are_those_of_commonmark(text: str, code: str) -> None:
    assert as_code(text) == code


@given(st.text("`a![]()", min_size=1))
def test_nothing_ends_a_code_span_early(text: str) -> None:
    code = as_code(text)
    fence = re.match("`+", code)
    assert fence is not None
    inner = code[len(fence[0]) : -len(fence[0])]
    assert code.endswith(fence[0])
    assert fence[0] not in re.findall("`+", inner)
    assert text in inner


def test_a_sentence_keeps_its_words_and_means_nothing() -> None:
    assert as_text("![x](http://HOST/i.png)\n<b> $a$ :red[y] *z*") == (
        r"!\[x\](http\://HOST/i.png) \<b\> \$a\$ \:red\[y\] \*z\*"
    )
