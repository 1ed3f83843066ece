"""The engine's core: takes requests, runs steps, hands out what each step added."""

from __future__ import annotations

import itertools
import logging
import operator
import random
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hybridspec.bundled import bundled_model_path
from hybridspec.config import EngineConfig, SamplingParams
from hybridspec.engine.backends import choose_attention
from hybridspec.engine.drafting import make_drafter, resolve_drafter
from hybridspec.engine.memory import check_sizes, plan_pools
from hybridspec.engine.outputs import StepOutput
from hybridspec.engine.request import Request
from hybridspec.engine.rules import check_params, counted_logprobs, make_rules
from hybridspec.engine.runner import Runner
from hybridspec.engine.scheduler import Scheduler
from hybridspec.errors import CapacityError, CheckpointError
from hybridspec.models import (
    HybridModel,
    ModelConfig,
    OnProgress,
    find_model,
    load_model,
    load_tokenizer,
)
from hybridspec.models.generation import end_token_ids
from hybridspec.runtime import Allocator, Pools
from hybridspec.speculate import Drafter

__all__ = ["Engine", "model_folder"]

_log = logging.getLogger("hybridspec")


def model_folder(
    model: str | Path, *, only: str = "", has_weights: bool = True, revision: str | None = None
) -> Path:
    """Return the folder of a model: "bundled", a path, or an id on the Hugging Face hub.

    Args:
        model: which one.
        only: from the hub, download only files with tensors whose names start with this.
        has_weights: whether to download weights at all.
        revision: of a repository on the hub: branch, tag or commit.

    Raises:
        ValueError: if a revision comes with what is not on the hub.
        CheckpointError: if an id cannot be downloaded.
    """
    if model == "bundled":
        model = bundled_model_path()
    return find_model(model, only=only, has_weights=has_weights, revision=revision)


class Engine:
    """A loaded model with its pools and queues.

    Threads that share it hold `lock` around `add` and `step`.

    Args:
        folder: model folder in Hugging Face layout.
        config: options; "auto" and None are resolved here, into `self.config`.
        drafter: proposes tokens in place of what `config` names.
        on_progress: called with the bytes of weights read so far and those of all files.
    """

    # Steps run in inference mode, where views of tensors that were made in it cost less.
    @torch.inference_mode()
    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        drafter: Drafter | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.folder = folder
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        kind, _, index = device.partition(":")
        if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"device: expected one of the {torch.cuda.device_count()} CUDA devices that torch "
                f"sees here, got {device!r}"
            )
        check_sizes(ModelConfig.from_folder(folder), config)
        dtype: Any = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
        mtp_folder = None
        if config.mtp_from is not None and config.draft_tokens > 0:
            mtp_folder = model_folder(config.mtp_from, only="mtp.")
        if config.dummy_weights:
            _log.warning("dummy weights: %s is filled with random numbers", folder)
        self.model: HybridModel = load_model(
            folder,
            dtype=dtype,
            device=device,
            mtp_from=mtp_folder,
            has_dummy_weights=config.dummy_weights,
            on_progress=on_progress,
        )
        self.tokenizer_folder = folder
        if config.tokenizer is not None:
            self.tokenizer_folder = model_folder(config.tokenizer, has_weights=False)
        self.tokenizer = load_tokenizer(self.tokenizer_folder)
        if config.tokenizer is not None and self.tokenizer is None:
            raise CheckpointError(f"{self.tokenizer_folder}: expected tokenizer.json, found none")
        self.eos_token_ids = end_token_ids(
            folder, self.model.config.eos_token_ids, self.tokenizer, self.tokenizer_folder
        )
        self._seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        if drafter is None:
            config = resolve_drafter(config, self.model, str(folder))
        self.config, pool_plan = plan_pools(self.model, config)
        self.pools = Pools(
            pool_plan.geometry,
            num_slots=pool_plan.num_slots,
            num_pages=pool_plan.num_pages,
            page_size=pool_plan.page_size,
            max_pages_per_slot=pool_plan.max_pages_per_slot,
            dtype=self.model.dtype,
            state_dtype=getattr(torch, self.config.state_dtype),
            device=self.model.device,
        )
        self.attention = choose_attention(
            self.pools,
            self.model.config,
            requested=self.config.attention_backend,
            max_verify_tokens=self.config.draft_tokens + 1,
        )
        verify_backend, prefill_backend = (self.attention[op][0] for op in ("verify", "prefill"))
        self.config = replace(self.config, attention_backend=verify_backend)
        self.model = self.model.with_attention(
            verify_backend=verify_backend, prefill_backend=prefill_backend
        )
        self.allocator = Allocator(
            self.pools,
            can_grow=pool_plan.can_grow,
            max_slots=pool_plan.max_slots,
            has_clean_values="fa3" in (verify_backend, prefill_backend),
        )
        self.scheduler = Scheduler(self.allocator, self.config.max_num_batched_tokens)
        if drafter is None:
            drafter = make_drafter(self.config, self.model, self.pools)
        self.runner = Runner(
            self.model,
            self.pools,
            drafter,
            draft_tokens=self.config.draft_tokens,
            verify_rows=self.config.verify_rows,
        )
        self._ids = itertools.count()
        self.lock = threading.Lock()
        self._dropped: deque[Request] = deque()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def make_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
    ) -> Request:
        """Check a request without queueing it.

        Args:
            prompt: text or tokens.
            params: the request's parameters.
            add_special_tokens: whether the tokenizer may put its own around a text.

        Returns:
            The first of its `continuations`.

        Raises:
            ValueError: if the prompt or a parameter does not fit the model.
        """
        text = None
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"prompt: {self.folder} has no tokenizer.json, so text cannot be used; "
                    f"give prompt_token_ids"
                )
            text = prompt
            # An empty text stays empty: what the tokenizer puts around it is no prompt.
            has_specials = add_special_tokens and text != ""
            prompt = self.tokenizer.encode(text, add_special_tokens=has_specials)
        ids = self._checked(prompt)
        vocab = self.model.config.vocab_size
        check_params(
            params,
            vocab_size=vocab,
            draft_tokens=self.config.draft_tokens,
            tokenizer=self.tokenizer,
        )
        params = counted_logprobs(params, vocab)
        max_len = self.config.max_model_len
        assert max_len is not None  # resolved when the model was loaded
        limit = max_len - len(ids)
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        if not self.allocator.fits_alone(len(ids) + limit):
            raise CapacityError(
                f"prompt: a request of {len(ids)} prompt tokens and up to {limit} new ones does "
                f"not fit the KV pages ({self.pools.num_pages} x {self.pools.page_size} tokens); "
                f"lower max_tokens or raise memory_fraction"
            )
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self.eos_token_ids)
        if self.tokenizer is not None:
            # The text leaves special tokens out, so it would never hold theirs.
            special = {self.tokenizer.special_id(text) for text in params.stop}
            ends |= frozenset(token for token in special if token is not None)
        rules = make_rules(
            params, ids, ends, vocab_size=vocab, tokenizer=self.tokenizer, seeds=self._seeds
        )
        request_id = next(self._ids)
        group: list[Request] = []
        outbox: list[StepOutput] = []
        requests = [
            Request(
                request_id=request_id,
                prompt=text,
                prompt_token_ids=ids,
                params=params,
                rule=rule,
                stop_ids=ends,
                limit=limit,
                detokenizer=self.tokenizer.detokenizer() if self.tokenizer is not None else None,
                index=index,
                group=group,
                outbox=outbox,
                prompt_logprobs=None if params.prompt_logprobs is None or index else [None],
            )
            for index, rule in enumerate(rules)
        ]
        if len(requests) > 1:
            group += requests
        return requests[0]

    def _checked(self, ids: Sequence[int]) -> list[int]:
        """Return a prompt's tokens as plain integers; raise if they do not fit the model."""
        if len(ids) == 0:
            raise ValueError("prompt: expected at least one token, got an empty prompt")
        vocab = self.model.config.vocab_size
        checked = []
        for token in ids:
            try:
                number = operator.index(token)
            except TypeError:
                raise TypeError(f"prompt_token_ids: expected integers, got {token!r}") from None
            if not 0 <= number < vocab:
                raise ValueError(f"prompt_token_ids: expected ids in 0..{vocab - 1}, got {number}")
            checked.append(number)
        max_len = self.config.max_model_len
        assert max_len is not None
        if len(ids) >= max_len:
            raise ValueError(
                f"prompt: expected fewer tokens than the context of {max_len}, got {len(ids)}"
            )
        return checked

    def add(self, request: Request) -> None:
        """Queue a request made by `make_request`."""
        self.scheduler.add(request)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, process some prompt rows, and decode every running request once.

        What the step added to a request lands in its outbox. A step that fails takes the requests
        that were in it along, since their checkpoints may be folded by half; waiting ones stay.
        """
        self._abort_dropped()
        scheduler = self.scheduler
        scheduler.admit()
        outside = torch.get_num_threads()
        torch.set_num_threads(self.config.threads or outside)
        try:
            if scheduler.prefilling:
                self.runner.prefill(scheduler.prefill_chunks())
                scheduler.settle()
            if scheduler.running:
                self.runner.decode(scheduler.running)
                scheduler.settle()
        except BaseException:
            for request in [*scheduler.prefilling, *scheduler.running]:
                self.abort(request)
            raise
        finally:
            torch.set_num_threads(outside)

    def abort(self, request: Request) -> None:
        """Drop a request at any time; nothing of it stays behind."""
        self.scheduler.remove(request)
        if request.finish_reason is None:
            request.finish_reason = "abort"

    def drop(self, requests: Iterable[Request]) -> None:
        """Abort those that are not finished: now, or before the next step if one is running.

        Needs no lock: a garbage collection may call this in the middle of a step.
        """
        self._dropped.extend(request for request in requests if request.finish_reason is None)
        if self.lock.acquire(blocking=False):
            try:
                self._abort_dropped()
            finally:
                self.lock.release()

    def _abort_dropped(self) -> None:
        while self._dropped:
            self.abort(self._dropped.popleft())
