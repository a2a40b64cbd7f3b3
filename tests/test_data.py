"""Batches are a function of (seed, step): the same tokens whoever asks for whichever part, and one clear error for a
corpus that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridlab.data import Batches, Corpus, load_corpus
from hybridlab.errors import UserError

IGNORE = -100


def batches(corpus: Corpus | None = None, **changes: object) -> Batches:
    settings = {"seed": 7, "sequence_length": 16, "train_batch_size": 6} | changes
    return Batches(corpus or load_corpus(None), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_part_is_that_part_of_the_whole(size: int, uneven: bool) -> None:
    """One sample at a time, too, and with targets masked: tokens and targets must not share memory."""
    data = batches(uneven=uneven)
    for step in (0, 5):
        tokens, targets = data.batch(step)
        for start in range(0, 6, size):
            some, wanted = data.samples(step, start, start + size)
            assert torch.equal(some, tokens[start : start + size])
            assert torch.equal(wanted, targets[start : start + size])


def test_the_step_number_is_all_that_is_needed_to_resume() -> None:
    first, again = batches(), batches()
    later = [first.batch(step) for step in range(4)][3]
    assert all(torch.equal(a, b) for a, b in zip(later, again.batch(3)))
    assert not torch.equal(first.batch(0)[0], first.batch(1)[0])
    assert not torch.equal(first.batch(0)[0], batches(seed=8).batch(0)[0])


def test_targets_are_the_next_tokens() -> None:
    tokens, targets = batches().batch(2)
    assert tokens.shape == targets.shape == (6, 16)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 256


def test_uneven_masks_another_number_in_each_sample() -> None:
    tokens, targets = batches(uneven=True, train_batch_size=64).batch(0)
    assert int(tokens.min()) >= 0
    counts = (targets != IGNORE).sum(1)
    assert len(set(counts.tolist())) > 8
    plain = batches(train_batch_size=64).batch(0)[1]
    assert torch.equal(targets[targets != IGNORE], plain[targets != IGNORE])


def test_a_file_or_a_folder(tmp_path: Path) -> None:
    text = bytes(range(256)) * 2
    (tmp_path / "a.bin").write_bytes(text)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b.txt").write_text("b" * 100)
    assert len(load_corpus(str(tmp_path / "a.bin"))) == 512
    assert len(load_corpus(str(tmp_path))) == 612
    tokens, _ = batches(load_corpus(str(tmp_path / "a.bin"))).batch(0)
    assert all((row[1:] - row[:-1]).remainder(256).eq(1).all() for row in tokens)  # consecutive bytes of the file


def test_what_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "none").mkdir()
    for path, words in (
        (tmp_path / "missing", "there is no"),
        (tmp_path / "empty.txt", "empty"),
        (tmp_path / "none", "no file"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            load_corpus(str(path))
        assert caught.value.key == "--data"
    with pytest.raises(UserError, match="takes 17") as caught:
        batches(load_corpus(str(tmp_path / "short.txt")))
    assert "at most 4" in caught.value.fix
    with pytest.raises(UserError, match="vocabulary of 256"):
        batches(vocab=128)
