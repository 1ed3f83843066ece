"""The public interface of the engine: load a model, generate, stream, describe."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridspec.config import EngineConfig, SamplingParams
from hybridspec.engine.counters import Counters
from hybridspec.engine.engine import Engine
from hybridspec.engine.info import EngineInfo, describe
from hybridspec.engine.memory import fitting_memory
from hybridspec.engine.outputs import RequestOutput, StepOutput
from hybridspec.engine.progress import show_progress
from hybridspec.engine.prompts import params_list, prompt_list
from hybridspec.engine.request import Request
from hybridspec.engine.resolve import model_folder
from hybridspec.engine.waiting import in_threads, run_requests
from hybridspec.models import ModelConfig, OnProgress, Tokenizer
from hybridspec.models.chat import ChatTemplates, is_conversation
from hybridspec.models.generation import sampling_defaults

__all__ = ["LLM"]

Prompt = str | Mapping[str, Any]  # a text, or {"prompt": ...} or {"prompt_token_ids": ...}


class LLM:
    """A hybrid language model that decodes speculatively, exactly; threads may share it.

    Ctrl-C is raised when the running step is done, so that it harms no other thread's request; a
    second one comes through at once.

    A process that was forked from the one that made it cannot use it: make one in each process, and
    start processes with multiprocessing's "spawn" method.

    Example:
        >>> from hybridspec import LLM, SamplingParams
        >>> llm = LLM("bundled", device="cpu")
        >>> [result] = llm.generate("import os\\n", SamplingParams(temperature=0, max_tokens=8))
        >>> len(result.outputs[0].token_ids)
        8

    Args:
        model: folder in Hugging Face layout, the id of a repository on the Hugging Face hub, or
            "bundled" for the model in this package.
        draft_tokens: drafts verified per step and request, 0..7; 0 is plain decoding.
        speculation: "fixed" proposes and verifies `draft_tokens` drafts; "dynamic" chooses up to
            that many, for the most tokens per second at the present load and acceptance; "off" is
            plain decoding. The output is the same.
        acceptance, acceptance_spread: force drafts to be accepted with these probabilities, give or
            take the spread, for measurements; the output is synthetic.
        verify_rows: most rows of a verify step over all requests, the most probable drafts first;
            each running request always has one; None verifies every draft.
        drafter: what drafts: "mtp" is the checkpoint's draft head, "lookup" the request's own text,
            "none" nothing; "auto" is "mtp" where there is a head and "lookup" elsewhere.
        draft_vocab: tokens that the draft head chooses from, so that it reads less: ids, a JSON
            file of ids, or a text whose 32,768 most frequent tokens are taken.
        mtp_from: model (folder, id or "bundled") to take another draft head from.
        dummy_weights: use random weights, from config.json alone, to measure a geometry.
        dtype: of weights, activations and rings; "auto" is float32 on CPU, else the file's.
        state_dtype: of the recurrent state, in addition "int8"; "auto" is the checkpoint's. 16 or 8
            bits are rounded at tokens that depend on drafts, which can decide near-ties.
        ring: "u" or, for half the drift of 16-bit states, "raw" (docs/kernels/gdn_raw.md).
        device: "auto", "cpu", "cuda" or "cuda:N".
        max_model_len: most tokens of a request, prompt included; None is the model's limit.
        memory_fraction: share of a GPU for weights and pools; captured graphs, 1 GiB, come on top.
        kv_layout: "paged" hands keys and values out in pages as requests need them; "contiguous"
            gives each slot one page of max_model_len tokens, as FlashAttention-3 wants it.
        attention_backend: attention of verify steps: "triton", "fa3" (needs fa3-fwd, a Hopper GPU,
            bfloat16 and kv_layout "contiguous") or "reference"; "auto" is the first that can.
        threads: CPU threads during a step; None is 1 for small models, else torch's own number.
        max_num_seqs: most requests at a time, 1..256; None is 64 on a CPU and 256 on a GPU.
        max_num_batched_tokens: most prompt rows of a pass; None is 2,048 (CPU) or 8,192 (GPU).
        enable_prefix_caching, prefix_states: whether prompts reuse prefixes; most that are kept.
        enforce_eager: whether to run every step on a GPU operator by operator, without CUDA graphs.
        capture_prompts: whether to capture forwards of prompt rows as well, in chunks of 512 rows;
            None does where their kernels are there.
        revision: of a model on the hub: branch, tag or commit.
        tokenizer: model to take tokenizer and chat template from: a folder, an id or "bundled".
        seed: source of the seeds of requests that name none, in order; None draws them.
        exact: what drafts and load leave unchanged: "tokens", or "bitwise" (docs/exactness.md).
        gpu_memory_utilization: another name for memory_fraction.
        on_progress: called with the bytes of weights read so far and those of all files.

    Raises:
        CheckpointError: if the folder cannot be read or is not what its config says.
        UnsupportedError: if the model or an option of it is not implemented.
        CapacityError: if the model or the smallest pools do not fit the memory.
        ValueError, TypeError: if an option is wrong; the message names it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        draft_tokens: int = 3,
        speculation: str = "fixed",
        verify_rows: int | None = None,
        acceptance: Sequence[float] | None = None,
        acceptance_spread: float = 0.0,
        drafter: str = "auto",
        mtp_from: str | Path | None = None,
        draft_vocab: str | Path | Sequence[int] | None = None,
        dummy_weights: bool = False,
        dtype: str = "auto",
        state_dtype: str = "auto",
        ring: str = "u",
        device: str = "auto",
        max_model_len: int | None = None,
        memory_fraction: float | None = None,
        kv_layout: str = "paged",
        attention_backend: str = "auto",
        threads: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        prefix_states: int | None = None,
        enforce_eager: bool = False,
        capture_prompts: bool | None = None,
        revision: str | None = None,
        tokenizer: str | Path | None = None,
        seed: int | None = None,
        exact: str = "tokens",
        gpu_memory_utilization: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        if memory_fraction is None:
            memory_fraction = 0.9 if gpu_memory_utilization is None else gpu_memory_utilization
        elif gpu_memory_utilization is not None:
            raise ValueError("memory_fraction, gpu_memory_utilization: give one of them")
        config = EngineConfig(
            draft_tokens=draft_tokens,
            speculation=speculation,
            verify_rows=verify_rows,
            acceptance=acceptance,  # type: ignore[arg-type]
            acceptance_spread=acceptance_spread,
            drafter=drafter,
            mtp_from=str(mtp_from) if isinstance(mtp_from, Path) else mtp_from,
            draft_vocab=str(draft_vocab) if isinstance(draft_vocab, Path) else draft_vocab,  # type: ignore[arg-type]
            dummy_weights=dummy_weights,
            dtype=dtype,
            state_dtype=state_dtype,
            ring=ring,
            device=device,
            max_model_len=max_model_len,
            memory_fraction=memory_fraction,
            kv_layout=kv_layout,
            attention_backend=attention_backend,
            threads=threads,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            prefix_states=prefix_states,
            enforce_eager=enforce_eager,
            capture_prompts=capture_prompts,
            revision=revision,
            tokenizer=str(tokenizer) if isinstance(tokenizer, Path) else tokenizer,
            seed=seed,
            exact=exact,
        )
        if on_progress is not None and not callable(on_progress):
            raise TypeError(f"on_progress: expected a function, got {on_progress!r}")
        folder = model_folder(model, has_weights=not dummy_weights, revision=revision)
        with fitting_memory(folder):
            self._engine = Engine(folder, config, on_progress=on_progress)

    def __repr__(self) -> str:
        config = self.config
        return (
            f"LLM({str(self._engine.folder)!r}, device={config.device!r}, dtype={config.dtype!r}, "
            f"drafter={config.drafter!r}, draft_tokens={config.draft_tokens})"
        )

    @property
    def config(self) -> EngineConfig:
        """Options with every "auto" resolved."""
        return self._engine.config

    @property
    def model_config(self) -> ModelConfig:
        """Sizes of the loaded model."""
        return self._engine.model.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The folder's tokenizer, or None."""
        return self._engine.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        """Return `tokenizer`."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        progress: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue one or many prompts.

        Args:
            prompts: a text, a dict with "prompt" or "prompt_token_ids", or a list of these; or
                None.
            sampling_params: one for all, or one per prompt; None takes the checkpoint's,
                `default_sampling_params()`.
            prompt_token_ids: the prompts as tokens instead: one list, or a list of lists.
            progress: whether to show how far it is, on standard error if that is a terminal.
            use_tqdm: another name of `progress`.

        Returns:
            One finished RequestOutput per prompt, in the order of the prompts, with
            `sampling_params.n` continuations each.

        Raises:
            ValueError, TypeError, CapacityError: if a prompt or a parameter does not fit; nothing
                is generated then.
        """
        requests = self.make_requests(prompt_list(prompts, prompt_token_ids), sampling_params)
        return self._outputs(requests, has_progress=progress or use_tqdm)

    def stream(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> Iterator[StepOutput]:
        """Continue one prompt, yielding what each step adds to a continuation.

        The arguments are checked before this returns. Closing the iterator drops the request.
        """
        if prompt is not None and not isinstance(prompt, str | Mapping):
            raise TypeError(f"prompt: expected one text, got {type(prompt).__name__}")
        prompts = prompt_list(prompt, prompt_token_ids)
        if len(prompts) != 1:
            raise TypeError(f"prompt_token_ids: expected one list of ids, got {len(prompts)}")
        return run_requests(self._engine, self.make_requests(prompts, sampling_params))

    def astream(
        self,
        prompt: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> AsyncIterator[StepOutput]:
        """Do as `stream` for `async for`: steps run in threads, the event loop goes on.

        Leaving the loop or cancelling the task drops the request.
        """
        return in_threads(self.stream(prompt, sampling_params, prompt_token_ids=prompt_token_ids))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one or many conversations.

        Args:
            messages: one conversation, oldest message first, {"role": ..., "content": ...} each; or
                a list of conversations.
            sampling_params, progress, use_tqdm: as in `generate`.
            template_options: as in `chat_prompt`.

        Returns:
            One finished RequestOutput per conversation; its `prompt` is what the template made.

        Raises:
            ValueError, TypeError, UnsupportedError, CheckpointError, CapacityError: if there is no
                chat template, it refuses the messages, or a parameter does not fit; nothing is
                generated then.
        """
        each = [messages] if is_conversation(messages) else messages
        prompts = [self.chat_prompt(one, **template_options) for one in each]  # type: ignore[arg-type]
        requests = self.make_requests(prompts, sampling_params, add_special_tokens=False)
        return self._outputs(requests, has_progress=progress or use_tqdm)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Iterator[StepOutput]:
        """Answer one conversation, yielding what each step adds; arguments as in `chat`."""
        prompt = self.chat_prompt(messages, **template_options)
        return run_requests(
            self._engine, self.make_requests([prompt], sampling_params, add_special_tokens=False)
        )

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Return the prompt that a chat template makes of one conversation.

        Its special tokens are written out, so encode it with `add_special_tokens=False`.

        Args:
            messages: one conversation, oldest message first.
            tools: JSON schemas of functions that the model may call.
            chat_template: a Jinja template, or the name of one of the checkpoint's; None takes the
                checkpoint's default.
            add_generation_prompt: whether to open the answer at the end.
            continue_final_message: end inside the last message, for the model to go on with it;
                needs `add_generation_prompt=False`.
            chat_template_kwargs: what else the template looks at, such as `enable_thinking`.
            template_kwargs: the same, one by one.
        """
        return self._chat_templates.render(
            messages,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            **template_kwargs,
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Return `default_sampling_params()`."""
        return self.default_sampling_params()

    def default_sampling_params(self) -> SamplingParams:
        """Return what the checkpoint's generation_config.json recommends.

        What the file does not set is as in SamplingParams(); the fields that are read are listed in
        `docs/checkpoints.md`.

        Raises:
            CheckpointError: if the file is broken.
        """
        return sampling_defaults(self._engine.folder)

    @property
    def chat_templates(self) -> dict[str, str]:
        """The checkpoint's chat templates by name; "default" is the usual one."""
        return self._chat_templates.templates

    def counters(self) -> Counters:
        """Return what the engine holds and has done so far; any thread may ask, at every step."""
        return self._engine.counters()

    @functools.cached_property
    def _chat_templates(self) -> ChatTemplates:
        return ChatTemplates.from_folder(self._engine.tokenizer_folder)

    def describe(self) -> EngineInfo:
        """Return what this engine runs on and what a request costs."""
        return describe(self._engine)

    def make_requests(
        self,
        items: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        add_special_tokens: bool = True,
    ) -> list[Request]:
        """Check prompts, texts or tokens, and parameters without queueing anything.

        Raises:
            ValueError, TypeError, CapacityError: as `generate`.
        """
        if params is None:
            params = self.default_sampling_params()
        return [
            self._engine.make_request(item, one, add_special_tokens=add_special_tokens)
            for item, one in zip(items, params_list(params, len(items)), strict=True)
        ]

    def _outputs(self, requests: list[Request], *, has_progress: bool) -> list[RequestOutput]:
        steps = run_requests(self._engine, requests)
        count = sum(len(one.continuations) for one in requests)
        for _ in show_progress(steps, count) if has_progress else steps:
            pass
        return [request.output() for request in requests]
