"""An engine without a model: scripted steps with known numbers, for tests of what is shown."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridspec.config import EngineConfig, SamplingParams
from hybridspec.engine import (
    CompletionOutput,
    Counters,
    EngineInfo,
    RequestOutput,
    RequestStats,
    StepOutput,
)
from hybridspec.models.config import GdnConfig, ModelConfig

__all__ = ["FakeLLM", "FakeTokenizer", "ScriptedStep"]


class FakeTokenizer:
    """One token per character; code points are the ids."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def detokenizer(self) -> Any:
        return types.SimpleNamespace(push=self.decode, finish=lambda: "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedStep:
    """What one verify step is to report.

    Attributes:
        drafted: drafts, as text.
        accepted: how many of them were right.
        then: the token after them, as text; "" where an end cut the step before it.
        history_len, is_fold: as in StepOutput.
    """

    drafted: str
    accepted: int
    then: str
    history_len: int = 0
    is_fold: bool = False


SCRIPT = (
    ScriptedStep(drafted="bcd", accepted=3, then="e"),
    ScriptedStep(drafted="fxy", accepted=1, then="\n", history_len=4),
    ScriptedStep(drafted="ghi", accepted=0, then="z", history_len=15, is_fold=True),
)


@dataclass(slots=True, kw_only=True, eq=False)
class FakeLLM:
    """Answers every prompt with the same script, which begins with the prefill's token "a".

    Attributes:
        script: the verify steps.
        step_s: seconds that each is said to take.
        draft_tokens: as in EngineConfig.
        has_dummy_weights: whether it says that its weights are made up.
        kv_layout: as in EngineConfig.
        tokenizer: None makes it a model without text.
        seen: the sampling parameters of the requests, in order.
        prompts: the tokens of their prompts.
        chats: the messages and the template's options of the conversations, in order.
    """

    script: Sequence[ScriptedStep] = SCRIPT
    step_s: float = 0.5
    draft_tokens: int = 3
    has_dummy_weights: bool = False
    kv_layout: str = "paged"
    tokenizer: FakeTokenizer | None = field(default_factory=FakeTokenizer)
    seen: list[SamplingParams] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    chats: list[tuple[list[dict[str, str]], dict[str, Any]]] = field(default_factory=list)

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            draft_tokens=self.draft_tokens,
            drafter="mtp" if self.draft_tokens else "none",
            dummy_weights=self.has_dummy_weights,
            kv_layout=self.kv_layout,
            dtype="float32",
            state_dtype="float32",
            device="cpu",
            max_model_len=1000,
        )

    def generate(
        self,
        prompts: str | None,
        sampling_params: SamplingParams,
        *,
        prompt_token_ids: list[int] | None = None,
    ) -> list[RequestOutput]:
        steps = self.stream(prompts, sampling_params, prompt_token_ids=prompt_token_ids)
        return [list(steps)[-1].output]

    def stream(
        self,
        prompt: str | None,
        sampling_params: SamplingParams,
        *,
        prompt_token_ids: list[int] | None = None,
    ) -> Iterator[StepOutput]:
        self.seen.append(sampling_params)
        ids = prompt_token_ids or [ord(character) for character in prompt or ""]
        self.prompts.append(ids)
        return self._steps(prompt, ids)

    def stream_chat(
        self, messages: list[dict[str, str]], sampling_params: SamplingParams, **options: Any
    ) -> Iterator[StepOutput]:
        self.chats.append(([*messages], options))
        return self.stream(" ".join(message["content"] for message in messages), sampling_params)

    def _steps(self, prompt: str | None, prompt_token_ids: list[int]) -> Iterator[StepOutput]:
        stats = RequestStats(prefill_s=0.25)
        tokens = [ord("a")]
        yield self._report(prompt, prompt_token_ids, tokens, stats, ["prefill"], None)
        for step in self.script:
            own = "bonus" if step.accepted == len(step.drafted) else "recovered"
            added = [ord(character) for character in step.drafted[: step.accepted] + step.then]
            tokens = tokens + added
            stats.committed_per_step.append(len(added))
            stats.drafted_per_step.append(len(step.drafted))
            stats.accepted_per_step.append(step.accepted)
            stats.folds += step.is_fold
            stats.decode_s += self.step_s
            origins = (["accepted"] * step.accepted + [own])[: len(added)]
            yield self._report(prompt, prompt_token_ids, tokens, stats, origins, step)

    def _report(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        tokens: list[int],
        stats: RequestStats,
        origins: list[str],
        scripted: ScriptedStep | None,
    ) -> StepOutput:
        is_last = scripted is self.script[-1] if self.script else True
        decode = FakeTokenizer().decode if self.tokenizer is not None else lambda ids: ""
        added = tokens[len(tokens) - len(origins) :]
        reason = "length" if is_last else None
        completion = CompletionOutput(
            index=0, token_ids=tokens, text=decode(tokens), finish_reason=reason
        )
        output = RequestOutput(
            request_id=0,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[completion],
            finished=is_last,
            stats=stats,
        )
        return StepOutput(
            step=len(stats.committed_per_step),
            token_ids=added,
            origins=origins,
            drafted=[ord(character) for character in scripted.drafted] if scripted else [],
            text=decode(added),
            history_len=scripted.history_len if scripted else 0,
            is_fold=scripted.is_fold if scripted else False,
            finished=is_last,
            finish_reason=reason,
            make_output=lambda: output,
        )

    def describe(self) -> EngineInfo:
        """Round numbers, so that sums can be told by eye."""
        return EngineInfo(
            model="/models/fake",
            config=self.config,
            model_config=_MODEL_CONFIG,
            num_parameters=1_234_567,
            has_mtp=True,
            backends={"gated_delta_rule": ("reference", "no GPU here")},
            request_bytes={"GDN state": 1024, "GDN ring": 512, "conv ring": 512},
            kv_bytes_per_token=10,
            snapshot_bytes=1024 * (self.draft_tokens + 1),
            num_requests_fit=7,
            counters=self.counters(),
        )

    def counters(self) -> Counters:
        """Nothing is counted."""
        return Counters(num_states=5)


def _model_config() -> ModelConfig:
    import torch

    return ModelConfig(
        model_type="qwen3_5_text",
        vocab_size=272,
        hidden_size=192,
        ffn_size=320,
        layer_kinds=("gdn", "gdn", "gdn", "attention"),
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=64,
        rotary_dim=16,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        max_positions=1000,
        is_head_tied=True,
        gdn=GdnConfig(num_key_heads=2, num_value_heads=4, key_dim=64, value_dim=64, conv_width=4),
        num_mtp_layers=1,
        state_dtype=torch.float32,
        eos_token_ids=(256,),
    )


_MODEL_CONFIG = _model_config()
