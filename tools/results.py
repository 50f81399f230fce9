"""Pack and unpack the raw records of published results: `results/SUBJECT_HARDWARE/raw.tar.xz`.

    python -m tools.results unpack [FOLDER...]
    python -m tools.results pack FOLDER...

`unpack` writes the archives' files into their folders, all of them without FOLDER; `make unpack` does the same. `pack` writes a folder's
archive from its files: all but tracked ones, the reports that `make results` writes, and PNG files. Git ignores the unpacked files.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import lzma
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
ARCHIVE = "raw.tar.xz"
STAMP = ".unpacked"  # file with the checksum of the unpacked archive next to it


def packed_folders() -> list[Path]:
    """Return the result folders that have an archive."""
    return sorted(path.parent for path in RESULTS.rglob(ARCHIVE))


def unpack(folder: Path) -> Path:
    """Unpack a result folder's archive where its files are absent or of another archive; return the folder."""
    archive, stamp = folder / ARCHIVE, folder / STAMP
    content = archive.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    with _locked(archive):
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != digest:
            stamp.unlink(missing_ok=True)
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:xz") as tar:
                tar.extractall(folder, filter="data")
            stamp.write_text(digest, encoding="utf-8")
    return folder


def unpack_all() -> Path:
    """Unpack every archive; return the folder of results."""
    for folder in packed_folders():
        unpack(folder)
    return RESULTS


def read_members(folder: Path) -> list[str]:
    """Return the names in a folder's archive, relative to the folder."""
    with tarfile.open(folder / ARCHIVE) as tar:
        return tar.getnames()


def pack(folder: Path) -> list[Path]:
    """Write a folder's archive from its untracked files; return what the archive holds, relative to the folder.

    The same files give the same archive. Raises SystemExit where a file of the present archive is absent, as it would be lost.
    """
    archive = folder / ARCHIVE
    files = sorted(_raw_files(folder), key=lambda path: (path.name, path))
    if not files:
        raise SystemExit(f"{folder} holds no raw file; name the folder of a result, as results/SUBJECT_HARDWARE.")
    lost = sorted(set(read_members(folder)) - {str(path) for path in files}) if archive.is_file() else []
    if lost:
        raise SystemExit(
            f"{archive} holds {len(lost)} files that {folder} does not, {lost[0]} among them. "
            f"Unpack it first (python -m tools.results unpack {folder}), or delete the archive to leave them out."
        )
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in files:
            content = (folder / path).read_bytes()
            member = tarfile.TarInfo(str(path))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    content = lzma.compress(held.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    archive.write_bytes(content)
    (folder / STAMP).write_text(hashlib.sha256(content).hexdigest(), encoding="utf-8")
    return files


def _raw_files(folder: Path) -> Iterator[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"],  # noqa: S607 -- whichever git the user has
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    tracked = set(listed.split("\0"))
    for path in folder.rglob("*"):
        inside = path.relative_to(folder)
        written_again = any(part.startswith("report") for part in inside.parts[:-1]) or path.suffix in {".png", ".pyc"}
        if path.is_file() and not written_again and str(inside) not in {*tracked, ARCHIVE, STAMP}:
            yield inside


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock on a file, so that processes of one test run unpack it one after another."""
    with file.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("folder", nargs="*", type=Path)
    asked = parser.parse_args(arguments)
    if asked.what == "pack" and not asked.folder:
        parser.error("pack needs the folders to pack: python -m tools.results pack results/SUBJECT_HARDWARE")
    for folder in asked.folder or packed_folders():
        if asked.what == "pack":
            files = pack(folder)
            size = (folder / ARCHIVE).stat().st_size
            sys.stdout.write(f"{folder / ARCHIVE}: {len(files)} files, {size:,} bytes\n")
        elif (folder / ARCHIVE).is_file():
            unpack(folder)
        else:
            parser.error(f"{folder} has no {ARCHIVE}; name a folder under results/ that has one.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
