"""What the tests of `preprocess` share: inputs, and what became of them."""

import json
import random

import mb_data
from mb_data import IndexedDataset, load_tokenizer

GPT2 = load_tokenizer("gpt2")


def preprocess(inputs, prefix, *, tokenizer=GPT2, **options):
    """With a tokenizer that is there already: loading it takes longer than most tests."""
    return mb_data.preprocess(inputs, prefix, tokenizer=tokenizer, **options)


def write(path, records):
    path.write_bytes(b"".join(json.dumps(r).encode() + b"\n" for r in records))
    return path


def random_records(seed, count, words=300):
    rng = random.Random(seed)
    vocabulary = ["the", "of", "a", "MoE", "expert", "12", "router,", "(x)", "=", "é\n", '"']
    return [
        {"id": i, "text": " ".join(rng.choices(vocabulary, k=rng.randrange(words)))}
        for i in range(count)
    ]


def documents(prefix):
    return [x.tolist() for x in IndexedDataset(prefix)[:]]


def output_bytes(prefix):
    return tuple((prefix.parent / f"{prefix.name}.{end}").read_bytes() for end in ("bin", "idx"))
