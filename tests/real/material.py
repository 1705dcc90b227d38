"""A model with random weights, its tokenizer, prompts and rewards: `material.py FOLDER`.

Runs in a framework's interpreter. The first `--first` prompts are short and the others long, so that a job
that takes them in order runs out of memory after it has written a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pandas
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2TokenizerFast

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
REWARD = '''
def _share(text):
    digits = [character for character in text if character.isdigit()]
    return sum(character in "13579" for character in digits) / max(1, len(digits))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Return verl's reward of one answer: the share of odd digits."""
    return _share(solution_str)


def odd(completions, **_):
    """Return the same for TRL, of a batch of answers."""
    return [_share(text) for text in completions]
'''


def write_model(
    folder: Path, *, hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, tied: int
) -> None:
    """Write a Qwen2 of a shape with a tokenizer whose ids all have a text: bytes, then numbers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    words = {letters[byte]: byte for byte in range(256)}
    words |= {f"t{number}": number for number in range(256, vocab - 2)}
    tokenizer = Qwen2TokenizerFast(
        vocab=words, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=inner,
        vocab_size=vocab,
        max_position_embeddings=32768,
        tie_word_embeddings=bool(tied),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)


def write_prompts(folder: Path, *, count: int, first: int, short: int, long: int) -> None:
    """Write prompts of as many tokens as letters, in verl's and in TRL's form."""
    chance = random.Random(0)
    texts = [
        "".join(chance.choices("abcdefgh", k=short if number < first else long)) for number in range(count)
    ]
    rows = [
        {
            "prompt": [{"role": "user", "content": text}],
            "data_source": "random",
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number, text in enumerate(texts)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "prompts").mkdir(exist_ok=True)
    with (folder / "prompts" / "train.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": text}) + "\n" for text in texts)


def main() -> None:
    """Write all of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "kv": 2, "inner": 128, "vocab": 512, "tied": 1}
    lengths = {"count": 64, "first": 8, "short": 16, "long": 16}
    for name, default in (sizes | lengths).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    folder = options.pop("folder")
    (folder / "model").mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", **{name: options[name] for name in sizes})
    write_prompts(folder, **{name: options[name] for name in lengths})
    (folder / "rewards.py").write_text(REWARD)


if __name__ == "__main__":
    main()
