"""The wire record: what was written comes back to the byte; a torn or forged file is refused, and no length in it is trusted."""

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


def written(path, story=STORY):
    with TranscriptWriter(path) as record:
        for each in story:
            (record.record_sent if each.direction == SENT_TO_CLIENT else record.record_received)(
                each.client_name, each.message
            )
    return path


def test_what_was_written_comes_back_to_the_byte_and_is_the_owners(tmp_path):
    path = written(tmp_path / "wire")
    assert list(read_transcript(path)) == STORY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_server_that_goes_on_appends(tmp_path):
    path = written(written(tmp_path / "wire"))
    assert list(read_transcript(path)) == STORY * 2


def test_every_torn_end_is_refused_by_the_reader_and_cut_off_by_the_writer(tmp_path):
    whole = written(tmp_path / "whole").read_bytes()
    last = len(whole) - ENTRY_HEADER.size - len("über".encode()) - len(STORY[-1].message)
    for end in (last + 1, last + ENTRY_HEADER.size, last + ENTRY_HEADER.size + 3, len(whole) - 1):
        (path := tmp_path / f"torn {end}").write_bytes(whole[:end])
        with pytest.raises(DataError, match="cut off after 2 complete messages"):
            list(read_transcript(path))
        assert list(read_transcript(written(path))) == STORY[:-1] + STORY


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no transcript"),
        (b"privot wire record 2\n", "no transcript"),
        (
            TRANSCRIPT_MAGIC + ENTRY_HEADER.pack(b">", 1, 2**32 - 1) + b"ab",
            "cut off",
        ),  # 4 GiB that are not there
        (TRANSCRIPT_MAGIC + ENTRY_HEADER.pack(b"!", 1, 1) + b"ab", "damaged"),
        (TRANSCRIPT_MAGIC + ENTRY_HEADER.pack(b"<", 1, 1) + b"\xffb", "damaged"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path, content, word):
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
