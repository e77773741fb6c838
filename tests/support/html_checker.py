"""Whether a page is well formed."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br"}


class Checker(HTMLParser):
    """Holds that elements are closed in order, that identifiers are unique, and keeps what would be
    fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.alts: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids += [str(given["id"])] if "id" in given else []
        self.addresses += [str(given[name]) for name in ("src", "href") if name in given]
        self.alts += [given.get("alt")] if tag == "img" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"
