"""The host's side of the sampling table: which rows are taken, and what is written at admission.

A request whose bias or bad words would not fit even an empty pool is not refused: what is too large
stays here, and the caller serves it by a step that waits for the host (`needs_eager`, `overflow`).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridspec.ops.sampling import SamplingTable, SamplingUses
from hybridspec.runtime.pieces import Pieces
from hybridspec.runtime.slot_options import SlotOptions, packed_counts
from hybridspec.runtime.upload import to_device

__all__ = ["SamplingPool"]


# The tensors of each pool. "rows" are those of the counts, "bounds" and "words" hold bad words.
_TENSORS_OF_POOL = {
    "rows": ("counts",),
    "bias": ("bias_tokens", "bias_values"),
    "bounds": ("word_bounds",),
    "words": ("word_tokens",),
}
_POOLED = {name for names in _TENSORS_OF_POOL.values() for name in names}
# The columns as they are packed: the seed first, so that it lies on a border of 8 bytes.
_COLUMNS = {
    "seed": "q",
    "temperature": "f",
    "top_k": "i",
    "top_p": "f",
    "min_p": "f",
    "repetition": "f",
    "frequency": "f",
    "presence": "f",
    "ends_from": "i",
    "count_row": "i",
    "bias_start": "i",
    "bias_len": "i",
    "word_start": "i",
    "word_len": "i",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What one slot has.

    Attributes:
        uses: what choosing its tokens needs of the table.
        pieces: (start, size) in each pool of which it has a piece.
        words: its bad words of two tokens and more that are in the table.
        dense_bias: [V] fp32, a bias that is too large for the table.
        far_words: bad words that are not in the table.
    """

    uses: SamplingUses
    pieces: Mapping[str, tuple[int, int]]
    words: Sequence[Sequence[int]]
    dense_bias: Tensor | None
    far_words: Sequence[Sequence[int]]


class SamplingPool:
    """A sampling table and who has what of it.

    On a CPU everything grows when a request needs it; elsewhere sizes stay, because captured graphs
    hold the addresses.

    Args:
        num_slots: S.
        vocab_size: V.
        num_count_rows: requests that can have penalties at a time, at least 1.
        num_bias: entries of logit biases over all requests, at least 1.
        num_words: bad words over all requests, at least 2.
        num_word_tokens: tokens of all bad words, at least 2.
        device: where the table lives.
        grows: whether sizes may change; None: on a CPU.

    Attributes:
        table: what `hybridspec.ops.sampling.choose` takes; another object after growth.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        *,
        num_count_rows: int = 1,
        num_bias: int = 1024,
        num_words: int = 1024,
        num_word_tokens: int = 4096,
        device: torch.device | str = "cpu",
        grows: bool | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self.table = SamplingTable.create(
            num_slots,
            vocab_size,
            num_count_rows=num_count_rows,
            num_bias=num_bias,
            num_words=num_words,
            num_word_tokens=num_word_tokens,
            device=self.device,
        )
        self._grows = self.device.type == "cpu" if grows is None else grows
        self._pools = {
            name: Pieces(getattr(self.table, tensors[0]).shape[0])
            for name, tensors in _TENSORS_OF_POOL.items()
        }
        self._held: dict[int, _Held] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return sum(tensor.nbytes for tensor in self.table.tensors())

    def uses(self, slots: Sequence[int]) -> SamplingUses:
        """Return what choosing tokens for a batch of slots needs."""
        together = SamplingUses()
        for uses in {self._held[slot].uses for slot in slots}:
            together |= uses
        return together

    def needs_eager(self, slot: int) -> bool:
        """Whether the request has options that did not fit the table: see `overflow`."""
        held = self._held[slot]
        return held.dense_bias is not None or bool(held.far_words)

    def write(
        self,
        slot: int,
        options: SlotOptions,
        *,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
    ) -> bool:
        """Give a request its room and write its data into a free slot.

        Args:
            slot: a slot that holds nothing.
            options: the request's.
            prompt: its prompt, looked at where it has penalties.
            output: what it has said so far; not empty after a preemption.

        Returns:
            False if there is no room now; nothing is taken then, and the request waits.
        """
        if slot in self._held:
            raise ValueError(f"slot: expected one that holds nothing, got {slot}")
        pieces: dict[str, tuple[int, int]] = {}
        try:
            held = self._take(options, pieces)
            if held is not None:
                self._upload(slot, options, held, prompt, output)
                self._held[slot] = held
        finally:
            if slot not in self._held:
                self._give(pieces)
        return held is not None

    def release(self, slot: int) -> None:
        """Take back what a slot has; its data stays until the next `write`."""
        self._give(self._held.pop(slot).pieces)

    def resize(self, num_slots: int) -> None:
        """Add slots or take free ones away; those that stay keep their data."""
        old = self.table.temperature.shape[0]
        if num_slots < old:
            names = [name for name in self.table.__slots__ if name not in _POOLED]
            kept = {name: getattr(self.table, name)[:num_slots] for name in names}
            self.table = replace(self.table, **kept)
        elif num_slots > old:
            fresh = SamplingTable.create(num_slots - old, self.vocab_size, device=self.device)
            names = [name for name in self.table.__slots__ if name not in _POOLED]
            self._append({name: getattr(fresh, name) for name in names})

    def overflow(self, logits: Tensor, rows: Sequence[tuple[int, Sequence[int]]]) -> Tensor | None:
        """Do what the table cannot hold, before `choose`.

        Args:
            logits: raw scores, [N, V], fp32; in-out: biases that are too large for the table are
                added.
            rows: slot (-1 = padding row) of each row and the tokens in front of it, its drafts
                included; N of them.

        Returns:
            The mask to give to `choose`, [N, ceil(V / 32)] int32, or None if nothing is forbidden.
        """
        mask: Tensor | None = None
        for row, (slot, tokens) in enumerate(rows):
            held = self._held.get(slot)
            if held is None:
                continue
            if held.dense_bias is not None:
                logits[row] += held.dense_bias
            for word in held.far_words:
                size, last = len(word) - 1, word[-1]
                if size > len(tokens) or tokens[-1] != word[-2]:
                    continue  # most of them, and a word may have thousands of tokens
                if list(tokens[len(tokens) - size :]) == list(word[:-1]):
                    if mask is None:
                        mask = torch.full((len(rows), self._num_bits), -1, dtype=torch.int32)
                    mask[row, last >> 5] &= ~_signed_bit(last)
        return None if mask is None else mask.to(logits.device)

    @property
    def _num_bits(self) -> int:
        return self.table.end_bits.shape[1]

    def _append(self, more: Mapping[str, Tensor]) -> None:
        grown = {name: torch.cat((getattr(self.table, name), more[name])) for name in more}
        self.table = replace(self.table, **grown)

    def _room(self, name: str, size: int) -> int | None:
        """Take a piece of a pool, which grows if it may."""
        pool = self._pools[name]
        start = pool.take(size)
        if start is None and self._grows:
            more = max(pool.size, size)
            tensors = {key: getattr(self.table, key) for key in _TENSORS_OF_POOL[name]}
            self._append({k: t.new_zeros((more, *t.shape[1:])) for k, t in tensors.items()})
            pool.grow(pool.size + more)  # last: an allocation may fail
            start = pool.take(size)
        return start

    def _give(self, pieces: Mapping[str, tuple[int, int]]) -> None:
        for name, piece in pieces.items():
            self._pools[name].give(*piece)

    def _fits(self, name: str, size: int) -> bool:
        """Whether a pool, empty, has room for so much."""
        return self._grows or size <= self._pools[name].size

    def _take(self, options: SlotOptions, pieces: dict[str, tuple[int, int]]) -> _Held | None:
        """Note in `pieces` what is taken; None if there is no room for all of it."""
        words = [word for word in options.bad_words if len(word) > 1]
        sizes = {
            "rows": int(options.has_penalties),
            "bias": len(options.bias),
            "bounds": len(words) + 1 if words else 0,
            "words": sum(map(len, words)),
        }
        if not (self._fits("bounds", sizes["bounds"]) and self._fits("words", sizes["words"])):
            words, sizes["bounds"], sizes["words"] = [], 0, 0
        dense_bias = None
        if not self._fits("bias", sizes["bias"]):
            sizes["bias"] = 0
            dense_bias = torch.zeros(self.vocab_size, dtype=torch.float32)
            values = torch.tensor(list(options.bias.values()), dtype=torch.float32)
            dense_bias[list(options.bias)] = values
        for name, size in sizes.items():
            if not size:
                continue
            start = self._room(name, size)
            if start is None:
                return None
            pieces[name] = (start, size)
        kept = set(map(tuple, words))
        return _Held(
            uses=replace(options.uses, has_bias="bias" in pieces, has_words="words" in pieces),
            pieces=pieces,
            words=words,
            dense_bias=None if dense_bias is None else to_device(dense_bias, self.device),
            far_words=[w for w in options.bad_words if len(w) > 1 and tuple(w) not in kept],
        )

    def _upload(
        self,
        slot: int,
        options: SlotOptions,
        held: _Held,
        prompt: Sequence[int],
        output: Sequence[int],
    ) -> None:
        """Bring everything to the device in one buffer, and from there to its places."""
        starts = {name: held.pieces.get(name, (0, 0))[0] for name in _TENSORS_OF_POOL}
        columns = {
            "count_row": starts["rows"] if "rows" in held.pieces else -1,
            "bias_start": starts["bias"],
            "bias_len": held.pieces.get("bias", (0, 0))[1],
            "word_start": starts["bounds"],
            "word_len": len(held.words),
        }
        values = [columns[n] if n in columns else getattr(options, n) for n in _COLUMNS]
        bias = options.bias if "bias" in held.pieces else {}
        bounds = [starts["words"]] if held.words else []
        for word in held.words:
            bounds.append(bounds[-1] + len(word))
        counts = packed_counts(prompt, output) if "rows" in held.pieces else {}
        parts = [
            struct.pack("=" + "".join(_COLUMNS.values()), *values),
            options.end_bits(self.vocab_size).tobytes(),
            options.allowed_bits(self.vocab_size).tobytes(),
            array("i", bias).tobytes(),
            array("f", bias.values()).tobytes(),
            array("i", bounds).tobytes(),
            array("i", [token for word in held.words for token in word]).tobytes(),
            array("i", counts).tobytes(),
            array("i", counts.values()).tobytes(),
        ]
        packed = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.int32)
        packed = to_device(packed, self.device)
        sizes = [len(part) // 4 for part in parts]
        self._unpack(slot, packed.split(sizes), starts)

    def _unpack(self, slot: int, parts: Sequence[Tensor], starts: Mapping[str, int]) -> None:
        table = self.table
        header, ends, allowed, bias_tokens, bias_values, bounds, words, tokens, counts = parts
        place = 0
        for name, kind in _COLUMNS.items():
            column = getattr(table, name)
            size = struct.calcsize(kind) // 4
            column[slot : slot + 1].copy_(header[place : place + size].view(column.dtype))
            place += size
        table.end_bits[slot].copy_(ends)
        table.allowed_bits[slot].copy_(allowed)
        if bias_tokens.numel():
            piece = slice(starts["bias"], starts["bias"] + bias_tokens.shape[0])
            table.bias_tokens[piece].copy_(bias_tokens)
            table.bias_values[piece].copy_(bias_values.view(torch.float32))
        if bounds.numel():
            start = starts["bounds"], starts["words"]
            table.word_bounds[start[0] : start[0] + bounds.shape[0]].copy_(bounds)
            table.word_tokens[start[1] : start[1] + words.shape[0]].copy_(words)
        if tokens.numel():
            row = table.counts[starts["rows"]]
            row.zero_()
            row.index_copy_(0, tokens.long(), counts.to(torch.int16))


def _signed_bit(token: int) -> int:
    """The token's bit in its word of a mask, as a signed 32-bit number."""
    bit = token & 31
    return 1 << bit if bit < 31 else -(1 << 31)
