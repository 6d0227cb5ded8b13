"""Prompt files: a file, a folder of files or a glob, on this machine or on S3; their formats are in parsers.py.

Large files are read in parts and small ones together, a few megabytes in each task. The order of rows is that of the
files, sorted by path, and of the rows in them. Left out: Hugging Face data sets (hub.py).
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from rlx.config.errors import ConfigError, where_looked
from rlx.config.sections.data import DataConfig
from rlx.data.stored import parsers
from rlx.data.stored.columns import Columns
from rlx.data.stored.parsers import FORMATS, Part
from rlx.data.stored.source import NO_ROWS, Reading, StoredSource
from rlx.storage.addresses import open_storage, without_options
from rlx.storage.filesystem import StorageError

PIECE_BYTES = 4 * 2**20
"""bytes of files that a task reads, about; a file whose format has no parts is read by one task"""
_QUICK_BYTES = 64 * 2**20
_GLOB = "*?["
_FOLDERS = 200  # that are listed at most to find what a folder has below it
_SHOWN = 6  # globs in an error
_HELD_OUT = dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
_SPLITS = {"train": "train"} | _HELD_OUT | {"test": "test", "eval": "eval"}
"""splits by the names that files and folders of data sets have for them"""
_OF_SPLIT = re.compile(rf"({'|'.join(_SPLITS)})([-_]?)(\d+(-of-\d+)?(-[0-9a-f]{{16}})?)?")
"""name of a file of a data set on the hub, without its suffix; dev-ops is none"""


@dataclass(frozen=True)
class PromptFile:
    """A file with prompts."""

    name: str  # in errors
    path: str  # on its filesystem
    size: int


class FileSource(StoredSource):
    """Files with a question and an answer in each row: PATH, FOLDER or GLOB, on this machine or on S3."""

    def check(self, address: str, data: DataConfig, setting: str) -> None:
        """Raises ConfigError if there is no such file, all are empty, or the first rows cannot be used.

        Rows are read if that takes a moment alone: not those of a large file that can only be read as a whole.
        """
        _, files = find_files(address, setting)
        first = next(file for file in files if file.size)
        is_quick = parsers.format_of(first.path).has_parts or first.size <= _QUICK_BYTES
        if is_quick and not self.read_first(address, data, setting, 1):
            raise ConfigError(f"{setting} {address}: {NO_ROWS}")

    def resolve(self, address: str) -> str:
        """Returns an absolute path if the address is one of this machine that exists, or a glob."""
        exists = os.path.exists(address)  # Path.exists fails if a name is too long
        if "://" in address or not (_is_glob(address) or exists):
            return address
        return str(Path(address).resolve()) if exists else os.path.abspath(address)

    def reading(self, address: str, columns: Columns, setting: str) -> Reading:
        filesystem, files = find_files(address, setting)
        is_local = isinstance(filesystem, fs.LocalFileSystem)
        return Reading(list(pieces_of(files)), PartReader(filesystem, columns), here=is_local, names_files=True)


@dataclass(frozen=True)
class PartReader:
    """Reads parts of files, in a task."""

    filesystem: fs.FileSystem
    columns: Columns

    def __call__(self, parts: Sequence[Part]) -> Iterator[pa.Table]:
        for part in parts:
            with self.filesystem.open_input_file(part.path) as file:
                yield from parsers.read_part(file, part, self.columns)


def pieces_of(files: Sequence[PromptFile]) -> Iterator[list[Part]]:
    """Yields what each task reads: a part of a large file, or several small files."""
    piece: list[Part] = []
    size = 0
    for file in filter(lambda file: file.size, files):
        count = -(-file.size // PIECE_BYTES) if parsers.format_of(file.path).has_parts else 1
        if piece and size + file.size > PIECE_BYTES:
            yield piece
            piece, size = [], 0
        parts = [Part(file.name, file.path, index, count) for index in range(count)]
        yield from ([part] for part in parts[:-1])
        piece, size = [*piece, parts[-1]], size + file.size
    if piece:
        yield piece


# ---------------------------------------------------------------------------------------------------------------------
# Finding files


def find_files(address: str, setting: str) -> tuple[fs.FileSystem, list[PromptFile]]:
    """Returns the files that an address names, sorted by path, and the filesystem that they are on.

    Args:
        setting: the setting that has the address, for errors.

    Raises:
        ConfigError: there are none, or they have several formats, or all are empty.
    """
    place = _Place.open(address, setting)
    try:
        kind = place.filesystem.get_file_info(place.path).type
        if kind == fs.FileType.File:
            infos = [place.filesystem.get_file_info(place.path)]
        elif kind == fs.FileType.Directory:
            infos = place.filesystem.get_file_info(fs.FileSelector(place.path))
        else:
            infos = _matching(place.filesystem, place.path) if _is_glob(place.path) else []
    except OSError as error:
        raise ConfigError(f"{setting} {address}: {' '.join(str(error).split())}") from None
    found = place.prompt_files(infos)
    if problem := _problem(found, kind, place) if found else _why_none(infos, kind, place):
        hints = where_looked(address) + _hub_name(address) if kind == fs.FileType.NotFound else ""
        raise ConfigError(f"{setting} {address}: {problem}{hints}")
    return place.filesystem, found


def check_one_split(address: str, setting: str) -> None:
    """Checks that an address is not a folder with files of several splits; a glob says itself what to read.

    Raises:
        ConfigError: it is one, or `find_files` raises it.
    """
    place = _Place.open(address, setting)
    _, files = find_files(address, setting)
    is_folder = place.filesystem.get_file_info(place.path).type == fs.FileType.Directory
    if is_folder and (globs := _split_globs(files, place)):
        everything = place.glob(place.path, f"*{_ending(files)}")
        problem = f"it has files of several splits; name all, {everything}, or those of one"
        raise ConfigError(f"{setting} {address}: {problem}: {globs}")


@dataclass(frozen=True)
class _Place:
    """Where an address leads."""

    filesystem: fs.FileSystem
    path: str  # on it
    prefix: str = ""  # stands before its paths in errors
    options: str = ""  # of a URI

    @classmethod
    def open(cls, address: str, setting: str) -> _Place:
        if "://" not in address:
            return cls(fs.LocalFileSystem(), os.path.abspath(address))
        try:
            storage = open_storage(address, create=False)
        except StorageError as error:
            raise ConfigError(f"{setting}: {error}") from None
        if storage.is_local:
            return cls(storage.filesystem, storage.path)
        plain = without_options(address)
        return cls(storage.filesystem, storage.path, f"{address.partition('://')[0]}://", address[len(plain) :])

    def prompt_files(self, infos: Sequence[fs.FileInfo]) -> list[PromptFile]:
        """Returns those of some files that may have prompts, sorted by path; hidden ones only by their own name."""
        found = [
            PromptFile(f"{self.prefix}{each.path}", each.path, each.size)
            for each in infos
            if _is_prompt_file(each) and (each.path == self.path or not each.base_name.startswith((".", "_")))
        ]
        return sorted(found, key=lambda file: file.path)

    def glob(self, folder: str, pattern: str) -> str:
        """Returns the address of the files in a folder that match a pattern."""
        return f"{self.prefix}{glob.escape(folder)}/{pattern}{self.options}"


def _problem(files: Sequence[PromptFile], kind: fs.FileType, place: _Place) -> str | None:
    """Returns why files cannot be used; None if they can."""
    suffixes = sorted({_suffix(file) for file in files})
    if len(suffixes) > 1:
        return f"it has {' and '.join(suffixes)} files; name those of one format{_of_one_format(files, kind, place)}"
    return None if any(file.size for file in files) else NO_ROWS


def _why_none(infos: Sequence[fs.FileInfo], kind: fs.FileType, place: _Place) -> str:
    """Returns why an address names no file that may have prompts.

    Args:
        infos: what is in its folder, or matches its glob.
    """
    path, known = place.path, ", ".join(FORMATS)
    hidden = sorted(each.path for each in infos if _is_prompt_file(each))
    is_folder = kind == fs.FileType.Directory
    below = _below(place) if is_folder else ""
    if hidden and not below:
        which = f"all files ending in {known} {'in the folder' if is_folder else 'that match'} begin with _ or ."
        return f"{which}: name one exactly, e.g. {place.prefix}{hidden[0]}{place.options}"
    if is_folder:
        return f"the folder has no file ending in {known}{below}"
    if _is_glob(path):
        return f"no file ending in {known} matches"
    if parsers.suffix_of(path) and kind == fs.FileType.NotFound:
        return "no such file"
    return _EXPECTED if Path(path).suffix or kind != fs.FileType.NotFound else f"{_EXPECTED}; {_COLUMNS}"


def _of_one_format(files: Sequence[PromptFile], kind: fs.FileType, place: _Place) -> str:
    """A hint at the files of one of several formats; empty if they are those of a glob."""
    if kind != fs.FileType.Directory:
        return ""
    main = _main_format(files)
    return f", e.g. {_split_globs(main, place) or place.glob(place.path, f'*{_ending(main)}')}"


def _below(place: _Place) -> str:
    """A hint at the files below a folder that has none itself; empty if none are found."""
    infos: list[fs.FileInfo] = []
    folders = [place.path]
    for folder in itertools.islice(folders, _FOLDERS):  # it grows meanwhile
        with suppress(OSError):
            infos += (inside := place.filesystem.get_file_info(fs.FileSelector(folder)))
            is_open = (each for each in inside if each.type == fs.FileType.Directory and each.base_name[0] != ".")
            folders += sorted(each.path for each in is_open)
    if not (files := [file for file in place.prompt_files(infos) if file.size]):
        return ""
    main = _main_format(files)
    return f"; below it are {_split_globs(main, place) or place.glob(place.path, f'**/*{_ending(main)}')}"


def _main_format(files: Sequence[PromptFile]) -> list[PromptFile]:
    """Returns the files of the format that has the most bytes."""
    sizes = Counter[str]()
    for file in files:
        sizes[_suffix(file)] += file.size
    return [file for file in files if _suffix(file) == sizes.most_common(1)[0][0]]


def _split_globs(files: Sequence[PromptFile], place: _Place) -> str:
    """Names the files of each split in a folder, by their names; empty if they are not of several splits."""
    start = len(place.path.split("/"))
    splits = [(_split_of(file, start, _ending(files)), file) for file in files]
    found = [(split, file) for split, file in splits if split and file.size]
    others = [file.path.split("/") for split, file in splits if not split]
    globs = dict[str, None]()
    for (_, folder, pattern), file in sorted(found, key=lambda each: each[0]):
        whole = f"{glob.escape(folder)}/{pattern}".split("/")
        is_exact = not any(_is_match(path, whole) for path in others)
        numbered = re.sub(r"\d", "[0-9]", file.path.rpartition("/")[2])  # which nothing but files of the split match
        globs[place.glob(folder, pattern if is_exact else numbered)] = None
    shown = [*list(globs)[:_SHOWN], "..."] if len(globs) > _SHOWN else globs
    return " or ".join(shown) if len({split for (split, *_), _ in found}) > 1 else ""


def _split_of(file: PromptFile, start: int, ending: str) -> tuple[int, str, str] | None:
    """Returns the number of a file's split, and the folder and the pattern that name its files; None without a split.

    Args:
        start: number of the first name in its path that may say so.
        ending: what the names of all files end in, as a pattern.
    """
    *folders, name = names = file.path.split("/")
    for depth in range(start, len(folders)):
        if names[depth] in _SPLITS:
            return _number(names[depth]), "/".join(names[: depth + 1]), f"**/*{ending}"
    stem = name[: -len(_suffix(file))]
    if match := _OF_SPLIT.fullmatch(stem):
        number = f"[0-9]*{'-of-[0-9]*' if match[4] else ''}" if match[3] else ""
        pattern = f"{match[1]}{match[2]}{number}"
        return _number(match[1]), "/".join(folders), f"{pattern}{name[len(stem) :]}"
    return None


def _number(name: str) -> int:
    return list(_SPLITS.values()).index(_SPLITS[name])


def _suffix(file: PromptFile) -> str:
    return parsers.suffix_of(file.path) or ""


def _ending(files: Sequence[PromptFile]) -> str:
    """Returns a pattern for the suffix of files of one format, as it is written: .csv, .CSV, .[Cc][Ss][Vv] for both."""
    written = [file.path[-len(_suffix(file)) :] for file in files]
    letters = (sorted(set(each)) for each in zip(*written, strict=True))
    return "".join(each[0] if len(each) == 1 else f"[{''.join(each)}]" for each in letters)


def _hub_name(address: str) -> str:
    """A hint for what may be the name of a data set on the hub."""
    return f"; of Hugging Face's data sets: hf:{address}" if re.fullmatch(r"[\w.-]+/[\w.-]+", address) else ""


_EXPECTED = f"expected reasoning_gym:DATASET, hf:NAME, or a file, folder or glob of {', '.join(FORMATS)} files"
_COLUMNS = "columns are named by --data.prompt-column and --data.answer-column"


def _is_glob(path: str) -> bool:
    return any(mark in path for mark in _GLOB)


def _is_prompt_file(info: fs.FileInfo) -> bool:
    return info.type == fs.FileType.File and bool(parsers.suffix_of(info.path))


def _matching(filesystem: fs.FileSystem, pattern: str) -> list[fs.FileInfo]:
    """Returns the files whose path matches a pattern: * and ? within a name, ** for any folders."""
    names = pattern.split("/")
    fixed = next(i for i, name in enumerate(names) if _is_glob(name))
    rest = names[fixed:]
    folder = fs.FileSelector("/".join(names[:fixed]) or "/", recursive=len(rest) > 1, allow_not_found=True)
    infos = filesystem.get_file_info(folder)
    return [info for info in infos if _is_match(info.path.split("/")[fixed:], rest)]


def _is_match(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether successive names in a path match those of a pattern."""
    if not names or not pattern:
        return not names and not pattern
    first, *rest = pattern
    if first == "**":
        return any(_is_match(names[skipped:], rest) for skipped in range(len(names)))
    is_hidden = names[0].startswith(".") and not first.startswith(".")
    return not is_hidden and fnmatch.fnmatchcase(names[0], first) and _is_match(names[1:], rest)
