#!/usr/bin/env python3
"""Writes what jinja2, set up as Transformers' apply_chat_template sets it up, makes of

- tests/data/chat/conversations.json: conversations x templates (the two real ones of fixtures/tokenizers, our own small ones in
  tests/data/chat/templates that mirror other families' kinds, one for the bundled model), text or FNV-1a of it where long, or an
  error;
- tests/data/chat/expressions.json: small templates, one for each rule of the language that chat templates use.

The environment is Transformers' own (transformers.utils.chat_template_utils), with the clock stopped.
"""
import argparse
import datetime
import json
import pathlib

from chat_conversations import CONVERSATIONS
from chat_expressions import CONTEXT, EXPRESSIONS
from transformers.utils import chat_template_utils

ROOT = pathlib.Path(__file__).resolve().parents[3]
OUT = ROOT / "tests/data/chat"
NOW = 1722470400  # 2024-08-01, noon in London's winter
LONG = 3000
SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
TINY = ("{{ bos_token }}{% for message in messages %}\n{{ message.role | title }}: {{ message.content }}\n"
        "{% endfor %}\n{% if add_generation_prompt %}\nAssistant:{% endif %}")


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def compiled(source):
    template = chat_template_utils._compile_jinja_template(source)
    now = datetime.datetime.fromtimestamp(NOW)
    template.globals["strftime_now"] = lambda text: now.strftime(text)
    template.environment.globals["strftime_now"] = template.globals["strftime_now"]
    return template


def rendered(source, variables):
    """{"text": ...}, {"fnv1a": ..., "bytes": ...} or {"error": ...}"""
    try:
        text = compiled(source).render(**variables)
        size = len(text.encode())
    except Exception as error:  # a template may fail in any way
        return {"error": type(error).__name__}
    return {"text": text} if size <= LONG else {"fnv1a": str(fnv1a(text)), "bytes": size}


def variables_of(conversation, special_tokens):
    return {"messages": conversation["messages"], "tools": conversation.get("tools"), "documents": conversation.get("documents"),
            "add_generation_prompt": conversation.get("add_generation_prompt", False), **special_tokens,
            **conversation.get("variables", {})}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixtures", default=str(ROOT.parent / "shared/fixtures/tokenizers"))
    parser.add_argument("--local", help="a folder of real templates: conversations are written next to it, not into the project")
    arguments = parser.parse_args()
    templates = {}
    if arguments.local:
        for path in sorted(pathlib.Path(arguments.local).glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
    else:
        for name in ("qwen3", "deepseek_v3"):
            source = (pathlib.Path(arguments.fixtures) / f"{name}_chat_template.jinja").read_text(encoding="utf-8")
            (OUT / "templates" / f"{name}.jinja").write_text(source, encoding="utf-8")
        for path in sorted((OUT / "templates").glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
        templates["tiny_moe"] = TINY
    cases = []
    for name, source in templates.items():
        special = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"} if name == "tiny_moe" else SPECIAL_TOKENS
        for i, conversation in enumerate(CONVERSATIONS):
            cases.append({"template": name, "conversation": i, **rendered(source, variables_of(conversation, special))})
    document = {"now": NOW, "special_tokens": SPECIAL_TOKENS, "tiny_moe": TINY, "conversations": CONVERSATIONS, "cases": cases}
    out = pathlib.Path(arguments.local or OUT) / "conversations.json"
    out.write_text(json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    failed = {}
    for case in cases:
        failed.setdefault(case["template"], []).append("error" in case)
    print({name: f"{len(all_) - sum(all_)} of {len(all_)}" for name, all_ in failed.items()})
    if arguments.local:
        return
    rows = [{"source": source, **rendered(source, CONTEXT)} for source in EXPRESSIONS]
    document = {"now": NOW, "context": CONTEXT, "rows": rows}
    text = json.dumps(document, ensure_ascii=False, indent=0, separators=(",", ":"))
    (OUT / "expressions.json").write_text(text + "\n", encoding="utf-8")
    print(len(rows), "expressions,", sum("error" in row for row in rows), "of them errors")


if __name__ == "__main__":
    main()
