"""The engine's core: takes requests, runs steps, hands out what each step added."""

from __future__ import annotations

import itertools
import logging
import operator
import random
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from hybridspec.config import EngineConfig, SamplingParams
from hybridspec.engine import sizing
from hybridspec.engine.counters import Counters
from hybridspec.engine.draft_vocabulary import draft_vocabulary
from hybridspec.engine.drafting import make_drafter
from hybridspec.engine.exactness import is_row_by_row
from hybridspec.engine.interrupts import interrupts_wait
from hybridspec.engine.isolation import ProcessGuard, torch_defaults
from hybridspec.engine.memory import make_pools
from hybridspec.engine.products import prepare_products
from hybridspec.engine.prompt_graphs import capture_prompts
from hybridspec.engine.request import Request, RequestGroup
from hybridspec.engine.resolve import resolve
from hybridspec.engine.rules import check_params, counted_logprobs, make_options
from hybridspec.engine.runner import Runner
from hybridspec.engine.scheduler import Scheduler
from hybridspec.engine.text import Text
from hybridspec.errors import CapacityError, UnsupportedError
from hybridspec.models import HybridModel, OnProgress, load_model, load_tokenizer
from hybridspec.models.generation import end_token_ids
from hybridspec.models.layers import ATTENTION
from hybridspec.models.mlp import EXPERTS
from hybridspec.ops.accept import RequestTable
from hybridspec.runtime import SamplingPool
from hybridspec.speculate import Decoder, ForcedAcceptance, ListDrafter

__all__ = ["Engine"]

_log = logging.getLogger("hybridspec")

CAPTURED_OPS = ("gated_delta_rule", "causal_conv1d", ATTENTION, EXPERTS)
PENALTY_ROWS = 64  # requests with penalties at a time, on a device; more of them wait


class Engine:
    """A loaded model with its pools and queues.

    Threads that share it hold `lock` around `step`; `submit` and `drop` need none and never wait.

    Args:
        folder: model folder in Hugging Face layout.
        config: options; "auto" and None are resolved here, into `self.config`.
        drafter: proposes lists of tokens in place of what `config` names; every step waits for it.
        on_progress: called with the bytes of weights read so far and those of all files.
    """

    @torch_defaults()
    def __init__(
        self,
        folder: Path,
        config: EngineConfig,
        *,
        drafter: ListDrafter | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.folder = folder
        self.guard = ProcessGuard()
        self.resolved = resolve(folder, config, has_own_drafter=drafter is not None)
        self.config = self.resolved.config
        if config.dummy_weights:
            _log.warning("dummy weights: %s is filled with random numbers", folder)
        # Before the weights, whose reading takes long: what is wrong here is told at once.
        self.tokenizer_folder = self.resolved.tokenizer_folder
        is_named = config.tokenizer is not None
        self.tokenizer = load_tokenizer(self.tokenizer_folder, is_required=is_named)
        vocab_size = self.resolved.model.vocab_size
        words = draft_vocabulary(self.config.draft_vocab, self.tokenizer, vocab_size)
        self.model: HybridModel = load_model(
            folder,
            dtype=self.resolved.dtype,
            device=self.resolved.device,
            backends={op: name for op, (name, _) in self.resolved.backends.items()},
            mtp_from=self.resolved.mtp_folder,
            has_dummy_weights=config.dummy_weights,
            on_progress=on_progress,
        )
        self.eos_token_ids = end_token_ids(
            folder, self.model.config.eos_token_ids, self.tokenizer, self.tokenizer_folder
        )
        self._seeds = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self.pools, self.allocator = make_pools(self.resolved)
        decoder, graphs, prompts = self._decoder(drafter, words), None, None
        sizes = sizing.step_sizes(self.allocator, self.config)
        prepare_products(self.model, sizing.row_counts(sizes, self.config))
        if self._can_capture(drafter):
            graphs = sizing.capture_steps(decoder, self.allocator, sizes, self.config)
            prompts = capture_prompts(decoder, self.resolved)
        self.runner = Runner(
            decoder,
            self.allocator,
            sizing.make_policy(self.config, graphs),
            graphs=graphs,
            prompts=prompts,
            has_confidences=self.config.needs_confidences,
        )
        assert self.config.max_num_batched_tokens is not None  # resolved
        # On a device the next step is launched before the outcome of the last one is read.
        self.run_ahead = 1 if self.pools.device.type == "cuda" else 0
        self.scheduler = Scheduler(
            self.allocator,
            self.runner,
            max_prompt_rows=self.config.max_num_batched_tokens,
            is_bitwise=self.config.exact == "bitwise",
        )
        self._ids, self.lock = itertools.count(), threading.Lock()
        self._inbox: deque[Request] = deque()
        self._dropped: deque[Request] = deque()

    def _can_capture(self, drafter: ListDrafter | None) -> bool:
        """Whether steps can be captured: on a device, where no step waits for the host."""
        is_device = self.pools.device.type == "cuda"
        # Plain PyTorch reads the batch on the host.
        backends = self.resolved.backends
        reads = any(backends.get(op, ("",))[0] == "reference" for op in CAPTURED_OPS)
        can = is_device and drafter is None and not reads and not self.config.enforce_eager
        if self.config.capture_prompts and not can:
            raise UnsupportedError("capture_prompts: no step of this engine is captured")
        return can

    def _decoder(self, drafter: ListDrafter | None, words: Sequence[int] | None) -> Decoder:
        """Put together what steps work on."""
        pools, forced = self.pools, None
        if self.config.acceptance is not None:
            _log.warning("synthetic: drafts are accepted by force, not because they are right")
            forced = ForcedAcceptance.of(
                self.config.acceptance, self.config.acceptance_spread, pools.device
            )
        return Decoder(
            model=self.model,
            pools=pools,
            requests=RequestTable.create(
                num_slots=pools.num_slots,
                num_drafts=self.config.draft_tokens,
                device=pools.device,
            ),
            sampling=SamplingPool(
                pools.num_slots,
                self.model.config.vocab_size,
                num_count_rows=min(pools.num_slots, PENALTY_ROWS),
                device=pools.device,
            ),
            drafter=make_drafter(self.config, self.model, pools, words, drafter),
            forced=forced,
            is_row_by_row=is_row_by_row(self.config, pools.device),
            calibration=sizing.first_calibration(self.config, pools.device),
        )

    @property
    def has_work(self) -> bool:
        return bool(self._inbox or self.runner.launched) or self.scheduler.has_work

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
            RuntimeError: in a forked child of the process that made the engine.
        """
        self.guard.check()
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
        ids = self._checked(self._truncated(prompt, params))
        vocab = self.model.config.vocab_size
        check_params(
            params,
            vocab_size=vocab,
            draft_tokens=self.config.draft_tokens,
            tokenizer=self.tokenizer,
        )
        params = counted_logprobs(params, vocab)
        limit = self._limit(len(ids), params)
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self.eos_token_ids)
        if self.tokenizer is not None:
            # The text leaves special tokens out, so it would never hold theirs.
            special = {self.tokenizer.special_id(text) for text in params.stop}
            ends |= frozenset(token for token in special if token is not None)
        options = make_options(
            params, ids, ends, vocab_size=vocab, tokenizer=self.tokenizer, seeds=self._seeds
        )
        group = RequestGroup(
            request_id=next(self._ids),
            prompt=text,
            prompt_token_ids=ids,
            params=params,
            stop_ids=ends,
            limit=limit,
            tokenizer=self.tokenizer if params.detokenize else None,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )
        requests = [
            Request(group=group, options=one, index=index, text=self._text(params))
            for index, one in enumerate(options)
        ]
        if len(requests) > 1:
            group.requests += requests
        return requests[0]

    def _truncated(self, ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """Return the last tokens of a prompt, as many as the parameters keep."""
        count = params.truncate_prompt_tokens
        if count is None:
            return ids
        if count == -1:
            max_len = self.config.max_model_len
            assert max_len is not None
            count = max(max_len - (params.max_tokens or 1), 1)
        return ids[-count:]

    def _limit(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return how many tokens a request may generate; raise if its logs can never fit."""
        max_len = self.config.max_model_len
        assert max_len is not None  # resolved when the model was loaded
        limit = max_len - num_prompt_tokens
        if params.max_tokens is not None:
            limit = min(limit, params.max_tokens)
        if not self.allocator.fits_alone(num_prompt_tokens + limit):
            raise CapacityError(
                f"prompt: a request of {num_prompt_tokens} prompt tokens and up to {limit} new "
                f"ones does not fit the KV pages ({self.pools.num_pages} x {self.pools.page_size} "
                f"tokens); lower max_tokens or raise memory_fraction"
            )
        return limit

    def _text(self, params: SamplingParams) -> Text | None:
        if self.tokenizer is None or not params.detokenize:
            return None
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        keeps_stop = params.include_stop_str_in_output
        return Text(detokenizer, tuple(params.stop), keeps_stop=keeps_stop)

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

    def submit(self, request: Request) -> None:
        """Queue all continuations of a request made by `make_request`; never waits for a step."""
        self._inbox.extend(request.continuations)

    @torch_defaults()
    def step(self) -> None:
        """Admit what fits, process some prompt rows, and decode every running request once.

        What the step added to a request lands in its outbox. A step that fails takes the requests
        that were in it along, since their checkpoints may be folded by half, and gives each its
        reason; waiting ones stay. Ctrl-C is raised when the step is done.
        """
        outside = torch.get_num_threads()
        with interrupts_wait():
            torch.set_num_threads(self.config.threads or outside)
            try:
                self._run_step()
            finally:
                torch.set_num_threads(outside)

    def _run_step(self) -> None:
        scheduler, timed = self.scheduler, self.runner.counters.timed
        self.runner.turn += 1
        self._take_in()
        with timed("admit"):
            scheduler.admit()
            self.runner.fit_tables()
        try:
            if scheduler.prefilling:
                with timed("prefill"):
                    self.runner.prefill(chunks := scheduler.prefill_chunks())
                    scheduler.keep_prefixes(chunks)
                if self.run_ahead:  # nothing is read before this turn's step is launched
                    scheduler.settle()
                else:
                    self._collect(0)
            if scheduler.running:
                scheduler.grow(self.run_ahead + 1)
            if scheduler.running:
                with timed("decode"):
                    self.runner.decode(scheduler.running)
            self._collect(self.run_ahead if scheduler.running else 0)
        except BaseException as error:
            self.runner.launched.clear()
            for request in [*scheduler.prefilling, *scheduler.running]:
                self.abort(request, _lost_to(error))
            raise

    def _collect(self, turns_kept: int) -> None:
        with self.runner.counters.timed("collect"):
            self.runner.collect(turns_kept)
            self.scheduler.settle()

    def counters(self) -> Counters:
        """Return what is there now and what was done so far; any thread may ask, at every step."""
        scheduler, allocator, pools = self.scheduler, self.allocator, self.pools
        return self.runner.counters.copy(
            num_waiting=len(self._inbox) + len(scheduler.waiting),
            num_prefilling=len(scheduler.prefilling),
            num_running=len(scheduler.running),
            slots_used=allocator.num_live,
            num_slots=min(pools.num_slots, allocator.max_slots),
            pages_used=pools.num_pages - allocator.num_free_pages,
            num_pages=pools.num_pages,
            states_used=len(allocator.prefixes),
            num_states=allocator.prefixes.num_states,
        )

    def abort(self, request: Request, failure: Exception | None = None) -> None:
        """Drop a request at any time; nothing of it stays behind.

        Args:
            request: which one.
            failure: what its caller is to be told.
        """
        self.scheduler.remove(request)
        if request.finish_reason is None:
            request.finish_reason, request.failure = "abort", failure
            self.runner.counters.num_aborted += 1

    def drop(self, requests: Iterable[Request]) -> None:
        """Abort those that are not finished: now, or before the next step if one is running.

        Needs no lock: a garbage collection may call this in the middle of a step.
        """
        if self.guard.is_forked:
            return
        self._dropped.extend(request for request in requests if request.finish_reason is None)
        if self.lock.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self.lock.release()

    def _take_in(self) -> None:
        """Queue what was submitted and abort what was dropped since the last step."""
        while self._inbox:
            request = self._inbox.popleft()
            if request.finish_reason is None:  # else dropped before it was seen
                self.scheduler.add(request)
        while self._dropped:
            self.abort(self._dropped.popleft())


def _lost_to(error: BaseException) -> Exception:
    lost = RuntimeError(f"the request was dropped: another caller's step failed: {error!r}")
    lost.__cause__ = error
    return lost
