"""Pack and unpack the raw records of published results: `results/SUBJECT_HARDWARE/raw.tar.xz`.

    python -m tools.results unpack [FOLDER...]
    python -m tools.results pack FOLDER...

`unpack` extracts the archives of these folders, or of all folders, as `make unpack` does. `pack` writes a folder's archive from its files,
without tracked files, reports that `make results` writes, and PNG files. Git ignores the unpacked files.
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

from dcpbench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
ARCHIVE = "raw.tar.xz"
STAMP = ".unpacked"  # file with the checksum of the archive that was unpacked


def list_packed_folders() -> list[Path]:
    """Return the result folders that have an archive."""
    return sorted(path.parent for path in RESULTS.rglob(ARCHIVE))


def unpack(folder: Path) -> Path:
    """Unpack a result folder's archive unless its files are up to date; return the folder."""
    archive, stamp = folder / ARCHIVE, folder / STAMP
    content = archive.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    with _lock_file(archive):
        if not stamp.is_file() or stamp.read_text(encoding="utf-8") != digest:
            stamp.unlink(missing_ok=True)
            with tarfile.open(fileobj=io.BytesIO(content), mode="r:xz") as tar:
                tar.extractall(folder, filter="data")
            stamp.write_text(digest, encoding="utf-8")
    return folder


def unpack_all() -> Path:
    """Unpack every archive; return the folder of results."""
    for folder in list_packed_folders():
        unpack(folder)
    return RESULTS


def read_members(folder: Path) -> list[str]:
    """Return the paths in a folder's archive, relative to the folder."""
    with tarfile.open(folder / ARCHIVE) as tar:
        return tar.getnames()


def pack(folder: Path) -> list[Path]:
    """Write a folder's archive from its untracked files; return their paths, relative to the folder.

    The same files give the same archive. Raise UsageError if there are none, and if a file of the present archive is absent, as it would
    be lost.
    """
    archive = folder / ARCHIVE
    files = sorted(_iter_raw_files(folder), key=lambda path: (path.name, path))
    if not files:
        raise UsageError(f"{folder} has no raw file; name the folder of a result, as results/SUBJECT_HARDWARE.")
    lost = sorted(set(read_members(folder)) - {str(path) for path in files}) if archive.is_file() else []
    if lost:
        raise UsageError(
            f"{archive} has {len(lost)} files that are not in {folder}, such as {lost[0]}. "
            f"Unpack it first (python -m tools.results unpack {folder}), or delete the archive to leave them out."
        )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in files:
            content = (folder / path).read_bytes()
            member = tarfile.TarInfo(str(path))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    content = lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    archive.write_bytes(content)
    (folder / STAMP).write_text(hashlib.sha256(content).hexdigest(), encoding="utf-8")
    return files


def _iter_raw_files(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; name the folder of a result, as results/SUBJECT_HARDWARE.")
    listed = subprocess.run(
        ["git", "ls-files", "-z"],  # noqa: S607 -- git from the PATH of the user
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        raise UsageError(f"{folder} is in no Git repository; name the folder of a result, as results/SUBJECT_HARDWARE.")
    tracked = set(listed.stdout.split("\0"))
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        generated = any(part.startswith("report") for part in relative.parts[:-1]) or path.suffix in {".png", ".pyc"}
        if path.is_file() and not generated and str(relative) not in {*tracked, ARCHIVE, STAMP}:
            yield relative


@contextlib.contextmanager
def _lock_file(file: Path) -> Iterator[None]:
    """Hold a lock on a file, so that processes of a test run do not unpack it at the same time."""
    with file.open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.results", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("folder", nargs="*", type=Path)
    args = parser.parse_args(arguments)
    if args.what == "pack" and not args.folder:
        parser.error("name the folders to pack: python -m tools.results pack results/SUBJECT_HARDWARE")
    for folder in args.folder or list_packed_folders():
        archive = folder / ARCHIVE
        if args.what == "unpack" and not archive.is_file():
            parser.error(f"{folder} has no {ARCHIVE}; name a folder under results/ that has one.")
        try:
            if args.what == "pack":
                files = pack(folder)
                sys.stdout.write(f"{archive}: {len(files)} files, {archive.stat().st_size:,} bytes\n")
            else:
                unpack(folder)
        except UsageError as e:
            parser.error(str(e))
        except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as e:
            parser.error(
                f"{archive} cannot be read or written ({e}); to have the committed one again: git checkout {archive}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
