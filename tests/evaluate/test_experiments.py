"""The experiments under `examples/`, run as a user runs them: each kills a training, resumes it,
and
compares it with one that nobody stopped.

`make experiments` runs all of them; `make test` the first one, and what they read their data with.
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

from deltacheck.evaluate.workloads import pairs
from deltacheck.evaluate.workloads.pairs import BYTES, Coding, Pair

EXAMPLES = Path(__file__).parents[2] / "examples"
SFT_TORCH, SFT_FLAX = "supervised_finetuning/train_torch.py", "supervised_finetuning/train_flax.py"
LORA, RL = "lora/train.py", "rl_like/train.py"
PATIENT = pytest.mark.timeout(
    900
)  # up to ten processes that import a framework, some of them two: seconds, but minutes on a busy machine


def run(example: str, *options: object) -> str:
    """What a quick run of an example prints."""
    command = [sys.executable, str(EXAMPLES / example), "--quick", *map(str, options)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": ""}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def part(output: str, policy: str) -> str:
    """What is printed of the run under one policy."""
    return re.split(r"^3\. ", output, flags=re.MULTILINE)[1 if policy == "exact" else -1]


def assert_every_bit_equal(told: str) -> None:
    """The story was told to its end: the run was killed in the middle, went on from a checkpoint of
    before, and nothing is different.
    """
    (killed,), (resumed,) = (
        re.findall(r"killed in step (\d+)", told),
        re.findall(r"resumed from step (\d+)", told),
    )
    assert 0 < int(resumed) < int(killed) < 120
    assert "  killed by SIGKILL\n" in told
    ((ours, whole),) = re.findall(
        r"held-out loss (\S+), uninterrupted (\S+): difference \+0\.0e\+00", told
    )
    assert ours == whole
    assert re.search(r"^  every bit equal: \d+ leaves", told, re.MULTILINE)
    ((stored, plain),) = re.findall(
        r"(?:12|24) checkpoints: (\S+) MB, as (?:torch.save files|plain Orbax steps) (\S+) MB", told
    )
    assert float(stored) < float(plain)


@pytest.mark.timeout(600)  # three processes that import torch, one after the other
def test_a_killed_fine_tuning_in_torch_ends_with_every_bit_of_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    output = run(SFT_TORCH, tmp_path, "--policy", "exact")
    assert_every_bit_equal(output)
    losses = re.findall(r"held-out loss (\S+) before, (\S+) after", output)[0]
    assert float(losses[1]) < float(losses[0])  # something was learned
    refused = subprocess.run(
        [sys.executable, EXAMPLES / SFT_TORCH, tmp_path], capture_output=True, text=True
    )
    assert "is not empty" in refused.stderr


@pytest.mark.experiments
@PATIENT
@pytest.mark.parametrize("example", [SFT_FLAX, LORA])
def test_a_killed_run_of_the_other_experiments_ends_with_every_bit_of_the_uninterrupted_one(
    example: str,
) -> None:
    assert_every_bit_equal(run(example, "--policy", "exact"))


@pytest.mark.experiments
@PATIENT
@pytest.mark.parametrize("workload", ["sft", "rl_like", "lora"])
def test_an_evaluation_of_a_built_in_run_finds_nothing_wrong(workload: str) -> None:
    command = [
        sys.executable,
        "-m",
        "deltacheck.cli",
        "eval",
        "--quick",
        "--workload",
        workload,
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["holds"], found["reasons"]) == (True, [])
    assert found["plan"]["factory"].endswith(f":tiny_{workload}")
    (recovery,) = found["recoveries"]
    assert recovery["leaves"] > 10
    assert recovery["failed"] == recovery["not_put_back"] == []
    assert found["recovery"]["equal_endings"] == found["recovery"]["trials"] == 1


@pytest.mark.experiments
@PATIENT
@pytest.mark.parametrize("example", [SFT_TORCH, SFT_FLAX])
def test_a_policy_from_the_profile_makes_checkpoints_smaller_and_changes_the_result_little(
    example: str,
) -> None:
    output = run(example, "--every", 5)
    assert re.search(r"stable from step \d+ on", output)
    exact, told = part(output, "exact"), part(output, "post_training")
    assert_every_bit_equal(exact)
    sizes = [float(re.findall(r"24 checkpoints: (\S+) MB", one)[0]) for one in (exact, told)]
    assert sizes[1] < 0.95 * sizes[0]
    assert "  killed by SIGKILL\n" in told
    (difference,) = re.findall(r"difference (\S+)\n", told)
    before, after = map(float, re.findall(r"held-out loss (\S+) before, (\S+) after", output)[0])
    assert abs(float(difference)) < (before - after) / 10


@pytest.mark.experiments
@PATIENT
def test_a_follower_has_the_trainers_digest_at_every_step_across_the_kill() -> None:
    told = run(RL, "--policy", "exact")
    assert_every_bit_equal(told)
    steps = re.findall(
        r"follower: step (\d+), (\S+)% of the weights taken over, digest equal to the trainer's",
        told,
    )
    assert [int(step) for step, _ in steps][-1] == 120
    assert len(steps) >= 6  # it may begin late, and leaves out nothing then
    assert float(steps[0][1]) == 100
    assert max(float(share) for _, share in steps[1:]) < 20
    assert f"follower: {len(steps)} updates, each with the digest of the trainer's weights" in told


# --- weights and data of the user's ---------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local transformers checkpoint: a Llama without training, with grouped keys, and a tokenizer
    of bytes.
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
@pytest.mark.parametrize("example", [SFT_TORCH, SFT_FLAX, LORA, RL])
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
    """Also with three times the query heads, an untied embedding, and positions that turn
    slower.
    """
    code = f"""
import sys, numpy as np, torch
sys.path.insert(0, {str(EXAMPLES / "supervised_finetuning")!r})
from pathlib import Path
from train_flax import from_transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
other = Path({str(checkpoint.parent / "other")!r})
config = LlamaConfig(vocab_size=50, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
                     initializer_range=0.3, tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=500.0))
LlamaForCausalLM(config).bfloat16().save_pretrained(other)
for path in (Path({str(checkpoint)!r}), other):
    tokens = np.random.default_rng(0).integers(0, 50, (3, 40))
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.from_numpy(tokens)).logits.detach().numpy()
    ours = np.asarray(from_transformers(path)(tokens))
    assert np.abs(theirs).max() > 1
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max(), (np.abs(ours - theirs).max(), np.abs(theirs).max())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr


# --- rows of tokens -------------------------------------------------------------------------------


def test_rows_grade_the_answer_and_its_end_alone() -> None:
    made = pairs.rows([Pair("ab", "cd")], BYTES, context=7)
    assert made.tokens.tolist() == [[BYTES.begin, *b"abcd", BYTES.end, BYTES.end, BYTES.end]]
    assert made.graded.tolist() == [[False, False, False, True, True, True, False, False]]


def test_a_pair_longer_than_a_row_goes_on_in_the_next_and_each_token_of_the_answer_is_predicted_once() -> (
    None
):
    coding = Coding(lambda line: [int(word) for word in line.split()], begin=100, end=101)
    answer = " ".join(map(str, range(50, 63)))
    made = pairs.rows(
        [Pair("1 2 3 4 5", answer)], coding, context=4
    )  # the first row has no token of the answer
    told = [
        token
        for row, graded in zip(made.tokens, made.graded, strict=True)
        for token in row[1:][graded[1:]]
    ]
    assert told == [*range(50, 63), 101]
    assert all(len(row) == 5 for row in made.tokens)
    assert 1 not in made.tokens


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
    made = pairs.rows(
        [Pair("", "x")], Coding(lambda line: [151_000], begin=1, end=128_009), context=4
    )
    made.write(tmp_path / "rows.npz")
    again = type(made).read(tmp_path / "rows.npz")
    assert np.array_equal(again.tokens, made.tokens)
    assert np.array_equal(again.graded, made.graded)
