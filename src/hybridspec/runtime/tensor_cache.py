"""Activation buffers for step functions that run thousands of times a second.

Nothing tells the cache that a tensor died: `alloc` looks for a buffer whose storage has no user
left, by the counts of `use_count`. A buffer never moves between a free and a used list, so it
cannot be listed twice, and no function of torch is replaced. See docs/tensor-cache.md.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, UntypedStorage

from hybridspec.errors import UnsupportedError
from hybridspec.runtime.use_count import (
    Bias,
    CountError,
    calibrate,
    count_uses,
    make_template,
    read,
)

__all__ = ["CacheStats", "TensorCache", "size_class"]

_MIN_BYTES = 512
_MAX_TEMPLATES = 8192
_FormKey = tuple[tuple[int, ...], torch.dtype, bool, int]
_PoolKey = tuple[int, int]


def size_class(num_bytes: int) -> int:
    """Return the bytes reserved for a request: rounded up by at most an eighth, 512 at least."""
    step = max(_MIN_BYTES, 1 << max(num_bytes.bit_length() - 4, 0))
    return -(-num_bytes // step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """What a cache did since it was entered, and what it holds now.

    Attributes:
        num_hits: allocations served by recycled memory.
        num_misses: allocations that made a new buffer.
        num_bypassed: allocations that the cache left to torch.
        num_buffers: buffers it holds, in use or idle.
        held_bytes: bytes of those.
        idle_bytes: bytes of those that no tensor uses.
    """

    num_hits: int
    num_misses: int
    num_bypassed: int
    num_buffers: int
    held_bytes: int
    idle_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of all allocations that recycled memory; 0 before the first."""
        total = self.num_hits + self.num_misses + self.num_bypassed
        return self.num_hits / total if total else 0.0


@dataclass(slots=True, eq=False)
class _Buffer:
    storage: UntypedStorage
    cdata: int
    address: int
    num_bytes: int
    pool_key: _PoolKey
    idle_uses: int
    idle_refs: int
    templates: dict[_FormKey, Tensor] = field(default_factory=dict)

    def is_idle(self) -> bool:
        return read(self) == (self.idle_uses, self.idle_refs)

    def is_moved(self) -> bool:
        """Whether a user resized the storage or moved it to shared memory."""
        return self.storage.data_ptr() != self.address

    def set_idle(self, bias: Bias) -> None:
        self.idle_uses, self.idle_refs = bias.idle(len(self.templates))


_NO_FORMS: deque[tuple[_Buffer, Tensor]] = deque()


class TensorCache:
    """Hands out uninitialised tensors like `torch.empty`, on memory that is recycled.

    Use it as a context manager: entering measures the idle counts, leaving forgets all buffers
    (tensors still alive keep their memory). It may be entered again, also inside itself; the
    outermost exit counts. Outside, `alloc` is `torch.empty`. Threads may share it.

    On CUDA a buffer serves only the stream that was current when it was made, where the order of
    the stream protects kernels still queued. A tensor used on any other stream must be passed to
    `forget` first, or kept until that stream is waited for: `record_stream` does not hold it here.
    """

    def __init__(
        self, device: torch.device | str | int = "cpu", *, max_bytes: int | None = None
    ) -> None:
        """Make a cache that is not yet recycling.

        Args:
            device: a CPU or CUDA device; "cuda" is the current one.
            max_bytes: most bytes of buffers to hold; idle ones are dropped to stay below. None is
                no limit.

        Raises:
            UnsupportedError: for any other kind of device.
            ValueError: if `max_bytes` is negative.
        """
        device = torch.device(device)
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(f"device: expected a cpu or cuda device, got {device}")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes: expected None or at least 0, got {max_bytes}")
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.max_bytes = max_bytes
        self._is_cuda = device.type == "cuda"
        self._depth = 0
        self._bias: Bias | None = None
        # A plain lock that alloc only tries: a finalizer run by the garbage collector may call
        # alloc inside alloc, where a re-entrant lock would hand one buffer out twice.
        self._guard = threading.Lock()
        self._forms: dict[_FormKey, deque[tuple[_Buffer, Tensor]]] = {}
        self._pools: dict[_PoolKey, list[_Buffer]] = {}
        self._members: dict[int, _Buffer] = {}
        self._num_templates = 0
        self._held_bytes = 0
        self._num_hits = self._num_misses = self._num_bypassed = 0

    @property
    def is_recycling(self) -> bool:
        """Whether the cache is entered and its use counts can be trusted."""
        return self._bias is not None

    def __enter__(self) -> Self:
        with self._guard:
            if self._depth == 0:
                self._num_hits = self._num_misses = self._num_bypassed = 0
                try:
                    self._bias = calibrate(self.device)
                except CountError as error:
                    self._distrust(str(error))
            self._depth += 1
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._guard:
            self._depth -= 1
            if self._depth == 0:
                self._bias = None
                self._clear()

    def alloc(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised contiguous tensor whose memory no other live tensor uses.

        It equals what `torch.empty` would return (an inference tensor in inference mode, no view).
        Nothing is recycled outside the context, while the counts are not trusted, while the
        current stream captures a graph, and while another thread is inside the cache.

        Args:
            shape: sizes.
            dtype: element type.

        Returns:
            The tensor, [*shape].
        """
        if type(shape) is not tuple:
            if not isinstance(shape, Sequence):
                raise TypeError(f"shape: expected a sequence of sizes, got {shape!r}")
            shape = tuple(shape)
        if self._bias is None or not self._guard.acquire(False):
            return self._bypass(shape, dtype)
        try:
            stream = 0
            if self._is_cuda:
                if torch._C._cuda_isCurrentStreamCapturing():
                    return self._bypass(shape, dtype)
                stream = torch._C._cuda_getCurrentRawStream(self.device.index)
            key = (shape, dtype, torch.is_inference_mode_enabled(), stream)
            forms = self._forms.get(key, _NO_FORMS)
            for num_busy, (buffer, template) in enumerate(forms):
                if (
                    count_uses(buffer.cdata) == buffer.idle_uses
                    and getrefcount(buffer.storage) == buffer.idle_refs
                    and template.data_ptr() == buffer.address
                ):
                    if num_busy:  # the next search starts here, not at those in use
                        forms.rotate(-num_busy)
                    self._num_hits += 1
                    return template.data
            return self._alloc_new_form(key)
        finally:
            self._guard.release()

    def forget(self, tensor: Tensor) -> bool:
        """Leave a tensor's memory to torch, as if `torch.empty` had made it.

        Needed before `record_stream`, before handing the tensor to another stream or process, and
        before using its address beyond its life.

        Args:
            tensor: a tensor from `alloc` or any view of it.

        Returns:
            Whether the cache held its buffer.
        """
        with self._guard:
            buffer = self._members.get(tensor.untyped_storage()._cdata)
            if buffer is not None:
                self._remove(buffer)
        return buffer is not None

    def evict(self, max_idle_bytes: int = 0) -> int:
        """Drop idle buffers, oldest first, until at most `max_idle_bytes` of them are held.

        Args:
            max_idle_bytes: idle bytes that may stay.

        Returns:
            Bytes given back to torch's allocator.
        """
        with self._guard:
            idle_bytes = sum(b.num_bytes for b in self._members.values() if b.is_idle())
            return self._evict(idle_bytes - max_idle_bytes)

    def stats(self) -> CacheStats:
        """Return what the cache did since it was entered and what it holds."""
        with self._guard:
            return CacheStats(
                num_hits=self._num_hits,
                num_misses=self._num_misses,
                num_bypassed=self._num_bypassed,
                num_buffers=len(self._members),
                held_bytes=self._held_bytes,
                idle_bytes=sum(b.num_bytes for b in self._members.values() if b.is_idle()),
            )

    def _bypass(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self._num_bypassed += 1
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _make_storage(self, num_bytes: int) -> UntypedStorage:
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError:
            if not self._evict(self._held_bytes):
                raise
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return memory.untyped_storage()

    def _alloc_new_form(self, key: _FormKey) -> Tensor:
        """Serve a shape whose known buffers are all in use: another idle one, or a new one."""
        shape, dtype, _, stream = key
        if self._bias is None or min(torch.Size(shape), default=1) <= 0:
            return self._bypass(shape, dtype)
        pool_key = (size_class(torch.Size(shape).numel() * dtype.itemsize), stream)
        for buffer in tuple(self._pools.get(pool_key, ())):
            uses, refs = read(buffer)
            if uses < buffer.idle_uses or refs < buffer.idle_refs:
                self._distrust(f"a count reads {uses}, {refs}, less than idle")
                return self._bypass(shape, dtype)
            if (uses, refs) != (buffer.idle_uses, buffer.idle_refs):
                continue
            if buffer.is_moved():
                self._remove(buffer)
                continue
            return self._first_use(key, buffer, is_new=False)
        limit = self.max_bytes
        if limit is not None and self._held_bytes + pool_key[0] > limit:
            self._evict(self._held_bytes + pool_key[0] - limit)
            if self._held_bytes + pool_key[0] > limit:
                return self._bypass(shape, dtype)
        return self._first_use(key, self._add(pool_key), is_new=True)

    def _add(self, pool_key: _PoolKey) -> _Buffer:
        assert self._bias is not None
        storage = self._make_storage(pool_key[0])
        uses, refs = self._bias.idle(0)
        cdata = storage._cdata
        buffer = _Buffer(storage, cdata, storage.data_ptr(), pool_key[0], pool_key, uses, refs)
        assert cdata not in self._members, "a buffer is listed once"
        self._members[cdata] = buffer
        self._pools.setdefault(pool_key, []).append(buffer)
        self._held_bytes += buffer.num_bytes
        return buffer

    def _first_use(self, key: _FormKey, buffer: _Buffer, *, is_new: bool) -> Tensor:
        """Give an idle buffer a template for this shape, and check that its first use counts."""
        assert self._bias is not None
        if key not in buffer.templates:
            if self._num_templates >= _MAX_TEMPLATES:
                self._drop_templates()
            template = make_template(buffer.storage, key[0], key[1])
            buffer.templates[key] = template
            buffer.set_idle(self._bias)
            self._forms.setdefault(key, deque()).append((buffer, template))
            self._num_templates += 1
        tensor = buffer.templates[key].data
        if not self._is_counted(buffer):
            self._distrust(f"a first use reads {read(buffer)}, calibrated was {self._bias}")
            return self._bypass(key[0], key[1])
        self._num_misses += is_new
        self._num_hits += not is_new
        return tensor

    def _is_counted(self, buffer: _Buffer) -> bool:
        return read(buffer) == (buffer.idle_uses + 1, buffer.idle_refs)

    def _remove(self, buffer: _Buffer) -> None:
        del self._members[buffer.cdata]
        self._pools[buffer.pool_key].remove(buffer)
        self._held_bytes -= buffer.num_bytes
        for key in buffer.templates:
            forms = self._forms[key]
            self._forms[key] = deque(form for form in forms if form[0] is not buffer)
        self._num_templates -= len(buffer.templates)

    def _evict(self, num_bytes: int) -> int:
        freed = 0
        for buffer in tuple(self._members.values()):
            if freed >= num_bytes:
                break
            if buffer.is_idle():
                self._remove(buffer)
                freed += buffer.num_bytes
        return freed

    def _drop_templates(self) -> None:
        """Start the templates anew: a caller with ever new shapes must not pile them up."""
        assert self._bias is not None
        self._forms.clear()
        self._num_templates = 0
        for buffer in self._members.values():
            buffer.templates.clear()
            buffer.set_idle(self._bias)

    def _clear(self) -> None:
        self._forms.clear()
        self._pools.clear()
        self._members.clear()
        self._num_templates = self._held_bytes = 0

    def _distrust(self, reason: str) -> None:
        self._bias = None
        self._clear()
        warnings.warn(f"the tensor cache recycles nothing: {reason}", RuntimeWarning, stacklevel=4)
