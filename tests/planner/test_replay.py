"""A replay is the serving scheduler in virtual time, so its figures can be worked out by hand."""

from __future__ import annotations

import gzip
from pathlib import Path
from statistics import fmean

import pytest

from bench.statistics import percentile
from bench.traces import TraceRow, block_tokens, read_trace
from planner.__main__ import _parser, main
from planner.cost import Curve, LinearCost, ProfiledCost, ProfileError
from planner.replay import Replay, replay
from scheduler.limits import SchedulerLimits
from scheduler.policy import Fair, FirstComeFirstServed, Policy
from scheduler.types import KVCapacity
from server.config import parse_settings

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def run(
    rows: list[TraceRow],
    *,
    num_blocks: int = 64,
    max_running: int = 8,
    block_tokens: int = 0,
    policy: Policy | None = None,
    max_queue_seconds: float | None = None,
) -> Replay:
    return replay(
        rows,
        block_tokens=block_tokens,
        capacity=KVCapacity(num_blocks, 16, max_running, 1024),
        limits=SchedulerLimits(
            max_step_tokens=64, max_waiting=1000, max_running=max_running, watermark_blocks=0
        ),
        policy=policy or FirstComeFirstServed(),
        cost=LinearCost(step=0.010, prefill=0.001, decode=0.002),
        max_queue_seconds=max_queue_seconds,
    )


def test_lone_request_takes_the_time_of_its_steps() -> None:
    """100 prompt tokens are chunks of 64 and 36; then three decodes of 12 ms."""
    (seen,) = run([TraceRow(1.0, 100, 4)]).requests
    assert seen.ttft == pytest.approx(0.010 + 0.064 + 0.010 + 0.036)
    assert seen.tpot == pytest.approx(0.012)


def test_sessions_are_tenants_of_the_fair_policy() -> None:
    """A flood of one session, and one request of another in the midst of it."""
    rows = [TraceRow(0.0, 16, 20, session="flood") for _ in range(60)]
    rows.append(TraceRow(0.5, 16, 20, session="other"))
    waits = []
    for policy in (FirstComeFirstServed(), Fair()):
        seen = run(rows, policy=policy).requests[-1]
        assert seen.scheduled_at is not None
        waits.append(seen.scheduled_at - seen.arrival)
    assert waits[0] > 2.0
    assert waits[1] < 0.1


def test_what_is_not_begun_in_time_is_refused() -> None:
    rows = [TraceRow(0.0, 16, 20) for _ in range(60)]
    outcome = run(rows, max_queue_seconds=1.0)
    refused = [seen for seen in outcome.requests if seen.refusal]
    assert 0 < len(refused) < 60
    assert all(seen.scheduled_at is None for seen in refused)
    begun = [seen.scheduled_at for seen in outcome.requests if seen.scheduled_at is not None]
    assert max(begun) < 1.0


def test_no_request_starts_before_it_arrives_and_all_are_served() -> None:
    rows = [TraceRow(0.3 * i, 20 + 7 * i, 1 + i % 5) for i in range(40)]
    outcome = run(rows)
    for row, seen in zip(rows, outcome.requests, strict=True):
        assert not seen.refusal
        assert seen.scheduled_at is not None
        assert seen.scheduled_at >= seen.arrival == row.arrival_seconds
    assert outcome.busy_seconds <= outcome.makespan
    assert sum(step.num_prefill_tokens for step in outcome.steps) >= sum(
        r.input_tokens for r in rows
    )


def test_equal_blocks_of_a_trace_hit_the_prefix_cache() -> None:
    shared = tuple((block, 1) for block in range(4))
    rows = [TraceRow(float(i), 70, 2, block_runs=(*shared, (100 + i, 1))) for i in range(3)]
    first, second, third = run(rows, block_tokens=16).requests
    assert (first.cached_tokens, second.cached_tokens, third.cached_tokens) == (0, 64, 64)


def test_what_can_never_fit_is_refused_and_the_rest_is_served() -> None:
    outcome = run([TraceRow(0.0, 5000, 2), TraceRow(0.0, 16, 2)])
    assert outcome.requests[0].refusal
    assert outcome.requests[1].first_token_at is not None


def test_a_small_pool_preempts_yet_serves_all() -> None:
    outcome = run([TraceRow(0.0, 30, 60) for _ in range(8)], num_blocks=16)
    assert outcome.num_preemptions > 0
    assert all(seen.last_token_at is not None for seen in outcome.requests)


def test_a_trace_without_arrivals_is_named() -> None:
    with pytest.raises(ValueError, match="no arrival time"):
        run([TraceRow(None, 10, 10)])


def test_curve_joins_its_points_and_goes_on_as_it_ended() -> None:
    curve = Curve.through({2: 1.0, 4: 2.0, 8: 6.0})
    assert [curve(x) for x in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]


def test_missing_kernel_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no kernel table"):
        ProfiledCost(tmp_path / "gpu", num_layers=2)


def test_command_reports_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,30,4\n0.1,50,2\n")
    out = tmp_path / "out.json"
    flags = ["--kv-tokens", "4096", "--linear", "10,1,2,0", "--out", str(out)]
    assert main([str(trace), *flags]) == 0
    assert "2 served, 0 refused" in capsys.readouterr().out
    assert out.read_text().count('"ttft"') == 0  # plain facts, no derived fields
    assert main([str(trace), "--kv-tokens", "4096"]) == 2
    assert "--linear or --profile" in capsys.readouterr().err
    assert main([str(tmp_path / "none.csv"), *flags]) == 2
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,9000,4\n0.1,50,2\n")
    assert main([str(trace), *flags]) == 0
    said = capsys.readouterr().out
    assert "1 served, 1 refused" in said
    assert "The first refusal: " in said


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-tokens", "0"],
        ["--kv-tokens", "31"],
        ["--block-size", "0"],
        ["--requests", "0"],
        ["--max-running", "0"],
        ["--max-waiting", "-1"],
        ["--max-step-tokens", "0"],
        ["--max-model-len", "1"],
        ["--max-queue-seconds", "nan"],
        ["--tpot-limit-seconds", "0"],
        ["--linear", "1,2,3"],
        ["--linear", "1,2,3,x"],
        ["--linear", "1,2,3,inf"],
        ["--linear", "0,0,0,0"],
        ["--layers", "3"],
        ["--host-ms", "3"],
        ["--profile", "tables"],
        ["--out", "/"],
        ["--out", "/dev/null/out.json"],
        ["--max-run", "3"],
    ],
)
def test_nonsense_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,30,4\n")
    try:
        code = main([str(trace), "--kv-tokens", "4096", "--linear", "10,1,2,0", *flags])
    except SystemExit as end:  # from argparse
        code = end.code if isinstance(end.code, int) else -1
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_broken_kernel_table_is_named_with_its_line(tmp_path: Path) -> None:
    table = tmp_path / "gpu_dense.csv.gz"
    for content, reason in (
        (gzip.compress(b"layer,tokens\nqkv,1\n"), r":2: no column 'time_us'"),
        (gzip.compress(b"layer,tokens,time_us\nqkv,1,fast\n"), r":2: could not convert"),
        (gzip.compress(b"layer,tokens,time_us\n")[:-9], "end"),
        (b"no gzip", "Not a gzipped file"),
    ):
        table.write_bytes(content)
        with pytest.raises(ProfileError, match=f"gpu_dense.csv.gz.*{reason}"):
            ProfiledCost(tmp_path / "gpu", num_layers=2)


def test_the_command_simulates_the_server_as_it_is_without_flags() -> None:
    given = vars(_parser().parse_args(["trace.csv", "--kv-tokens", "4096"]))
    serves = parse_settings([], {})
    limits = {"tpot_limit_seconds": serves.limits.max_step_seconds, "policy": serves.engine.policy}
    for name in ("max_running", "max_waiting", "max_step_tokens", "max_chunk_tokens"):
        limits[name] = getattr(serves.limits, name)
    limits["prefix_caching"] = serves.limits.prefix_caching
    limits["block_size"] = serves.engine.block_size
    assert {name: given[name] for name in limits} == limits


def test_replay_agrees_with_a_measured_server() -> None:
    """The same trace, GPU and limits as real per-request times of another server (see DATA).

    Both schedulers chunk prompts into steps of 2048 tokens first come first served, so the physics
    must agree: TPOT p50 and p99 and the makespan within 5 %, mean TTFT within 10 %.
    """
    measured_file = DATA / "validation_vllm019_rtx4090_llama31-8b.csv.gz"
    if not measured_file.exists():
        pytest.skip("the shared measurements are not beside this checkout")
    import csv

    with gzip.open(measured_file, "rt", newline="") as file:
        measured = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    rows = read_trace(DATA / "sharegpt300_llama31tok.jsonl.gz")
    outcome = replay(
        rows,
        block_tokens=block_tokens(rows),
        capacity=KVCapacity(41408 // 16, 16, 256, 131072),
        limits=SchedulerLimits(
            max_step_tokens=2048, max_waiting=1000, max_running=256, watermark_blocks=25
        ),
        policy=FirstComeFirstServed(),
        cost=ProfiledCost(DATA / "profile_rtx4090_llama31-8b", num_layers=32),
    )
    real_ttft = [row["first_token_s"] - row["arrival_s"] for row in measured]
    real_tpot = sorted(
        (row["last_token_s"] - row["first_token_s"]) / (row["output_tokens"] - 1)
        for row in measured
        if row["output_tokens"] > 1
    )
    ttft = [seen.ttft for seen in outcome.requests if seen.ttft is not None]
    tpot = sorted(seen.tpot for seen in outcome.requests if seen.tpot is not None)
    assert len(ttft) == len(measured)
    assert fmean(ttft) == pytest.approx(fmean(real_ttft), rel=0.10)
    for quantile in (0.50, 0.99):
        assert percentile(tpot, quantile) == pytest.approx(
            percentile(real_tpot, quantile), rel=0.05
        )
    last = max(row["last_token_s"] for row in measured)
    assert outcome.makespan == pytest.approx(last - measured[0]["arrival_s"], rel=0.05)
