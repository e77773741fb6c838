"""`tools/check-words`: the source and the docs use the glossary's words, and a planted one is found."""

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def check_words() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("check_words", str(ROOT / "tools/check-words"))
    spec = importlib.util.spec_from_loader("check_words", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_no_word_of_the_list_is_used(
    check_words: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_words.main([]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("    def last_word(self) -> str:", ["word"]),
        ("class LocalMover(Mover):", ["Mover", "Mover"]),
        ("the ranks go on, whoever waits", ["go on", "whoever"]),
        ('raise ValueError("nobody joined")', ["nobody"]),
        ("ResNet of ImageNet, keyword, standard, others", []),
        ("a model and its image", []),
    ],
)
def test_what_is_found(check_words: ModuleType, line: str, words: list[str]) -> None:
    assert [hit.word for hit in check_words.hits_in("src/x.py", line)] == words


def test_an_exception_covers_one_word_of_one_place(check_words: ModuleType) -> None:
    (allowed,) = check_words.read_allowed("# reasons\nsrc/a*.py | word | a machine word\n")
    hits = check_words.hits_in("src/ab.py", "word nobody") + check_words.hits_in("src/b.py", "word")
    assert [allowed.covers(hit) for hit in hits] == [True, False, False]
    with pytest.raises(ValueError, match=r"line 1: expected `path \| word \| reason`"):
        check_words.read_allowed("src/a.py | word\n")


def test_every_word_has_a_remedy(check_words: ModuleType) -> None:
    assert len(check_words.WORDS) >= 20
    assert check_words.remedy("Nobody").startswith("name the rank")
