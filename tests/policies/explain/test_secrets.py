"""Secrets never come back out; counts and vocabularies of tokens do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.policies.explain.secrets import masked, without_secrets
from autotune.policies.values.diagnosis import Line

KEY = "a1b2c3d4e5f6a7b8c9d0e1f2a3b4c5d6e7f8a9b0"


@pytest.mark.parametrize(
    "text",
    [
        f"export WANDB_API_KEY={KEY}",
        f"'WANDB_API_KEY': '{KEY}'",
        f'{{"env_vars": {{"WANDB_API_KEY": "{KEY}", "A": "1"}}}}',
        f'runtime_env={{\\"HF_TOKEN\\": \\"{KEY}\\"}}',
        f"HF_TOKEN={KEY} python train.py",
        f"HUGGING_FACE_HUB_TOKEN: {KEY}",
        f"AWS_SECRET_ACCESS_KEY={KEY}",
        f"aws_secret_access_key = {KEY}",
        f"AWS_ACCESS_KEY_ID={KEY}",
        f"python train.py --wandb-key {KEY} --lr 1e-6",
        f"python train.py --password {KEY}",
        f"--hf_token={KEY}",
        f"  wandb_key ....................................... {KEY}",
        f"Authorization: Bearer {KEY}",
        f"'authorization': 'token {KEY}'",
        f"curl -H 'Authorization: Basic {KEY}='",
        f"https://user:{KEY}@github.com/a/b.git",
        f"redis://:{KEY}@10.0.0.1:6379",
        f"https://bucket.s3.amazonaws.com/x?X-Amz-Signature={KEY}&b=1",
        f"GET /v1?api_key={KEY}&n=1",
        f"hf_{KEY}",
        f"key sk-proj-{KEY}.",
        f"ghp_{KEY}",
        f"RAY_AUTH_TOKEN='{KEY}'",
        f'OPENAI_API_KEY: "{KEY}"',
        f"MY_SERVICE_KEY={KEY}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{KEY}\n-----END RSA PRIVATE KEY-----",
        f"db_password: {KEY}",
    ],
)
def test_secrets_are_masked(text: str) -> None:
    assert KEY[4:] not in masked(text)
    assert "***" in masked(text)


@pytest.mark.parametrize("value", ["hunter2", "secretvalue", "12345678"])
def test_short_passwords_are_masked(value: str) -> None:
    for text in (
        f"--password {value}",
        f"password={value}",
        f"DB_PASSWORD={value}",
        f"mysql://me:{value}@db/x",
    ):
        assert value not in masked(text), text


@pytest.mark.parametrize(
    "text",
    [
        "AssertionError: max_token_len must be greater than the sequence length. Got max_token_len=1024",
        "#new-token: 2048, #cached-token: 0, token usage: 0.45",
        "eos_token_id=151645 pad_token='<|endoftext|>' eos_token: <|im_end|>",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 tokens_per_microbatch: 24576",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.91 GiB.",
        "use_auth_token=None token=False trust_remote_code=True",
        "SyntaxError: unexpected token: identifier",
        'KeyError: "reward"',
        "num_tokens per token: seconds",
        "http://10.0.0.1:8265/api/jobs/",
        "a secret of the trade, basic training, bearer of news",
        "key: value, primary_key=7, sort(key=len)",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


@given(st.text(max_size=300))
def test_any_text_is_masked_once(text: str) -> None:
    once = masked(text)
    assert masked(once) == once


@pytest.mark.parametrize(
    "unit",
    [
        "token",
        "a",
        "token=",
        "://",
        "://a:",
        "password ",
        "eyJ",
        "Bearer ",
        "key=\\",
        "_KEY='",
        "-----BEGIN PRIVATE KEY-----",
    ],
)
def test_a_long_line_takes_linear_work(unit: str) -> None:
    masked(unit * (400_000 // len(unit)))


def test_a_line_of_evidence_is_stored_without_its_secrets() -> None:
    line = Line(line=7, text="OSError: https://me:hunter2@host/ is full", rule="disk-full")
    assert without_secrets(line) == Line(
        line=7, text="OSError: https://me:***@host/ is full", rule="disk-full"
    )
