"""The transcript: what was written comes back to the byte; a torn or forged file is refused, and no length in it is trusted."""

import stat

import pytest

from privot.errors import DataError
from privot.federated.transcript import (
    ENTRY_HEADER,
    RECEIVED_FROM_CLIENT,
    SENT_TO_CLIENT,
    TRANSCRIPT_MAGIC,
    TranscriptEntry,
    TranscriptWriter,
    read_transcript,
)

STORY = [
    TranscriptEntry(SENT_TO_CLIENT, "ward 3", b"images"),
    TranscriptEntry(RECEIVED_FROM_CLIENT, "ward 3", b""),
    TranscriptEntry(RECEIVED_FROM_CLIENT, "über", bytes(range(256)) * 9),
]


def write_transcript(path):
    with TranscriptWriter(path) as writer:
        for entry in STORY:
            is_sent = entry.direction == SENT_TO_CLIENT
            record = writer.record_sent if is_sent else writer.record_received
            record(entry.client_name, entry.message)
    return path


def test_what_was_written_comes_back_to_the_byte_and_more_is_appended(tmp_path):
    path = write_transcript(tmp_path / "wire")
    assert list(read_transcript(path)) == STORY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(read_transcript(write_transcript(path))) == STORY * 2


def test_every_torn_end_is_refused_by_the_reader_and_cut_off_by_the_writer(tmp_path):
    whole = write_transcript(tmp_path / "whole").read_bytes()
    last = len(whole) - ENTRY_HEADER.size - len("über".encode()) - len(STORY[-1].message)
    for end in (last + 1, last + ENTRY_HEADER.size, last + ENTRY_HEADER.size + 3, len(whole) - 1):
        (path := tmp_path / f"torn {end}").write_bytes(whole[:end])
        with pytest.raises(DataError, match="cut off after 2 complete messages"):
            list(read_transcript(path))
        assert list(read_transcript(write_transcript(path))) == STORY[:-1] + STORY


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no transcript"),
        (b"privot wire record 2\n", "no transcript"),
        (TRANSCRIPT_MAGIC + ENTRY_HEADER.pack(b">", 1, 2**32 - 1) + b"ab", "cut off"),  # 4 GiB
        (TRANSCRIPT_MAGIC + ENTRY_HEADER.pack(b"!", 1, 1) + b"ab", "damaged"),
        (TRANSCRIPT_MAGIC + ENTRY_HEADER.pack(b"<", 1, 1) + b"\xffb", "damaged"),
    ],
)
def test_what_is_no_transcript_is_refused_in_one_line(tmp_path, content, word):
    (path := tmp_path / "wire").write_bytes(content)
    with pytest.raises(DataError, match=word):
        list(read_transcript(path))


def test_a_file_that_is_something_else_is_not_written_over(tmp_path):
    (path := tmp_path / "diary").write_bytes(b"dear diary")
    with pytest.raises(DataError):
        TranscriptWriter(path)
    assert path.read_bytes() == b"dear diary"
    with pytest.raises(DataError, match="cannot be read"):
        list(read_transcript(tmp_path / "nowhere"))
