#!/usr/bin/env python3
"""Holds the ladder of layers: an #include may only point to the left.

    core <- quant <- {experts, dense, io}
    {experts, dense} <- {backends, parallel}
    {experts, dense, parallel} <- layers
    {io, layers} <- models <- generation <- {cli, python}

A backend sees core, quant, experts, dense, itself and its own device's kernels/ and device/, never a sibling; nobody
includes anything from backends/. Public headers include public headers only, and examples/ see nothing else.
Tests (*_test.cc, tests/, fuzz/) link the whole library and may include anything. A header that includes
gtest or tests/ is a test's, and only tests include it.

    scripts/check_layers.py [ROOT]     prints each wrong include; exit status 1 when there is one
"""
import re
import sys
from functools import lru_cache
from pathlib import Path

# What each layer may include directly; what those may include follows.
DIRECT = {
    "core": [],
    "quant": ["core"],
    "experts": ["quant"],
    "dense": ["quant"],
    "io": ["quant"],
    "backends": ["experts", "dense"],
    "parallel": ["experts", "dense"],
    "layers": ["experts", "dense", "parallel"],
    "models": ["io", "layers"],
    "generation": ["models"],
    "cli": ["generation"],
    "python": ["generation"],
}

# The layer that each public header belongs to. A new header needs a line here.
PUBLIC = {
    "activation.h": "core", "allocator.h": "core", "device.h": "core", "dtype.h": "core", "error.h": "core",
    "float16.h": "core", "function_ref.h": "core", "stream.h": "core", "tensor.h": "core",
    "thread_pool.h": "core", "token_id.h": "core", "version.h": "core", "workspace.h": "core",
    "quantization.h": "quant", "storage_format.h": "quant",
    "image.h": "io",
    "experts.h": "experts",
    "model.h": "models", "quantize_checkpoint.h": "models", "sampling.h": "models",
    "chat.h": "generation", "generation.h": "generation", "image_processor.h": "generation",
    "tokenizer.h": "generation",
    "cadre.h": "generation",  # includes them all
}

SOURCES = {".h", ".cc", ".cpp", ".cu", ".cuh"}
FREE = {"tests", "fuzz"}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
TEST_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](gtest|gmock|support)/', re.MULTILINE)


def allowed_layers(layer):
    """The layer itself and all to its left."""
    seen = {layer}
    todo = [layer]
    while todo:
        for left in DIRECT[todo.pop()]:
            if left not in seen:
                seen.add(left)
                todo.append(left)
    return seen


def layer_of(path):
    """The layer of a path relative to the root; None for what the table does not name."""
    parts = path.parts
    if parts[0] == "src" and len(parts) > 2:
        return parts[1]
    if parts[:2] == ("include", "cadre"):
        return PUBLIC.get(parts[-1])
    return parts[0]


def backend_of(path):
    """("cpu", "eager") for src/backends/cpu/eager/..., else None."""
    parts = path.parts
    return parts[2:4] if parts[:2] == ("src", "backends") and len(parts) > 4 else None


def find_include(root, source, name):
    """The included file relative to the root, or None."""
    for folder in (source.parent, Path("src"), Path("include"), Path("tests"), Path(".")):
        candidate = folder / name
        if (root / candidate).is_file():
            return Path(*(root / candidate).resolve().relative_to(root.resolve()).parts)
    return None


@lru_cache(maxsize=None)
def is_test(root, path):
    if path.parts[0] in FREE or path.name.endswith("_test.cc"):
        return True
    return path.suffix == ".h" and bool(TEST_INCLUDE.search((root / path).read_text(encoding="utf-8")))


def wrong(root, source, target):
    """Why `source` may not include `target`; None when it may."""
    if is_test(root, source):
        return None
    if is_test(root, target):
        return "only tests include a test's header"
    top, own, theirs = source.parts[0], backend_of(source), backend_of(target)
    if theirs:
        if own is None:
            return "nobody includes a backend; the generated table is the only link"
        if theirs not in (own, (own[0], "kernels"), (own[0], "device")):
            return "a backend sees itself and its device's kernels/ and device/, never a sibling"
        return None
    if top in ("include", "examples") and target.parts[0] not in ("include", top):
        return f"{top}/ includes public headers only"
    if top == "examples":
        return None
    layer, left = layer_of(source), layer_of(target)
    for path, found in ((source, layer), (target, left)):
        if found not in DIRECT:
            return f"{path} belongs to no layer: add it to the table in scripts/check_layers.py"
    if left not in allowed_layers(layer):
        return f"{layer} may not see {left}"
    return None


def check(root):
    """All wrong includes as "file:line: message", and the number of includes looked at."""
    errors, count = [], 0
    for top in ("include", "src", "cli", "python", "examples", "tests", "fuzz"):
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SOURCES:
                continue
            source = path.relative_to(root)
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                match = INCLUDE.match(line)
                if not match:
                    continue
                count += 1
                target = find_include(root, source, match[1])
                reason = wrong(root, source, target) if target else "no such file in src/ or include/"
                if reason:
                    errors.append(f'{source}:{number}: #include "{match[1]}": {reason}')
    return errors, count


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    errors, count = check(root)
    for error in errors:
        print(error)
    if count == 0:
        print(f"{root}: no #include found: wrong folder?")
        return 1
    print(f"check_layers: {count} includes, {len(errors)} wrong")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
