"""The wire record: what was written comes back to the byte; a torn or forged file is refused, and no length in it is trusted."""

import stat

import pytest

from privot.errors import DataError
from privot.federated.transcript import HEAD, MAGIC, SEEN, SENT, Entry, Recorder, read

STORY = [
    Entry(SENT, "ward 3", b"images"),
    Entry(SEEN, "ward 3", b""),
    Entry(SEEN, "über", bytes(range(256)) * 9),
]


def written(path, story=STORY):
    with Recorder(path) as record:
        for each in story:
            (record.sent if each.way == SENT else record.seen)(each.name, each.message)
    return path


def test_what_was_written_comes_back_to_the_byte_and_is_the_owners(tmp_path):
    path = written(tmp_path / "wire")
    assert list(read(path)) == STORY
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_server_that_goes_on_appends(tmp_path):
    path = written(written(tmp_path / "wire"))
    assert list(read(path)) == STORY * 2


def test_every_torn_end_is_refused_by_the_reader_and_cut_off_by_the_writer(tmp_path):
    whole = written(tmp_path / "whole").read_bytes()
    last = len(whole) - HEAD.size - len("über".encode()) - len(STORY[-1].message)
    for end in (last + 1, last + HEAD.size, last + HEAD.size + 3, len(whole) - 1):
        (path := tmp_path / f"torn {end}").write_bytes(whole[:end])
        with pytest.raises(DataError, match="cut off after 2 whole messages"):
            list(read(path))
        assert list(read(written(path))) == STORY[:-1] + STORY


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "no wire record"),
        (b"privot wire record 2\n", "no wire record"),
        (MAGIC + HEAD.pack(b">", 1, 2**32 - 1) + b"ab", "cut off"),  # 4 GiB that are not there
        (MAGIC + HEAD.pack(b"!", 1, 1) + b"ab", "damaged"),
        (MAGIC + HEAD.pack(b"<", 1, 1) + b"\xffb", "damaged"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path, content, word):
    (path := tmp_path / "wire").write_bytes(content)
    with pytest.raises(DataError, match=word):
        list(read(path))


def test_a_file_that_is_something_else_is_not_written_over(tmp_path):
    (path := tmp_path / "diary").write_bytes(b"dear diary")
    with pytest.raises(DataError):
        Recorder(path)
    assert path.read_bytes() == b"dear diary"
    with pytest.raises(DataError, match="cannot be read"):
        list(read(tmp_path / "nowhere"))
