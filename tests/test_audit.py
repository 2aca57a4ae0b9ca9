"""The audit of locked versions, on advisories as OSV writes them."""

import json
import sys
import zipfile

import pytest

from tools import audit


def advisory(name, versions=(), events=(), **others):
    affected = {
        "package": {"name": name, "ecosystem": "PyPI"},
        "versions": list(versions),
        "ranges": [{"type": "ECOSYSTEM", "events": list(events)}],
    }
    return {"id": f"PYSEC-{name}", "summary": "a hole", "affected": [affected], **others}


@pytest.mark.parametrize(
    ("version", "events", "expected"),
    [
        ("1.9", [{"introduced": "0"}, {"fixed": "1.10"}], True),
        ("1.10", [{"introduced": "0"}, {"fixed": "1.10"}], False),
        ("1.10.post1", [{"introduced": "0"}, {"fixed": "1.10"}], False),
        ("2.0", [{"introduced": "1.0"}, {"fixed": "1.5"}, {"introduced": "2.0"}], True),
        ("0.9", [{"introduced": "1.0"}], False),
        ("1.5", [{"introduced": "1.0"}, {"last_affected": "1.5"}], True),
        ("1.5.0", [{"introduced": "1.0"}, {"last_affected": "1.5"}], True),
        ("1.6", [{"introduced": "1.0"}, {"last_affected": "1.5"}], False),
    ],
)
def test_ranges(version, events, expected):
    (affected,) = advisory("a", events=events)["affected"]
    assert audit.is_affected(version, affected) == expected


def test_what_holds_is_told(tmp_path, monkeypatch, capsys):
    versions = audit.locked(audit.LOCK.read_text())
    assert versions["numpy"][0].isdigit() and len(versions) > 100
    known = [
        advisory("NumPy", [versions["numpy"]]),
        advisory("keras", ["1.0"]),
        advisory("tqdm", [versions["tqdm"]], withdrawn="2020-01-01T00:00:00Z"),
        advisory("not-ours", ["1.0"]),
    ]
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for content in known:
            archive.writestr(f"{content['id']}.json", json.dumps(content))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.json").write_text(json.dumps(known[1]))
    (tmp_path / "empty").mkdir()
    for name, code, first in (
        ("all.zip", 1, f"numpy {versions['numpy']}: PYSEC-NumPy: a hole"),
        ("folder", 0, f"{len(versions)} packages, 1 advisories about them, 0 that hold"),
        ("empty", 2, f"{len(versions)} packages, 0 advisories about them, 0 that hold"),
    ):
        monkeypatch.setattr(sys, "argv", ["audit", str(tmp_path / name)])
        with pytest.raises(SystemExit) as end:
            audit.main()
        assert end.value.code == code
        assert capsys.readouterr().out.splitlines()[0] == first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: advisories"),
        (["no/all.zip"], "no/all.zip: there is no such file or folder"),
    ],
)
def test_nothing_to_go_by_is_told(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["audit.py", *arguments])
    with pytest.raises(SystemExit) as end:
        audit.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"audit.py: error: {message}"


@pytest.mark.parametrize(
    ("name", "content"), [("all.zip", b"<html>"), ("folder/a.json", b"{"), ("folder/a.json", b"[]")]
)
def test_other_files_are_told(monkeypatch, capsys, tmp_path, name, content):
    (tmp_path / "folder").mkdir()
    (tmp_path / name).write_bytes(content)
    path = tmp_path / name.partition("/")[0]
    monkeypatch.setattr(sys, "argv", ["audit.py", str(path)])
    with pytest.raises(SystemExit) as end:
        audit.main()
    assert end.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"audit.py: error: {path}: no archive or folder of OSV's advisories (")
