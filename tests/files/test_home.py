"""`~` in paths, and users without a home folder."""

import pwd
from pathlib import Path

import pytest

from allstep.data.cache import cache_folder
from allstep.errors import ConfigError
from allstep.files.home import cache_home, config_home, expand_home


def no_such_user(_: object) -> None:
    raise KeyError("getpwuid(): uid not found")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user id without an entry, as in a container, and no variable that names a folder."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "ALLSTEP_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_such_user)


def test_a_known_user() -> None:
    assert expand_home("~/x") == Path.home() / "x"
    assert expand_home("~root/x") == Path(pwd.getpwnam("root").pw_dir) / "x"
    assert expand_home("a/~b") == Path("a/~b")


def test_a_name_of_no_user_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may be called `~x`; a shell leaves such a word alone, too."""
    monkeypatch.chdir(tmp_path)
    Path("~nosuchuser").mkdir()
    assert expand_home("~nosuchuser").is_dir()


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expand_home("~/x") == Path("~/x")
    with pytest.raises(ConfigError, match=r"no home folder .* set HOME, or ALLSTEP_CACHE"):
        cache_home()
    with pytest.raises(ConfigError, match=r"no home folder .* set HOME, or XDG_CONFIG_HOME"):
        config_home()
    monkeypatch.setenv("ALLSTEP_CACHE", "given")
    assert cache_folder() == Path("given")
