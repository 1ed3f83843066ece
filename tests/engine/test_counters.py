"""The counters of an engine: they say what the requests' own figures say."""

from __future__ import annotations

import pytest

from helpers.tiny_checkpoints import TinyCheckpoint
from hybridspec import LLM, SamplingParams
from hybridspec.engine import Counters

PROMPTS = [[5, 17, 3, 5, 5, 88], [41, 2], [9, 9, 30, 7]]


@pytest.mark.parametrize("late", [0, 1])
def test_they_are_the_sum_of_the_requests(tiny: TinyCheckpoint, late: int) -> None:
    llm = LLM(tiny.folder, draft_tokens=3, device="cpu")
    llm._engine.run_ahead = late
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=40, ignore_eos=True)
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=params)
    counters = llm.counters()
    stats = [output.stats for output in outputs]
    assert counters.num_admitted == counters.num_ended == 3
    assert counters.num_aborted == counters.num_preemptions == 0
    assert counters.prompt_tokens == counters.prompt_rows == sum(map(len, PROMPTS))
    assert counters.generated_tokens == 120
    assert counters.verify_steps == sum(len(one.committed_per_step) for one in stats)
    drafted, accepted = counters.drafted_by_position, counters.accepted_by_position
    assert sum(drafted) == sum(sum(one.drafted_per_step) for one in stats) > 0
    assert sum(accepted) == sum(sum(one.accepted_per_step) for one in stats)
    for j in range(3):
        assert drafted[j] == sum(n > j for one in stats for n in one.drafted_per_step)
        assert accepted[j] == sum(n > j for one in stats for n in one.accepted_per_step)
    assert counters.folds == sum(one.folds for one in stats)
    longest = max(len(one.committed_per_step) for one in stats)
    assert longest <= counters.num_steps <= longest + 1 + late
    assert all(seconds > 0 for seconds in counters.seconds.values())
    assert (counters.slots_used, counters.pages_used) == (0, 0)


def test_they_say_who_waits_and_who_runs(tiny: TinyCheckpoint) -> None:
    engine = LLM(tiny.folder, draft_tokens=3, device="cpu", max_num_seqs=2)._engine
    requests = [
        engine.make_request(prompt, SamplingParams(max_tokens=9, ignore_eos=True))
        for prompt in PROMPTS
    ]
    before = engine.counters()
    for request in requests:
        engine.submit(request)
    assert engine.counters().num_waiting == 3
    engine.step()
    now = engine.counters()
    assert (now.num_waiting, now.num_running, now.slots_used) == (1, 2, 2)
    assert 0 < now.pages_used <= now.num_pages
    engine.abort(requests[0])
    engine.abort(requests[2])
    now = engine.counters()
    assert (now.num_waiting, now.num_running, now.num_aborted) == (0, 1, 2)
    # A copy stays as it was.
    assert (before.num_waiting, before.num_admitted, before.verify_steps) == (0, 0, 0)
    assert before.seconds["decode"] == 0 < now.seconds["decode"]


def test_positions_are_counted_from_the_ends_of_rows() -> None:
    counters = Counters.create(2)
    counters.outcomes = [[4, 0, 0], [1, 2, 0], [3, 5, 7]]
    assert counters.verify_steps == 22 and counters.draft_steps == 18
    assert counters.drafted_by_position == [18, 15]
    assert counters.accepted_by_position == [14, 7]
