"""Both matchers find every place of every string, and nothing else."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.policies.diagnosis import literal_search
from autotune.policies.diagnosis.literal_search import Naming, Search
from autotune.policies.diagnosis.scan import SEARCHED
from autotune.policies.diagnosis.unknown_errors import WRONG

WORDS = st.lists(
    st.text(st.sampled_from("abA 1:é"), min_size=1, max_size=5), min_size=1, max_size=6, unique=True
)


def naive(words: list[str], block: bytes) -> list[int]:
    encoded = [word.encode() for word in words]
    ends = range(len(block) + 1)
    return [end for end in ends if any(block[:end].endswith(word) for word in encoded)]


@pytest.mark.parametrize("plain", [False, True])
@settings(max_examples=150, deadline=None)
@given(WORDS, WORDS, st.text(st.sampled_from("abA 1:é\n\r\0"), max_size=200))
def test_every_place_is_found(plain: bool, first: list[str], second: list[str], text: str):
    search = Search(first, second)
    block = text.encode()
    result = (search.plain() if plain else search.matcher())(block)
    assert result == (naive(first, block), naive(second, block))


@pytest.mark.parametrize("plain", [False, True])
@settings(max_examples=150, deadline=None)
@given(WORDS, st.text(st.sampled_from("abA 1:é\n"), max_size=900))
def test_every_place_is_counted(plain: bool, words: list[str], text: str):
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr(literal_search, "hyperscan", None)
        result = Naming(words).counted(text)
    counts = {word: len(naive([word], text.encode())) for word in words}
    assert result == {word: count for word, count in counts.items() if count}


@pytest.mark.parametrize("length", range(5, 40))
def test_a_string_is_named_wherever_it_stands_in_a_short_text(length: int):
    naming = Naming(["needle", "pin"])
    for at in range(length):
        text = "." * at + "needle" + "." * (length - at)
        assert set(naming.plain(text)) == {0}
    assert set(naming.plain("." * length + "needl")) == set()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=30), st.sampled_from([*SEARCHED, *WRONG]).map(str.encode)), max_size=30
    )
)
def test_both_matchers_agree_on_what_is_searched(pieces: list[bytes]):
    search = Search(SEARCHED, WRONG)
    block = b"".join(pieces)
    assert search.plain()(block) == search.matcher()(block)


def test_without_hyperscan_the_standard_library_names_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "hyperscan", None)
    spec = importlib.util.find_spec(literal_search.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.hyperscan is None
    assert set(module.Naming(["needle", "pin"]).named("a needle")) == {0}


def test_a_processor_that_hyperscan_refuses_has_the_standard_librarys_matchers(
    monkeypatch: pytest.MonkeyPatch,
):
    class RefusedError(Exception):
        pass

    class Database:
        def __init__(self, mode: int) -> None: ...

        def compile(self, **_: object) -> None:
            raise RefusedError

    library = SimpleNamespace(Database=Database, HS_MODE_BLOCK=1, error=RefusedError)
    monkeypatch.setattr(literal_search, "hyperscan", library)
    naming = Naming(["of a processor", "without SSSE3"])
    assert set(naming.named("one without SSSE3")) == {1}
    assert naming.counted("without SSSE3, without SSSE3") == {"without SSSE3": 2}
    assert Search(["of a processor without"], ["SSSE3"]).matcher()(b"SSSE3 SSSE3") == ([], [5, 11])


def test_matchers_of_several_threads_do_not_meet():
    from concurrent.futures import ThreadPoolExecutor

    search = Search(["needle"], ["error"])
    block = b"needle error " * 20000
    with ThreadPoolExecutor(4) as pool:
        items = list(pool.map(lambda matcher: matcher(block), [search.matcher() for _ in range(16)]))
    assert {len(ends) for ends, _ in items} == {20000}
