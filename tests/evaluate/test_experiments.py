"""The experiments under `examples/`, run as a user runs them.

Each kills a training run, resumes it, and compares it with an uninterrupted one. `make experiments`
runs those that prove something that no other test does, and `make soak` all of them. The tests of
their data are in `make test-tools`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.experiments import pairs
from examples.experiments.pairs import BYTES, Coding, Pair
from tests.support.xla import UNOPTIMIZED

ROOT = Path(__file__).parents[2]
SFT_TORCH, SFT_FLAX = "sft_torch", "sft_flax"
LORA, RL = "lora", "rl_like"
# Up to ten processes import a framework, some of them two: seconds, but minutes on a busy
# machine.
PATIENT = pytest.mark.timeout(900)
# The same code with other data, or what a test of its own proves in less time.
MORE = pytest.mark.skipif(
    os.environ.get("EXPERIMENTS") != "all", reason="only with EXPERIMENTS=all, as in make soak"
)


def run(example: str, *options: object) -> str:
    """Run an example with ``--quick``, and return its output."""
    module = f"examples.experiments.{example}"
    result = subprocess.run(
        [sys.executable, "-m", module, "--quick", *map(str, options)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": UNOPTIMIZED},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def part(output: str, policy: str) -> str:
    """Return the output of the run under one policy."""
    return re.split(r"^3\. ", output, flags=re.MULTILINE)[1 if policy == "exact" else -1]


def assert_every_bit_equal(output: str) -> None:
    """Assert that a run was killed in the middle, resumed from a checkpoint, and ended equal."""
    (killed,), (resumed,) = (
        re.findall(r"killed in step (\d+)", output),
        re.findall(r"resumed from step (\d+)", output),
    )
    assert 0 < int(resumed) < int(killed) < 120
    assert "  killed by SIGKILL\n" in output
    ((resumed_loss, whole_loss),) = re.findall(
        r"held-out loss (\S+), uninterrupted (\S+): difference \+0\.0e\+00", output
    )
    assert resumed_loss == whole_loss
    assert re.search(r"^  every bit equal: \d+ leaves", output, re.MULTILINE)
    ((stored, plain),) = re.findall(
        r"(?:12|24) checkpoints: (\S+) MB, as (?:torch.save files|plain Orbax steps) (\S+) MB",
        output,
    )
    assert float(stored) < float(plain)


@pytest.mark.experiments
@PATIENT
@MORE
@pytest.mark.parametrize("example", [SFT_FLAX, LORA])
def test_a_killed_run_of_the_other_experiments_ends_with_every_bit_of_the_uninterrupted_one(
    example: str,
) -> None:
    assert_every_bit_equal(run(example, "--policy", "exact"))


@pytest.mark.experiments
@PATIENT
@pytest.mark.parametrize(
    "workload", [pytest.param("sft", marks=MORE), pytest.param("rl_like", marks=MORE), "lora"]
)
def test_an_evaluation_of_a_built_in_run_finds_nothing_wrong(workload: str) -> None:
    command = [
        sys.executable,
        "-m",
        "deltacheck",
        "eval",
        "--quick",
        f"benchmarks.workloads.builtin:tiny_{workload}",
        "--json",
    ]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(result.stdout)
    assert (document["holds"], document["reasons"]) == (True, [])
    assert document["plan"]["factory"].endswith(f":tiny_{workload}")
    (recovery,) = document["recoveries"]
    assert recovery["leaves"] > 10
    assert recovery["failed"] == recovery["not_put_back"] == []
    assert document["recovery"]["equal_endings"] == document["recovery"]["trials"] == 1


@pytest.mark.experiments
@PATIENT
@pytest.mark.parametrize("example", [SFT_TORCH, pytest.param(SFT_FLAX, marks=MORE)])
def test_a_policy_from_the_profile_makes_checkpoints_smaller_and_changes_the_result_little(
    example: str, tmp_path: Path
) -> None:
    output = run(example, tmp_path, "--every", 5)
    assert re.search(r"stable from step \d+ on", output)
    exact, auto = part(output, "exact"), part(output, "auto")
    assert_every_bit_equal(exact)
    sizes = [float(re.findall(r"24 checkpoints: (\S+) MB", text)[0]) for text in (exact, auto)]
    assert sizes[1] < 0.95 * sizes[0]
    assert "  killed by SIGKILL\n" in auto
    (difference,) = re.findall(r"difference (\S+)\n", auto)
    before, after = map(float, re.findall(r"held-out loss (\S+) before, (\S+) after", output)[0])
    assert after < before  # something was learned
    assert abs(float(difference)) < (before - after) / 10
    with pytest.raises(AssertionError, match="is not empty"):
        run(example, tmp_path)


@pytest.mark.experiments
@PATIENT
def test_a_follower_has_the_trainers_digest_at_every_step_across_the_kill() -> None:
    output = run(RL, "--policy", "exact")
    assert_every_bit_equal(output)
    steps = re.findall(
        r"follower: step (\d+), (\S+)% of the weights taken over, digest equal to the trainer's",
        output,
    )
    assert [int(step) for step, _ in steps][-1] == 120
    assert len(steps) >= 6  # it may begin late, and leaves out nothing then
    assert float(steps[0][1]) == 100
    assert max(float(share) for _, share in steps[1:]) < 20
    assert (
        f"follower: {len(steps)} updates, each with the digest of the trainer's weights" in output
    )


# --- weights and data of the user's ---------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a local transformers checkpoint.

    It is an untrained Llama with grouped keys and a tokenizer of bytes.
    """
    transformers = pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    words = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    folder = tmp_path_factory.mktemp("llama")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        **sizes,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
        rms_norm_eps=1e-5,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    lines = [
        json.dumps({"prompt": f"{number} and one is ", "completion": str(number + 1)})
        for number in range(100)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.experiments
@PATIENT
@pytest.mark.parametrize(
    "example",
    [pytest.param(SFT_TORCH, marks=MORE), SFT_FLAX, LORA, pytest.param(RL, marks=MORE)],
)
def test_weights_of_transformers_and_data_of_the_users_are_taken(
    example: str, checkpoint: Path, questions: Path
) -> None:
    output = run(
        example, "--model", checkpoint, "--data", questions, "--policy", "exact", "--lr", "1e-3"
    )
    assert_every_bit_equal(output)
    before, after = map(float, re.findall(r"held-out loss (\S+) before, (\S+) after", output)[0])
    assert after < before
    if example == RL:
        assert "follower: step 120" in output


@pytest.mark.experiments
@PATIENT
def test_the_llama_in_flax_computes_what_the_one_of_transformers_does(checkpoint: Path) -> None:
    """The second model has three times the query heads, a tied embedding and slower positions."""
    code = f"""
import numpy as np, torch
from pathlib import Path
from examples.experiments.sft_flax import from_transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
other = Path({str(checkpoint.parent / "other")!r})
sizes = dict(vocab_size=50, hidden_size=48, intermediate_size=64, num_hidden_layers=2)
heads = dict(num_attention_heads=6, num_key_value_heads=2)
positions = dict(rope_type="default", rope_theta=500.0)
config = LlamaConfig(
    **sizes, **heads, initializer_range=0.3, tie_word_embeddings=True, rope_parameters=positions
)
LlamaForCausalLM(config).bfloat16().save_pretrained(other)
for path in (Path({str(checkpoint)!r}), other):
    tokens = np.random.default_rng(0).integers(0, 50, (3, 40))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = model(torch.from_numpy(tokens)).logits.detach().numpy()
    actual = np.asarray(from_transformers(path)(tokens))
    largest, error = np.abs(expected).max(), np.abs(actual - expected).max()
    assert largest > 1
    assert error < 1e-3 * largest, (error, largest)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": UNOPTIMIZED},
    )
    assert result.returncode == 0, result.stderr


# --- rows of tokens -------------------------------------------------------------------------------


def test_rows_grade_the_answer_and_its_end_alone() -> None:
    rows = pairs.rows([Pair("ab", "cd")], BYTES, context=7)
    assert rows.tokens.tolist() == [[BYTES.begin, *b"abcd", BYTES.end, BYTES.end, BYTES.end]]
    assert rows.graded.tolist() == [[False, False, False, True, True, True, False, False]]


def test_a_longer_pair_continues_in_the_next_row_and_predicts_each_token_once() -> None:
    coding = Coding(lambda line: [int(word) for word in line.split()], begin=100, end=101)
    answer = " ".join(map(str, range(50, 63)))
    # The first row has no token of the answer.
    rows = pairs.rows([Pair("1 2 3 4 5", answer)], coding, context=4)
    predicted = [
        token
        for row, graded in zip(rows.tokens, rows.graded, strict=True)
        for token in row[1:][graded[1:]]
    ]
    assert predicted == [*range(50, 63), 101]
    assert all(len(row) == 5 for row in rows.tokens)
    assert 1 not in rows.tokens


def test_data_is_read_from_json_lines_and_from_plain_text(tmp_path: Path) -> None:
    lines = tmp_path / "some.jsonl"
    lines.write_text(
        '{"prompt": "a", "completion": "b\u2028c"}\n\n{"text": "d", "more": 1}\n', encoding="utf-8"
    )
    assert pairs.read(lines) == [Pair("a", "b\u2028c"), Pair("", "d")]
    plain = tmp_path / "some.txt"
    plain.write_text("one\nline\n\n\n\nanother")
    assert pairs.read(plain) == [Pair("", "one\nline"), Pair("", "another")]
    assert all(pair.prompt and pair.answer for pair in pairs.standard_library(files=20))


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"prompt": "a"}', '{"text": 1}', '{"prompt": "a", "completion": null}']
)
def test_a_line_that_is_no_example_is_refused_by_its_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"text": "good"}\n' + line)
    with pytest.raises(ValueError, match=r"some\.jsonl, line 2: "):
        pairs.read(path)


def test_rows_of_large_vocabularies_survive_being_written(tmp_path: Path) -> None:
    rows = pairs.rows(
        [Pair("", "x")], Coding(lambda line: [151_000], begin=1, end=128_009), context=4
    )
    rows.write(tmp_path / "rows.npz")
    again = type(rows).read(tmp_path / "rows.npz")
    assert np.array_equal(again.tokens, rows.tokens)
    assert np.array_equal(again.graded, rows.graded)
