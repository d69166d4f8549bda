#!/usr/bin/env python3
"""Writes src/generation/jinja/case_tables.inc: where Python's case rules and classes of characters (str.upper, lower, title, islower,
isupper, isdigit and the rule of the final sigma) are not what utf8proc's simple mappings and general categories give. Also
tests/data/chat/case_hashes.json: FNV-1a of what Python makes of every code point, one after the other. Needs Python 3.11 (Unicode 14) and
libutf8proc.so.2.
"""
import ctypes
import json
import pathlib
import unicodedata

ROOT = pathlib.Path(__file__).resolve().parents[3]
KNOWN = [c for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
utf8proc = ctypes.CDLL("libutf8proc.so.2")


def category(c):
    return unicodedata.category(chr(c))


def ranges(code_points):
    out = []
    for c in sorted(code_points):
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return ", ".join("{0x%04X, 0x%04X}" % (a, b) for a, b in out)


def is_ignorable(c):
    """Whether the rule of the final sigma looks past the character."""
    before = ("A" + chr(c) + "Σ").lower().endswith("ς")
    return before and (c in CASED and not ("A\u0301" + "Σ" + chr(c)).lower()[2] == "σ" or c not in CASED)


def mapped(simple, full):
    rows = []
    for c in KNOWN:
        want = full(chr(c))
        if want != chr(simple(c)):
            text = "".join("\\x%02x" % b for b in want.encode())
            rows.append('{0x%04X, "%s"}' % (c, text))
    return rows


CASED = {c for c in KNOWN if chr(c).islower() or chr(c).isupper() or category(c) == "Lt"}


def table(kind, name, rows):
    body = ",\n    ".join(rows)
    return "constexpr %s %s[] = {\n    %s};\n" % (kind, name, body)


def main():
    by_category = {"Mn", "Me", "Cf", "Lm", "Sk"}
    ignorable = {c for c in KNOWN if is_ignorable(c)}
    assert not [c for c in KNOWN if category(c) in by_category and c not in ignorable]
    out = "// Made by tests/data/make/make_case_tables.py with Python %s; do not edit.\n" % unicodedata.unidata_version
    # The final sigma's own mapping depends on its neighbours and is code.
    out += table("Mapping", "kUpper", mapped(utf8proc.utf8proc_toupper, str.upper))
    out += table("Mapping", "kLower", mapped(utf8proc.utf8proc_tolower, str.lower))
    out += table("Mapping", "kTitle", mapped(utf8proc.utf8proc_totitle, str.title))
    out += table("Range", "kOtherLower", [ranges(c for c in KNOWN if chr(c).islower() and category(c) != "Ll")])
    out += table("Range", "kOtherUpper", [ranges(c for c in KNOWN if chr(c).isupper() and category(c) != "Lu")])
    out += table("Range", "kOtherDigits", [ranges(c for c in KNOWN if chr(c).isdigit() and category(c) != "Nd")])
    out += table("Range", "kOtherIgnorable", [ranges(c for c in ignorable if category(c) not in by_category)])
    (ROOT / "src/generation/jinja/case_tables.inc").write_text(out)

    functions = {"upper": str.upper, "lower": str.lower, "title": str.title, "capitalize": str.capitalize, "repr": repr,
                 "isalpha": lambda c: str(c.isalpha()), "isdigit": lambda c: str(c.isdigit()), "isalnum": lambda c: str(c.isalnum()),
                 "isspace": lambda c: str(c.isspace()), "isupper": lambda c: str(c.isupper()), "islower": lambda c: str(c.islower())}
    known = [[int(n, 16) for n in pair.split(", ")] for pair in ranges(KNOWN)[1:-1].split("}, {")]
    hashes = {name: fnv1a("".join(make(chr(c)) for c in KNOWN)) for name, make in functions.items()}
    (ROOT / "tests/data/chat/case_hashes.json").write_text(json.dumps({"known": known, "fnv1a": hashes}) + "\n")


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


if __name__ == "__main__":
    main()
