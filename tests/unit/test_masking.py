"""Secrets on command lines are masked, and what only looks a little like one is not."""

from __future__ import annotations

import pytest
from secret_forms import FORMS, SECRET as S

from clusterprof import masking
from clusterprof.results import RANKS

#: put together here, so that no scanner takes this file for a leak
KNOWN = [
    "sk-" + "a1B2" * 8, "ghp_" + "a1B2" * 9, "github_pat_" + "a1B2" * 9, "hf_" + "a1B2" * 8,
    "glpat-" + "a1B2" * 5, "xoxb-" + "1234567890-abc", "AKIA" + "ABCD" * 4, "AIza" + "a1B2" * 9,
    "eyJ" + "hbGciOiJI." + "eyJzdWIiOiIx." + "c2ln", "nvapi-" + "a1B2" * 8,
]  # fmt: skip


@pytest.mark.parametrize("secret", KNOWN)
def test_a_well_known_token_is_masked_wherever_it_stands(secret: str) -> None:
    for word in (secret, f"--x={secret}", f"https://{secret}@host/x", f"echo '{secret}'"):
        assert secret not in masking.text(word), word
        assert masking.text(word) == word.replace(secret, masking.MASK)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--token=abc", "x"], ["--token=***", "x"]),
        (["--api-key", "abc", "x"], ["--api-key", "***", "x"]),
        (["--password", "--verbose"], ["--password", "--verbose"]),
        (["--hf_token=a,b c"], ["--hf_token=***"]),
        (["env", "WANDB_API_KEY=abc", "python"], ["env", "WANDB_API_KEY=***", "python"]),
        (["AWS_SECRET_ACCESS_KEY=a/b+c="], ["AWS_SECRET_ACCESS_KEY=***"]),
        (["--export=ALL,HF_TOKEN=abc,X=1"], ["--export=ALL,HF_TOKEN=***,X=1"]),
        (["postgres://me:abc@db/x"], ["postgres://me:***@db/x"]),
        (["bash", "-c", "export DB_PASSWORD='a b'; python"],
         ["bash", "-c", "export DB_PASSWORD=***; python"]),
        (["sh", "-c", "train --api-key abc --lr 1"], ["sh", "-c", "train --api-key *** --lr 1"]),
        (["-H", "Authorization: Bearer abc.def"], ["-H", "Authorization: Bearer ***"]),
        (["--header=X: Bearer abcdefgh123"], ["--header=X: Bearer ***"]),
        (['{"api_key": "abc", "n": 1}'], ['{"api_key": ***, "n": 1}']),
        (["https://h/x?access_token=abc&n=1"], ["https://h/x?access_token=***&n=1"]),
        (["--clientSecret=abc"], ["--clientSecret=***"]),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_masked(argv: list[str], shown: list[str]) -> None:
    assert masking.suspected(argv) == shown


@pytest.mark.parametrize(
    "word",
    ["--max-tokens=4096", "--tokenizer=gpt2", "--eos-token-id=2", "TOKENIZERS_PARALLELISM=false",
     "--sort-key=name", "--num-key-value-heads=8", "--lr=0.1", "https://host:8080/x", "a=b", "",
     "--secretary=x", "user@host:/path", "c10d://host:29500", "--password-file=/x",
     "sk-learn", "hf_hub", "task-runner", "--nproc-per-node=4", "train.py"],
)  # fmt: skip
def test_what_is_no_secret_stays(word: str) -> None:
    assert masking.text(word) == word
    assert masking.suspected([word, "next"]) == [word, "next"]


def test_a_long_word_is_masked_in_no_time() -> None:
    for word in ("a-" * 50_000, "A_" * 50_000, "--" + "token-" * 20_000, "a" * 100_000):
        masking.suspected([word])
        masking.words(["x", word])


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_no_value_of_a_command_is_shown(form: list[str]) -> None:
    argv = ["srun", "-N2", f"--export=ALL,X={S}", "python", "train.py", *form]
    for shown in (
        masking.words(argv),
        masking.again(["clusterprof", "run", "{ranks}", "--", *argv], "{ranks}"),
    ):
        assert len(shown) in (len(argv), len(argv) + 4)
        assert not [word for word in shown if S in word or "1234" in word], shown


def test_what_starts_a_program_stays_with_the_names_of_options_and_counts() -> None:
    line = (
        "srun -N4 --ntasks-per-node=8 -n 32 env OMP_NUM_THREADS=*** torchrun --nproc-per-node 8"
        " /usr/bin/python3.11 -u pretrain.py --lr *** model.lr=*** --resume -- ***"
    )
    assert masking.words(line.split()) == line.split()
    module = ["python", "-m", "package.train", "--lr"]
    assert masking.words(module) == module


def test_the_values_that_the_user_calls_harmless_stay_but_for_what_is_known_to_be_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masking, "harmless", {"lr", "batch-size", "s"})
    shown = ["train.py", "--lr=0.1", "--batch_size", "64", "-s", "***", "--other", "***"]
    assert masking.words([*shown[:5], KNOWN[0], "--other", "7"]) == shown


def test_clusterprof_s_own_options_stay_but_for_what_they_pass_on() -> None:
    argv = ["clusterprof", "ssh", "--steps=5:9", f"--env=TOKEN={S}", "--env", f"A={S}", "--pp", "2",
            "{ranks}", "--nnodes", "2", "--rdzv-id", S, "--", "train.py", "--lr", "1"]  # fmt: skip
    assert masking.again(argv, "{ranks}") == [
        "clusterprof", "ssh", "--steps=5:9", "--env=***", "--env", "***", "--pp", "2",
        "{ranks}", "--nnodes", "2", "--rdzv-id", "***", "--", "train.py", "--lr", "***",
    ]  # fmt: skip


def test_a_command_to_copy_has_blanks_to_fill_in_where_values_were_masked() -> None:
    whole = ["clusterprof", "torchrun", RANKS, "--", "train.py", "--lr", "0.1", "--x=y", "set1"]
    assert masking.command(masking.again(whole, RANKS)) == (
        f"clusterprof torchrun '{RANKS}' -- train.py --lr <value> --x=<value> <value>"
    )
    assert masking.command(["python", "a b.py", "*** all ***"]) == "python 'a b.py' '*** all ***'"
