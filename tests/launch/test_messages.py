"""Messages between launcher, agents and probes: each survives the way, bad ones are errors."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep._version import __version__
from allstep.doctor.hosts import visit
from allstep.doctor.probe_messages import TO_DOCTOR, TO_PROBE
from allstep.errors import ConfigError, WorldError
from allstep.launch import Host, Job
from allstep.launch.messages import (
    TO_AGENT,
    TO_LAUNCHER,
    BadMessage,
    Channel,
    Exit,
    Lines,
    Message,
    Start,
    WorkerOrder,
    decode,
    encode,
)
from allstep.launch.output.writer import _encoded
from support.allstep_command import run

CHANNELS = [TO_AGENT, TO_LAUNCHER, TO_PROBE, TO_DOCTOR]
KINDS = [(channel, cls) for channel in CHANNELS for cls in channel.kinds.values()]
# Of JSON objects without a type of their own, and floats without nan, which does not equal itself.
OBJECTS = st.dictionaries(
    st.text(), st.integers() | st.text() | st.none() | st.lists(st.text(), max_size=2), max_size=3
)
SPECIAL = {float: st.floats(allow_nan=False), dict[str, Any]: OBJECTS}


@pytest.mark.parametrize(("channel", "cls"), KINDS, ids=lambda each: getattr(each, "__name__", ""))
def test_every_message_survives_the_way(channel: Channel, cls: type[Message]) -> None:
    special = {
        field.name: SPECIAL[field.type]
        for field in dataclasses.fields(cls)
        if field.type in SPECIAL
    }

    @given(st.builds(cls, **special))
    def survives(message: Message) -> None:
        line = encode(message)
        assert b"\n" not in line and line.startswith(b'{"kind":')
        found = decode(line, channel)
        assert found == message and type(found) is cls

    survives()


def line_of(message: Message, **changes: object) -> bytes:
    """A message with some fields replaced; a field set to `...` is missing."""
    fields = {**json.loads(encode(message)), **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not ...}).encode()


EXIT = Exit(3, 1, out_of_memory=False)
START = Start(
    ("true",), "/", {}, (WorkerOrder(0, {}),), None, (("h", 1),), "t", (), None, 7.0, 1.0, 1, False
)
VERSIONS = f"; it has allstep {__version__}, here is {__version__}: install the same on every host"


@pytest.mark.parametrize(
    ("line", "channel", "kind", "field", "complaint"),
    [
        (
            line_of(EXIT, kind="exti"),
            TO_LAUNCHER,
            "exti",
            "kind",
            "sent message 'exti', which is unknown here",
        ),
        (line_of(EXIT), TO_AGENT, "exit", "kind", "sent message 'exit', which is unknown here"),
        (
            line_of(EXIT, rank=...),
            TO_LAUNCHER,
            "exit",
            "rank",
            "sent message 'exit' without field 'rank'",
        ),
        *(
            (
                line_of(EXIT, rank=value),
                TO_LAUNCHER,
                "exit",
                "rank",
                f"sent message 'exit' with field 'rank': found {shown}, expected int",
            )
            for value, shown in (
                ("3", "'3'"),
                (True, "True"),
                (3.0, "3.0"),
                (None, "None"),
                ([3], "[3]"),
            )
        ),
        (
            line_of(START, store=[["h"]]),
            TO_AGENT,
            "start",
            "store",
            "sent message 'start' with field 'store': found ['h'], expected a list of 2",
        ),
        (
            line_of(START, workers=[{"rank": 0}]),
            TO_AGENT,
            "start",
            "workers",
            (
                "sent message 'start' with field 'workers': found {'rank': 0}, expected an object"
                " with 'env'"
            ),
        ),
        (
            line_of(START, env={"A": 1}),
            TO_AGENT,
            "start",
            "env",
            "sent message 'start' with field 'env': found 1, expected str",
        ),
        (
            line_of(START, command="true"),
            TO_AGENT,
            "start",
            "command",
            "sent message 'start' with field 'command': found 'true', expected a list",
        ),
    ],
)
def test_a_bad_message_is_an_error_with_the_details(
    line: bytes, channel: Channel, kind: str, field: str, complaint: str
) -> None:
    with pytest.raises(BadMessage) as raised:
        decode(line, channel)
    error = raised.value
    assert (error.kind, error.field, error.theirs, error.ours) == (
        kind,
        field,
        __version__,
        __version__,
    )
    assert error.described("h2") == f"h2 {complaint}{VERSIONS}"
    assert isinstance(error, WorldError)


def test_another_version_is_found_before_what_it_changed() -> None:
    for line in (line_of(EXIT, version="9.9", rank=...), line_of(EXIT, version="9.9", kind="new")):
        with pytest.raises(BadMessage) as raised:
            decode(line, TO_LAUNCHER)
        assert (raised.value.field, raised.value.theirs, raised.value.ours) == (
            "version",
            "9.9",
            __version__,
        )
        assert (
            raised.value.described("h2")
            == f"h2 has allstep 9.9, here is {__version__}: install the same on every host"
        )
    with pytest.raises(BadMessage, match="of an unknown version"):
        decode(line_of(EXIT, version=...), TO_LAUNCHER)


@pytest.mark.parametrize(
    "line", [b'{"kind": "exit"', b'{"kind":' + b"[" * 100_000, b'{"kind": 3}', b"[]", b"\xff"]
)
def test_a_line_that_is_no_message(line: bytes) -> None:
    with pytest.raises(BadMessage) as raised:
        decode(line, TO_LAUNCHER)
    assert len(str(raised.value)) < 300


def test_a_wrong_stream_and_fields_that_are_new() -> None:
    lines = Lines(0, "out", ("a",))
    with pytest.raises(BadMessage, match="found 'odd', expected 'out' or 'err'"):
        decode(line_of(lines, stream="odd"), TO_LAUNCHER)
    assert decode(line_of(lines, new=1), TO_LAUNCHER) == lines


AGENT = """
import sys
{before}
from allstep.launch import agent_main
from allstep.launch.agent import Agent

def send_line(self, line):
    self.link.outbox += line + b"\\n"
    self.link.flush()

{after}
sys.argv = ["agent", "far.invalid"]
agent_main.main()
"""
OTHER_VERSION = "import allstep._version; allstep._version.__version__ = '9.9'"
AFTER_START = """
start = Agent._on_start
def spoiled(self, message):
    start(self, message)
    send_line(self, {line!r})
Agent._on_start = spoiled
"""
LINE = f'{{"kind": "KIND", "version": "{__version__}", "rank": RANK}}'.encode()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (
            OTHER_VERSION,
            "",
            f"far.invalid has allstep 9.9, here is {__version__}: install the same on every host",
        ),
        (
            "",
            AFTER_START.format(line=LINE.replace(b"KIND", b"exti").replace(b"RANK", b"0")),
            f"far.invalid sent message 'exti', which is unknown here{VERSIONS}",
        ),
        (
            "",
            AFTER_START.format(line=LINE.replace(b"KIND", b"exit").replace(b"RANK", b"0")),
            f"far.invalid sent message 'exit' without field 'code'{VERSIONS}",
        ),
        (
            "",
            AFTER_START.format(line=b'{"kind": "lines", "rank": 7, "stream": "out", "lines": []}'),
            (
                "far.invalid sent message 'lines' with field 'rank': found 7, expected rank"
                f" 0{VERSIONS}"
            ),
        ),
        (
            "",
            "from allstep.launch import messages; del messages.TO_AGENT.kinds['start']",
            f"the launcher sent message 'start', which is unknown here{VERSIONS} (on far.invalid)",
        ),
    ],
    ids=["version", "kind", "field", "rank", "order"],
)
def test_a_run_with_an_agent_that_is_not_understood_ends_with_a_report(
    tmp_path: Path, before: str, after: str, complaint: str
) -> None:
    (tmp_path / "agent.py").write_text(AGENT.format(before=before, after=after))
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/agent.py\n")
    ssh.chmod(0o755)
    done = run(
        "run", "-H", "far.invalid:1", "--ssh", ssh, "--iface", "lo", "sleep", "600", limit=60
    )
    banner, _, last = done.err.rstrip("\n").rpartition("\n")
    assert (done.code, last) == (2, f"allstep: {complaint}"), done.err
    assert "Traceback" not in done.err and done.out == ""
    assert banner in ("", "allstep run: 1 workers on 1 hosts: far.invalid has rank 0")


@pytest.mark.usefixtures("processes")
def test_a_probe_that_is_not_understood_is_an_error_of_its_host(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f"#!/bin/sh\necho '{LINE.decode().replace('KIND', 'hola').replace('RANK', '0')}'\nexec"
        " sleep 60\n"
    )
    ssh.chmod(0o755)
    (station,) = visit([Host("far.invalid", 1)], str(ssh)).states
    assert station.error == f"far.invalid sent message 'hola', which is unknown here{VERSIONS}"


def test_half_a_character_in_lines_is_printed_escaped() -> None:
    """No worker can write it: an agent that is not ours did."""
    assert _encoded("\ud800x\n") == b"\\ud800x\n"
    assert _encoded("\udcff\udc80y\n") == b"\xff\x80y\n"


@pytest.mark.parametrize(
    ("command", "env", "text"),
    [
        (["true", "a\0b"], {}, "the command holds a NUL byte"),
        (["true"], {"A": "x\0"}, "the variable A holds a NUL byte"),
    ],
)
def test_what_no_program_can_take_is_refused(
    command: list[str], env: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        Job(command, [Host("localhost", 1)], env=env)
