"""A checkpoint's sampling defaults and ends: `generation_config.json`."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from hybridspec.config import SamplingParams
from hybridspec.errors import CheckpointError, visible
from hybridspec.models.fields import is_there, read_json
from hybridspec.models.tokenizer import Tokenizer
from hybridspec.values import flag, shown

__all__ = ["end_token_ids", "sampling_defaults"]

_log = logging.getLogger("hybridspec")
_FILE = "generation_config.json"
# Parameters that the file calls by the same name, and those that it does not.
_SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_FIELDS = {
    **{name: name for name in _SAME},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
}
# Fields that change no token, or that are read elsewhere.
_SILENT = {
    *_FIELDS,
    "suppress_tokens",
    "do_sample",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "transformers_version",
    "_from_model_config",
    "cache_config",
    "cache_implementation",
    "use_cache",
    "compile_config",
    "disable_compile",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "return_dict_in_generate",
    "trust_remote_code",
}
# What other fields say where they change nothing.
_NEUTRAL: tuple[Any, ...] = (None, False, [], {})
_NEUTRAL_ONES = {
    "encoder_repetition_penalty",
    "guidance_scale",
    "length_penalty",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "typical_p",
}


def sampling_defaults(path: str | Path) -> SamplingParams:
    """Read the sampling parameters that a model folder recommends.

    A field that is missing or null leaves the parameter as SamplingParams has it. With
    `do_sample` false the temperature is 0; where it is missing, the other fields count. Fields
    that ask for something else than these parameters are named in one warning.

    Raises:
        CheckpointError: if the file is broken or a value is none that SamplingParams takes.
    """
    file = Path(path) / _FILE
    if not is_there(file):
        return SamplingParams()
    fields = {name: value for name, value in read_json(file).items() if value is not None}
    values = {_FIELDS[name]: fields[name] for name in _FIELDS if name in fields}
    try:
        if not fields.get("do_sample", True):
            values["temperature"] = 0.0
        flag("do_sample", fields.get("do_sample", True))
        if "suppress_tokens" in fields:
            words = [[token] for token in _listed(fields, "suppress_tokens")]
            values["bad_words"] = [*_listed(values, "bad_words"), *words]
        shortest = values.get("min_tokens")
        if "max_tokens" not in values and isinstance(shortest, int):
            values["max_tokens"] = max(SamplingParams().max_tokens or 0, shortest)
        defaults = SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from None
    _name_unread(str(file), tuple(sorted(name for name in fields if _asks(name, fields[name]))))
    return defaults


def _listed(values: dict[str, Any], name: str) -> list[Any]:
    value = values.get(name, [])
    if not isinstance(value, list):
        raise TypeError(f"{name}: expected a list, got {shown(value)}")
    return value


def _asks(name: str, value: Any) -> bool:
    """Whether a field that nothing reads asks for something."""
    if name in _SILENT or value in _NEUTRAL:
        return False
    return not (name in _NEUTRAL_ONES and value == 1)


@functools.cache
def _name_unread(file: str, names: tuple[str, ...]) -> None:
    """Say once which fields of a file are not read."""
    if names:
        _log.warning("%s: not carried out: %s", file, visible(", ".join(names)))


def end_token_ids(
    path: str | Path,
    ids: tuple[int, ...],
    tokenizer: Tokenizer | None,
    tokenizer_path: str | Path,
) -> tuple[int, ...]:
    """Return the tokens that end a sequence.

    Fine-tunes change the end that their tokenizer names and leave `config.json` as it was. So where
    no `generation_config.json` says otherwise, both end a sequence, and a warning says so.

    Args:
        path: the model folder.
        ids: what the configuration files say.
        tokenizer: what makes tokens of texts.
        tokenizer_path: the folder that it comes from.

    Raises:
        CheckpointError: if a file is broken.
    """
    generation, config = Path(path) / _FILE, Path(tokenizer_path) / "tokenizer_config.json"
    if tokenizer is None or not is_there(config):
        return ids
    if is_there(generation) and read_json(generation).get("eos_token_id") is not None:
        return ids
    end = read_json(config).get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    if text is None:
        return ids
    if not isinstance(text, str):
        raise CheckpointError(f"{config}: eos_token: expected a text, found {shown(end)}")
    token = tokenizer.token_id(text)
    if token is None or token in ids:
        return ids
    _log.warning(
        "%s: eos_token %r (%d) is not among the end tokens %s of config.json; both end a text",
        config,
        text,
        token,
        list(ids),
    )
    return (*ids, token)
