"""The benchmark beside peers: what is called before a timed call, what is divided, and what is said of sizes."""

from typing import Any

import pytest


@pytest.mark.parametrize(("warm_up", "untimed"), [(None, 300), (100, 100), (1000, 300)])
def test_an_untimed_call_comes_first_with_a_prompt_as_long_or_as_wanted(script, warm_up, untimed):
    calls: list[tuple[list[int], int]] = []

    def generate(prompt: list[int], new_tokens: int) -> tuple[float, float]:
        calls.append((prompt, new_tokens))
        return 2.0, 0.5

    runners = script("runners")
    found = runners.measured(generate, 300, 4, 11, warm_up)
    assert found == {"prompt": 300, "prefill_tok_s": 150.0, "decode_tok_s": 20.0}
    assert [(len(prompt), new) for prompt, new in calls] == [(untimed, runners.WARM_UP_TOKENS), (300, 11)]
    assert calls[0][0][0] != calls[1][0][0]  # no prefix in common


def test_sizes_are_those_on_disk_and_the_highest_peak_of_all_rounds(script):
    peers = script("peers")

    def row(name: str, *peaks: int) -> Any:
        entry = peers.Entry(name, "4 bits", "llmc", "model")
        return peers.Row(entry, "", [{"peak_rss_mb": peak, "details": {"files_mb": "634"}} for peak in peaks])

    lines = peers.sizes([row("ours", 890, 910, 900), row("absent"), row("peer", 600)]).splitlines()
    assert lines[0] == "| 10^6 bytes | on disk | resident at the peak |"
    assert lines[2:] == ["| ours | 634 | 910 |", "| peer | 634 | 600 |"]
