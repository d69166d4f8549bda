#!/usr/bin/env python3
"""Writes tests/data/tokenizers/tiny_moe_extra.jsonl and tests/data/tokenizers/synthetic/*: small tokenizers built with the PyPI
package `tokenizers` (0.23) and what it makes of texts. Each line: text, ids, ids_with_special, decoded, decoded_skip_special.
"""
import json
import pathlib
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parents[3]
DATA = ROOT / "tests/data/tokenizers"
PROSE = (ROOT / "tests/data/tiny-moe/heldout.txt").read_text()
CODE = pathlib.Path(__file__).read_text()
QWEN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NEWER = [0x180E, 0x897, 0x1C89, 0x1C8A, 0x2427, 0x105C0, 0x10D40, 0x11B60, 0x1E5D0, 0x1E5F1, 0x2EBF0, 0x31350, 0x1FA89, 0x1F8C0, 0x16D40, 0x10D69]


def random_char(rng):
    kind = rng.random()
    if kind < 0.3:
        return chr(rng.randrange(32, 127))
    if kind < 0.4:
        return rng.choice(" \t\n\r\u00a0\u2003\u3000\u0085\v\f\u200b")
    if kind < 0.5:
        return chr(rng.choice(NEWER))
    if kind < 0.6:
        return rng.choice("'\u017f'S'T\u212a\u0301\u0327e\u00e9\u1100\u1161\u11a8\uac00\u1e9b\u0323\u2126\u0958")
    if kind < 0.8:
        return chr(rng.randrange(0xA0, 0x3000))
    while True:
        c = rng.randrange(0x3000, 0x110000)
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def texts(rng, count, specials):
    out = ["", " ", "   ", "\n\n  x", "a" * 100, " " * 65, "=" * 200, "don't DON'T we'LL I'\u017f", "x  y   z\t\t\n ", "\u00e9 e\u0301 \u1e9b\u0323"]
    for i in range(count):
        kind = i % 6
        if kind == 0:
            start = rng.randrange(len(PROSE) - 200)
            out.append(PROSE[start:start + rng.randrange(20, 160)])
        elif kind == 1:
            start = rng.randrange(len(CODE) - 200)
            out.append(CODE[start:start + rng.randrange(20, 160)])
        elif kind in (2, 3):
            out.append("".join(random_char(rng) for _ in range(rng.randrange(1, 40))))
        elif kind == 4:
            out.append(bytes(rng.randrange(256) for _ in range(rng.randrange(1, 40))).decode("utf-8", "replace"))
        else:
            parts = [rng.choice(specials + [" ", "  ", "a", "_", "\n", ".", "\u00e9", "e\u0301", "ab", "\u3000"]) for _ in range(rng.randrange(2, 12))]
            out.append("".join(parts))
    return out


def write_vectors(tokenizer, path, lines):
    rows = []
    for text in lines:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        with_special = tokenizer.encode(text).ids
        rows.append({"text": text, "ids": ids, "ids_with_special": with_special,
                     "decoded": tokenizer.decode(with_special, skip_special_tokens=False),
                     "decoded_skip_special": tokenizer.decode(with_special, skip_special_tokens=True)})
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def train(tokenizer, vocab_size=420, **options):
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **options)
    tokenizer.train_from_iterator((PROSE + CODE).split("\n"), trainer)
    return tokenizer


def byte_level(pre_tokenizer, normalizer=None, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    return train(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def split_qwen():
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def bos_template(tokenizer):
    tokenizer.add_special_tokens(["<s>", "</s>"])
    ids = [(t, tokenizer.token_to_id(t)) for t in ("<s>", "</s>")]
    template = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B", special_tokens=ids)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def added_rules():
    tokenizer = byte_level(split_qwen(), normalizers.NFC())
    tokenizer.add_special_tokens([AddedToken("<l>", lstrip=True), AddedToken("<r>", rstrip=True), AddedToken("<lr>", lstrip=True, rstrip=True),
                                  AddedToken("<w>", single_word=True), AddedToken("<lrx>")])
    tokenizer.add_tokens([AddedToken("\u00e9\u00e9", normalized=True), AddedToken("e\u0301x", normalized=True), AddedToken("e\u0301y", normalized=False),
                          AddedToken("  ", normalized=True), AddedToken("word", single_word=True, normalized=True),
                          AddedToken("the", normalized=True), AddedToken(" ", normalized=False, rstrip=True)])
    return tokenizer


def sentencepiece():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    specials = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % b for b in range(256)]
    train(tokenizer, 700, special_tokens=specials, max_token_length=12)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def behaviors():
    """One Split of each behaviour, on characters so that pieces show in the ids."""
    made = {}
    for behavior in ("removed", "isolated", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            tokenizer = byte_level(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"[a-f ]|\d{0,2}"), behavior, invert),
                                                            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)]))
            made["split_%s%s" % (behavior, "_inverted" if invert else "")] = tokenizer
    return made


def no_decoder_unknowns():
    tokenizer = Tokenizer(models.BPE(unk_token="?", fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Digits(individual_digits=True)])
    return train(tokenizer, 120, special_tokens=["?"], limit_alphabet=40)


def with_string_merges(tokenizer):
    state = json.loads(tokenizer.to_str())
    state["model"]["merges"] = [" ".join(m) for m in state["model"]["merges"]]
    return state


def ignoring_merges():
    state = json.loads(byte_level(split_qwen()).to_str())
    model = state["model"]
    model["ignore_merges"] = True
    # Words that no merges lead to: found whole when merges are ignored, never otherwise.
    for word in ("\u0120zebra", "qqq", "\u00c3\u00a9\u00c3\u00a9"):
        model["vocab"][word] = len(model["vocab"])
    return state


def main():
    rng = random.Random(20261130)
    tiny = Tokenizer.from_file(str(ROOT / "assets/tiny-moe/tokenizer.json"))
    write_vectors(tiny, DATA / "tiny_moe_extra.jsonl", texts(rng, 300, SPECIALS))

    as_state = lambda tokenizer: json.loads(tokenizer.to_str())
    states = {
        "string_merges": with_string_merges(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))),
        "ignore_merges": ignoring_merges(),
        "prefix_space": as_state(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))),
        "digits_prefix": as_state(byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False),
                                                                      pre_tokenizers.ByteLevel(add_prefix_space=True)]))),
        "bos_template": as_state(bos_template(byte_level(split_qwen()))),
        "added_rules": as_state(added_rules()),
        "sentencepiece": as_state(sentencepiece()),
        "unknowns": as_state(no_decoder_unknowns()),
    }
    states.update({name: as_state(tokenizer) for name, tokenizer in behaviors().items()})
    folder = DATA / "synthetic"
    folder.mkdir(exist_ok=True)
    for name, state in states.items():
        text = json.dumps(state, ensure_ascii=False, separators=(",", ":"))
        (folder / (name + ".tokenizer.json")).write_text(text + "\n")
        tokenizer = Tokenizer.from_str(text)
        specials = list(tokenizer.get_added_tokens_decoder().values())
        words = [t.content for t in specials] or ["<s>"]
        extra = [" zebra", "qqq", "\u00e9\u00e9", " \u00e9\u00e9", "12345 a1b22", "word sword words word", "a <w> b<w>c <w>", "x  <l>  <r>  <lr>  y"]
        write_vectors(tokenizer, folder / (name + ".jsonl"), texts(rng, 12 if name.startswith("split") else 60, words) + extra)


if __name__ == "__main__":
    sys.exit(main())
