"""The safetensors files of a folder: what they hold, handed out a block of rows at a time.

Files are mapped, not read whole, and a mapping is given up after a few blocks, so that the pages of
a file that were already copied do not stay in the process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybridspec.errors import CheckpointError, UnsupportedError
from hybridspec.models.fields import is_there, read_text

__all__ = ["Checkpoint", "OnProgress", "weight_files"]

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_IGNORED_PREFIXES = ("model.visual.", "visual.")
_BLOCK_BYTES = 8 << 20
_MAX_MAPPED_BYTES = 32 << 20


class Checkpoint:
    """Tensors by name, with a count of what was read.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and its shards.
        device: where tensors are read to.
        only: if given, tensors whose names do not start with it are as good as absent, and files
            without such tensors need not exist.
        on_progress: called with the bytes read so far and the bytes of all files.

    Attributes:
        source: the file that says what is there.
        num_parameters: elements of the tensors read so far.

    Raises:
        CheckpointError: if files are missing or broken.
        UnsupportedError: if they hold something else than the weights of a model.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        only: str = "",
        on_progress: OnProgress | None = None,
    ) -> None:
        self.device = device
        self.num_parameters = 0
        self._only = only
        self._on_progress = on_progress
        self._file_of: dict[str, Path] = {}
        self._open_file: tuple[Path, Any] | None = None
        self._mapped_bytes = self._done_bytes = 0
        index, single = folder / _INDEX, folder / _SINGLE
        shard_of = _read_index(index) if is_there(index) else {}
        # As in transformers, a single file goes before an index that does not speak of it.
        if shard_of and (not single.is_file() or _SINGLE in shard_of.values()):
            self.source = index
            self._add_shards(folder, index, shard_of)
        elif single.is_file():
            self.source = single
            self._add_names(single)
        else:
            others = sorted(f.name for p in ("*.bin", "*.gguf", "*.pt") for f in folder.glob(p))
            hint = f"; {others[0]} cannot be read" if others else ""
            raise CheckpointError(f"{folder}: expected {_SINGLE} or {_INDEX}, found neither{hint}")
        self._unread = set(self._file_of)
        self._total_bytes = sum(file.stat().st_size for file in set(self._file_of.values()))
        for name, file in self._file_of.items():
            if ".lora_" in name:
                raise UnsupportedError(
                    f"{file}: {name}: an unmerged adapter (LoRA); "
                    "merge it into its base model first"
                )

    def _add_shards(self, folder: Path, index: Path, shard_of: dict[str, str]) -> None:
        wanted = {name: shard for name, shard in shard_of.items() if name.startswith(self._only)}
        held = {}
        for shard in sorted(set(wanted.values())):
            if not _is_file(folder / shard):
                raise CheckpointError(f"{index}: names the file {shard}, which does not exist")
            held[shard] = self._add_names(folder / shard)
        for name, shard in wanted.items():
            if name not in held[shard]:
                raise CheckpointError(f"{folder / shard}: {name}: named by {index.name}, not found")
            self._file_of[name] = folder / shard

    def _add_names(self, file: Path) -> set[str]:
        names = set(_opened(file).keys())
        self._file_of.update(
            dict.fromkeys((name for name in names if name.startswith(self._only)), file)
        )
        return names

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._file_of

    def has_prefix(self, prefix: str) -> bool:
        """Whether any tensor's name starts with `prefix`."""
        return any(name.startswith(prefix) for name in self._file_of)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor is stored in."""
        return self._dtype(name, self._slice(name, "a tensor"))

    def blocks(
        self, name: str, shape: tuple[int, ...], *, is_whole: bool = False
    ) -> Iterator[tuple[slice, Tensor]]:
        """Read a tensor, some rows at a time.

        Args:
            name: full name in the files.
            shape: what the config implies.
            is_whole: whether all rows are to come in one block.

        Yields:
            Rows, and what they hold, on the device and in the stored dtype; valid until the next
            block is asked for.

        Raises:
            CheckpointError: if the tensor is missing or has another shape.
            UnsupportedError: if it is stored in a dtype that needs a scale.
        """
        stored = self._slice(name, f"shape {list(shape)}")
        if stored.get_shape() != list(shape):
            raise CheckpointError(
                f"{self._file_of[name]}: {name}: expected shape {list(shape)}, "
                f"found {stored.get_shape()}"
            )
        row_bytes = math.prod(shape[1:]) * self._dtype(name, stored).itemsize
        del stored
        step = shape[0] if is_whole else max(_BLOCK_BYTES // row_bytes, 1)
        for start in range(0, shape[0], step):
            rows = slice(start, min(start + step, shape[0]))
            yield rows, self._slice(name, "any")[rows].to(self.device)
            self._count_bytes((rows.stop - start) * row_bytes)
        self._unread.discard(name)
        self.num_parameters += math.prod(shape)

    def skip(self, prefix: str) -> None:
        """Count tensors as read that the model does not need."""
        self._unread = {name for name in self._unread if not name.startswith(prefix)}

    def finish(self) -> None:
        """Close the files.

        Raises:
            CheckpointError: if they hold tensors that the config does not imply.
        """
        extra = sorted(name for name in self._unread if not name.startswith(_IGNORED_PREFIXES))
        if extra:
            more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
            raise CheckpointError(
                f"{self._file_of[extra[0]]}: {extra[0]}{more}: expected no such tensor by "
                f"config.json, found shape {self._slice(extra[0], 'any').get_shape()}"
            )
        self._open_file = None
        self._count_bytes(self._total_bytes - self._done_bytes)

    def _count_bytes(self, num_bytes: int) -> None:
        self._mapped_bytes += num_bytes
        self._done_bytes += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._done_bytes, self._total_bytes)

    def _slice(self, name: str, expected: str) -> Any:
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.source}: {name}: expected {expected}, found no tensor{self._hint(name)}"
            )
        file = self._file_of[name]
        is_open = self._open_file is not None and self._open_file[0] == file
        if not is_open or self._mapped_bytes > _MAX_MAPPED_BYTES:
            self._open_file = (file, _opened(file))
            self._mapped_bytes = 0
        assert self._open_file is not None
        return self._open_file[1].get_slice(name)

    def _hint(self, name: str) -> str:
        """Say what tensors are called where none has a name that starts like this one."""
        prefix = f"{name.partition('.')[0]}."
        if self.has_prefix(prefix) or not self._file_of:
            return ""
        return f" whose name starts with {prefix}, but {min(self._file_of)}"

    def _dtype(self, name: str, stored: Any) -> torch.dtype:
        if stored.get_dtype() not in _DTYPES:
            raise UnsupportedError(
                f"{self._file_of[name]}: {name}: expected {', '.join(_DTYPES)}, "
                f"found {stored.get_dtype()}; quantized files are not supported"
            )
        return _DTYPES[stored.get_dtype()]


def weight_files(folder: Path, only: str = "") -> list[str]:
    """Return the names of a folder's weight files as its index has it.

    Args:
        folder: may lack the files themselves.
        only: leaves out files without tensors whose names start with this.
    """
    index = folder / _INDEX
    shard_of = _read_index(index) if is_there(index) else {only: _SINGLE}
    return sorted({shard for name, shard in shard_of.items() if name.startswith(only)})


def _read_index(index: Path) -> dict[str, str]:
    """Return which file holds each tensor."""
    try:
        shard_of = json.loads(read_text(index))["weight_map"]
        if not shard_of or not all(isinstance(shard, str) for shard in shard_of.values()):
            raise TypeError("names and files must be texts, at least one of each")
        if outside := [shard for shard in shard_of.values() if not _is_inside(shard)]:
            raise ValueError(f"{outside[0]!r:.200} is no file of the folder")
    except (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index}: expected a JSON object with a weight_map of names to files "
            f"({type(error).__name__}: {error})"
        ) from None
    return dict(shard_of)


def _is_inside(shard: str) -> bool:
    """Whether a name stays in its folder; what a link there points to is its owner's affair."""
    is_plain = "\0" not in shard and "\\" not in shard
    return is_plain and not Path(shard).is_absolute() and ".." not in Path(shard).parts


def _is_file(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a name that no file can have
        return False


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not readable as safetensors ({error})") from None
