#!/usr/bin/env python3
"""Writes tests/data/tokenizers/families/*: small tokenizers in the shapes of model families whose tokenizer.json is not here
(Mixtral and Llama-2, both ways that their spaces are written; DeepSeek-V2's splits), built with the PyPI package `tokenizers`
(0.23), and what it makes of texts (NAME.jsonl, as make_tokenizer_vectors.py) and of random ids (NAME.decode.jsonl).
"""
import json
import random
import sys

from make_tokenizer_vectors import CODE, DATA, PROSE, texts, write_vectors
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

MARK = "\u2581"
BYTES = ["<0x%02X>" % b for b in range(256)]
CJK = "\u6cb3\u306e\u6d41\u308c\u306f\u7d76\u3048\u305a\u3057\u3066\u3001\u3057\u304b\u3082\u3001\u3082\u3068\u306e\u6c34\u306b\u3042\u3089\u305a\u3002\u4eba\u751f\u81ea\u53e4\u8c01\u65e0\u6b7b\u3002 \uc548\ub155\ud558\uc138\uc694"
ODD = ["", " ", "  ", "\u2581", " \u2581 \u2581\u2581a", "a" * 300, " " * 300, "\u2581" * 70, "x" + " " * 40 + "y", "tab\tand\nnewline\r\n  end ", "\u00a0no break\u2003em",
       "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \u2764\ufe0f\U0001f44d\U0001f3fd", "e\u0301\u0327\u0301 \u1e9b\u0323", "\x00\x01\x7f\ufeff\ufffd\U0010ffff",
       "<0x0A><0xE2>", "<0x41>a<0xF0><0x9F>", CJK, CJK * 4, "word" * 80, "supercalifragilisticexpialidocious" * 3,
       " <s> text</s>  <unk>more<s><s> a", "<s>", "<s> ", " <s>", "a<s>b", "[INST] hi [/INST] ok[INST]", "[INST]  [INST]\n[/INST]x", "\U00031350\u0897 newer"]
DEEPSEEK_V2 = ["[\r\n]",
               "\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
               "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u1e00-\u1f15\u2102\u2107\ufb00-\ufb06\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f]+",
               "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", "\\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"]


def trained(vocab_size):
    """The model of Mixtral and Llama-2: words that start with the mark, bytes for what is not in the vocabulary."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"] + BYTES)
    tokenizer.train_from_iterator((PROSE + CODE + "\n" + "   return   \n" * 40).split("\n"), trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [t for t in state["added_tokens"] if t["id"] < 3]
    state["pre_tokenizer"] = None
    return state


def byte_fallback_decoder():
    return decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def finish(state, decoder, normalizer=None, pre_tokenizer=None, tokens=()):
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoder
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    tokenizer.add_tokens(list(tokens))
    return json.loads(tokenizer.to_str())


def old_spelling(state):
    """As files before tokenizers 0.15 have it."""
    for key in ("pre_tokenizer", "decoder"):
        state[key] = {"type": "Metaspace", "replacement": MARK, "str_rep": MARK, "add_prefix_space": True}
    return state


def deepseek_v2():
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK_V2]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits + [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator((PROSE + CODE + CJK).split("\n"), trainer)
    return json.loads(tokenizer.to_str())


def write_decoded(tokenizer, path, rng, count=80):
    """Random ids, half of them single bytes, some unknown to the vocabulary."""
    rows = []
    size = tokenizer.get_vocab_size()
    for _ in range(count):
        ids = [rng.randrange(size + 3) if rng.random() < 0.5 else 3 + rng.randrange(256) for _ in range(rng.randrange(1, 24))]
        if rng.random() < 0.5:  # characters cut in two
            raw = rng.choice(ODD + [CJK]).encode()[:40]
            ids += [tokenizer.token_to_id("<0x%02X>" % b) or 0 for b in raw[rng.randrange(3):]]
        rows.append({"ids": ids, "decoded": tokenizer.decode(ids, skip_special_tokens=False), "decoded_skip_special": tokenizer.decode(ids)})
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))


def main():
    rng = random.Random(20261130)
    instructions = [AddedToken("[INST]", normalized=False), AddedToken("[/INST]", normalized=True)]
    llama = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    small = trained(500)
    states = {
        "mixtral": finish(trained(1200), byte_fallback_decoder(), normalizer=llama, tokens=instructions),
        "metaspace_first": finish(small, byte_fallback_decoder(), pre_tokenizer=pre_tokenizers.Metaspace(MARK, "first", split=False), tokens=instructions),
        "metaspace_never": finish(small, decoders.Metaspace(MARK, "never"), pre_tokenizer=pre_tokenizers.Metaspace(MARK, "never"), tokens=instructions),
        "metaspace_old": old_spelling(finish(small, decoders.Metaspace(), tokens=instructions)),
        "metaspace_split_first": finish(small, decoders.Metaspace(MARK, "first"), tokens=instructions, pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace(MARK, "first")])),
        "deepseek_v2": deepseek_v2(),
    }
    shared = [json.loads(line)["text"] for line in (DATA / "tiny_moe.jsonl").read_text().strip().split("\n")]
    folder = DATA / "families"
    folder.mkdir(exist_ok=True)
    for name, state in states.items():
        text = json.dumps(state, ensure_ascii=False, separators=(",", ":"))
        (folder / (name + ".tokenizer.json")).write_text(text + "\n")
        tokenizer = Tokenizer.from_str(text)
        words = [t.content for t in tokenizer.get_added_tokens_decoder().values()] or ["<s>"]
        lines = shared if name == "mixtral" else shared[::8]
        write_vectors(tokenizer, folder / (name + ".jsonl"), lines + ODD + texts(rng, 36, words))
        write_decoded(tokenizer, folder / (name + ".decode.jsonl"), rng)


if __name__ == "__main__":
    sys.exit(main())
