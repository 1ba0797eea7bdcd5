"""Archives are unpacked alike by every Python that the project supports."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from lab.unpack import unpack


def archive(folder: Path, member: tarfile.TarInfo, content: bytes = b"") -> Path:
    path = folder / "archive.tar"
    member.size = len(content)
    with tarfile.open(path, "w") as packed:
        packed.addfile(member, io.BytesIO(content))
    return path


def test_files_are_unpacked_with_their_modes_where_tarfile_has_no_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)  # as Python 3.11.2
    monkeypatch.delattr(tarfile.TarFile, "extractall")
    program = tarfile.TarInfo("bin/program")
    program.mode = 0o755
    unpack(archive(tmp_path, program, b"#!"), tmp_path / "out")
    unpacked = tmp_path / "out" / "bin" / "program"
    assert (unpacked.read_bytes(), unpacked.stat().st_mode & 0o777) == (b"#!", 0o755)


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_a_file_outside_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path, tarfile.TarInfo(name), b"x")
    with pytest.raises(tarfile.TarError, match="outside"):
        unpack(path, tmp_path / "out")
    assert not (tmp_path / "outside").exists()


def test_a_link_is_refused(tmp_path: Path) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    with pytest.raises(tarfile.TarError, match="link"):
        unpack(archive(tmp_path, link), tmp_path / "out")
