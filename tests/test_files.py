"""hymell_jax.files: bad JSON gives one sentence, outputs are whole or absent."""

import json
import os
import stat

import pytest

from hymell_jax import files


def sentence(call, *args):
    with pytest.raises(ValueError) as caught:
        call(*args)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_a_good_file_is_read_as_it_stands(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('\ufeff{"a": [1, 2.5, "ü", null, true]}', encoding="utf-8")
    assert files.read_json(path) == {"a": [1, 2.5, "ü", None, True]}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "is empty"),
        ("{", "not valid JSON"),
        ("{'a': 1}", "not valid JSON"),
        ('{"a": 1} x', "not valid JSON"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ('[{"b": {"a": 1, "a": 1}}]', "'a' twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1e999}', "too large"),
        ('{"a": ' + "9" * 5000 + "}", "too large"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    ],
)
def test_bad_json_gives_one_sentence_that_names_the_file(tmp_path, text, word):
    path = tmp_path / "bad.json"
    path.write_text(text)
    message = sentence(files.read_json, path, "device file")
    assert "device file" in message and word in message
    assert len(message) < 400 + len(str(path))


def test_other_unusable_files_give_one_sentence(tmp_path, monkeypatch):
    assert "No such file" in sentence(files.read_json, tmp_path / "absent.json")
    assert "not a regular file" in sentence(files.read_json, tmp_path)
    assert "path is not valid" in sentence(files.read_json, "a\0b.json")
    assert "cannot be read" in sentence(files.read_json, "x" * 5000)
    path = tmp_path / "latin.json"
    path.write_bytes(b'{"a": "\xe9"}')
    assert "UTF-8" in sentence(files.read_json, path)
    path.write_bytes(b'["%s"]' % (b"x" * 100))
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 50)
    assert "at most 50" in sentence(files.read_json, path)


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in sentence(files.read_json, tmp_path / "pipe")
    assert "not a regular file" in sentence(files.write_whole, tmp_path / "pipe", "x")


def test_written_content_is_read_back_and_leaves_no_other_file(tmp_path):
    path = tmp_path / "out.json"
    files.write_whole(path, json.dumps({"a": "ü"}))
    assert files.read_json(path) == {"a": "ü"}
    files.write_whole(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "out.txt"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in sentence(files.write_whole, path, "new" * 1000)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.txt"]


def test_an_interrupt_between_write_and_rename_leaves_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "out.txt"
    path.write_text("old")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["out.txt"]


def test_targets_that_cannot_be_written_give_one_sentence(tmp_path):
    assert "folder" in sentence(files.write_whole, tmp_path, "x")
    assert "No such file" in sentence(files.write_whole, tmp_path / "absent" / "a.txt", "x")
    assert "path is not valid" in sentence(files.write_whole, "a\0b", "x")
    path = tmp_path / "kept.txt"
    path.write_text("old")
    path.chmod(0o444)
    assert "read-only" in sentence(files.write_whole, path, "new")
    assert path.read_text() == "old"


def test_permissions_and_links_survive(tmp_path):
    path, link = tmp_path / "real.txt", tmp_path / "link.txt"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    files.write_whole(link, "new")
    assert link.is_symlink() and path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
