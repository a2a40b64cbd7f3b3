"""Byte-level language modelling on real text, every batch a function of (seed, step).

A corpus is a row of files seen as one string of bytes; by default the Python standard library's own source, which is on
every machine. A sample is a window of it: sequence_length bytes and, as targets, the bytes that follow each. Where the
window of sample i of step n begins is a hash of (seed, n, i). So every layout sees the same tokens, training resumes
from the step number alone, and a rank reads just the samples it needs, or none.
"""

from __future__ import annotations

import bisect
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from hybridlab.errors import UserError

VOCABULARY = 256
IGNORE = -100
_WHOLE = 64 * 2**20  # a corpus up to 64 MiB is fingerprinted in full
_ENDS = 64 * 2**10  # of a larger one, this much at both ends of every file


@dataclass
class Corpus:
    """Files as one string of bytes, read where and when asked.

    Attributes:
        name: what it is, for people.
        root: the folder that file names are relative to.
        files: in the order in which they follow each other.
        sizes: in bytes.
        bytes_read: how much has been read through this object.
    """

    name: str
    root: Path
    files: Sequence[Path]
    sizes: Sequence[int]
    bytes_read: int = field(default=0, compare=False)

    @cached_property
    def _ends(self) -> list[int]:
        ends, total = [], 0
        for size in self.sizes:
            total += size
            ends.append(total)
        return ends

    def __len__(self) -> int:
        """Its size in bytes."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, length: int) -> bytes:
        """``length`` bytes from ``start`` on, across files where need be.

        Raises:
            UserError: a file cannot be read, or has shrunk since the corpus was listed.
        """
        if not 0 <= start <= start + length <= len(self):
            raise ValueError(f"bytes {start}..{start + length} of a corpus of {len(self)}")
        parts = []
        number = bisect.bisect_right(self._ends, start)
        while length > 0:
            at = start - (self._ends[number] - self.sizes[number])
            wanted = min(length, self.sizes[number] - at)
            parts.append(self._read_file(self.files[number], at, wanted))
            start, length, number = start + wanted, length - wanted, number + 1
        return b"".join(parts)

    def _read_file(self, path: Path, at: int, wanted: int) -> bytes:
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(at)
                found = file.read(wanted)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}.", key="--data", value=str(path)) from None
        if len(found) != wanted:
            raise UserError(f"{path} has become shorter while it was in use.", key="--data", value=str(path))
        self.bytes_read += wanted
        return found

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change when the text does: names, sizes and content (of corpora above 64 MiB only
        64 KiB at both ends of each file)."""
        digest = blake2b(digest_size=8)
        whole = len(self) <= _WHOLE
        for path, size in zip(self.files, self.sizes):
            digest.update(f"{path.relative_to(self.root).as_posix()}\0{size}\0".encode())
            if whole or size <= 2 * _ENDS:
                digest.update(self._read_file(path, 0, size))
            else:
                digest.update(self._read_file(path, 0, _ENDS))
                digest.update(self._read_file(path, size - _ENDS, _ENDS))
        return digest.hexdigest()

    def describe(self) -> str:
        """One line for people: what, how many files, how large."""
        return f"{self.name}: {len(self.files)} files, {len(self):,} bytes, fingerprint {self.fingerprint()}"


def load_corpus(path: str | os.PathLike[str] | None = None) -> Corpus:
    """List a corpus; nothing of it is read yet.

    Args:
        path: a file, of any kind, or a folder, of which all files below it are taken in the order of their names
            (hidden ones and empty ones left out). None: the Python standard library's source.

    Raises:
        UserError: no such path, or nothing in it.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return _corpus("Python standard library", root, _standard_library(root))
    given = Path(path).expanduser()
    if given.is_file():
        corpus = _corpus(given.name, given.parent, [given])
    elif given.is_dir():
        corpus = _corpus(given.name or str(given), given, _all_files(given))
    else:
        raise UserError(f"there is no {given}.", key="--data", value=str(path), fix="the path of a file or folder")
    if not len(corpus):
        what = "the file is empty" if given.is_file() else "there is no file with anything in it below the folder"
        raise UserError(f"{given}: {what}.", key="--data", value=str(path), fix="a file or folder of text")
    return corpus


def _corpus(name: str, root: Path, files: Iterator[Path] | Sequence[Path]) -> Corpus:
    found = sorted(files, key=lambda path: path.relative_to(root).as_posix())
    sizes = [path.stat().st_size for path in found]
    kept = [(path, size) for path, size in zip(found, sizes) if size > 0]
    return Corpus(name, root, [path for path, _ in kept], [size for _, size in kept])


def _standard_library(root: Path) -> Iterator[Path]:
    """Its ``.py`` files, without what is installed beside it, what a build wrote, and tests (not on every machine)."""
    left_out = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def _all_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


class Batches:
    """The batches of a training run, by number.

    Args:
        corpus: where the text comes from.
        seed: of the run.
        sequence_length: s, tokens per sample.
        train_batch_size: B, samples per step over all data-parallel ranks.
        uneven: leave out targets (`IGNORE`) from some place on, another place in each sample, at times all of them: for
            checking that losses and gradients are divided by target tokens, not by samples.
        vocab: rows of the model's embedding.

    Raises:
        UserError: a corpus too short for one sample, or a vocabulary that cannot hold bytes.
    """

    def __init__(
        self,
        corpus: Corpus,
        seed: int,
        sequence_length: int,
        train_batch_size: int,
        *,
        uneven: bool = False,
        vocab: int = VOCABULARY,
    ) -> None:
        if vocab < VOCABULARY:
            raise UserError(
                f"tokens are bytes, which takes a vocabulary of {VOCABULARY}; the model's has {vocab}.",
                key="vocab_size",
                value=vocab,
                fix=f"a vocabulary of at least {VOCABULARY}",
            )
        if len(corpus) < sequence_length + 1:
            raise UserError(
                f"{corpus.name} has {len(corpus)} bytes; one sample of sequence length {sequence_length} takes "
                f"{sequence_length + 1}.",
                key="--data",
                value=corpus.name,
                fix=f"more text, or a sequence length of at most {max(1, len(corpus) - 1)}",
            )
        self.corpus, self.seed = corpus, seed
        self.sequence_length, self.train_batch_size = sequence_length, train_batch_size
        self.uneven = uneven

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The whole global batch of a step: tokens and targets, int64 [B, s]."""
        return self.samples(step, 0, self.train_batch_size)

    def samples(self, step: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Samples ``start .. stop`` of the global batch of a step: tokens and targets, int64 [stop - start, s]."""
        length = self.sequence_length
        windows = [
            self.corpus.read(self._hash(step, sample, "start") % (len(self.corpus) - length), length + 1)
            for sample in range(start, stop)
        ]
        ids = torch.frombuffer(bytearray(b"".join(windows)), dtype=torch.uint8).view(-1, length + 1).long()
        # clone, not contiguous(): of one sample both would share memory, and masking targets would reach tokens.
        tokens, targets = ids[:, :-1].clone(), ids[:, 1:].clone()
        if self.uneven:
            for row, sample in enumerate(range(start, stop)):
                targets[row, self._hash(step, sample, "targets") % (length + 1) :] = IGNORE
        return tokens, targets

    def _hash(self, step: int, sample: int, what: str) -> int:
        address = f"{self.seed}/{step}/{sample}/{what}".encode()
        return int.from_bytes(blake2b(address, digest_size=8).digest(), "little")
