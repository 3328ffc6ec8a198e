"""Folders of small chat models."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Writes the thoughts of the last answer alone, as Qwen3 does.
THINKING = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and not loop.last %}
        {{- message.content.split('</think>')[-1] }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEXT = ["What is two and two? It is four.", "user assistant system", "a\nb\n\nc", "你好 é"] * 20


def chat_folder(folder: Path, template=CHATML, **more):
    """A byte-level BPE with ChatML's tokens, and its template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | more))
    return folder


def chats(path: Path, *conversations, key="messages"):
    """A file of conversations, each as pairs of a role and a text."""
    lines = [{key: [{"role": r, "content": c} for r, c in one]} for one in conversations]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


TWO_ANSWERS = [
    ("system", "Be short."),
    ("user", "What is two and two?"),
    ("assistant", "It is four.\n"),
    ("user", "And\n\nthree 你好?"),
    ("assistant", "\nSeven é."),
]
