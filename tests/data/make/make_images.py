#!/usr/bin/env python3
"""Writes tests/data/images: small image files of every kind that Pillow reads differently, decoded.safetensors with what
Transformers 5.17's load_image makes of each (by file name, [height, width, 3] u8), and processor.safetensors with what its
Qwen2VLImageProcessor (torchvision 0.26, the default backend) makes of images of several sizes.

    PYTHONPATH=<folder with torchvision> /opt/oracle/bin/python tests/data/make/make_images.py
"""
import io
import json
import pathlib
import struct
import zlib

import numpy as np
import torch
from PIL import Image, PngImagePlugin
from safetensors.torch import save_file
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

OUT = pathlib.Path(__file__).resolve().parents[1] / "images"
HEIGHT, WIDTH = 11, 17


def picture(height=HEIGHT, width=WIDTH, seed=0):
    """Smooth colours with some noise: something that chroma subsampling and filters show in."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    channels = [127 + 90 * np.sin(x / (2.5 + c) + c) * np.cos(y / (3.5 - c / 2)) for c in range(3)]
    noise = rng.normal(0, 14, (height, width, 3))
    return np.clip(np.stack(channels, -1) + noise, 0, 255).astype(np.uint8)


def png16(samples, color_type):
    """A 16-bit PNG, which Pillow does not write for all kinds."""
    height, width = samples.shape[:2]
    rows = b"".join(b"\0" + samples[y].astype(">u2").tobytes() for y in range(height))
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def exif(orientation):
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes()


def write_files():
    rgb = Image.fromarray(picture())
    alpha = Image.fromarray(np.linspace(0, 255, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(np.uint8))
    rgba = rgb.copy()
    rgba.putalpha(alpha)
    gray = rgb.convert("L")
    gray_alpha = Image.merge("LA", [gray, alpha])
    wide = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) * 351

    save = lambda image, name, **options: image.save(OUT / name, **options)
    save(rgb, "rgb.png")
    save(rgba, "rgba.png")
    save(gray, "gray.png")
    save(gray_alpha, "gray_alpha.png")
    save(rgb.quantize(200), "palette.png")
    save(rgb.quantize(3), "palette_2_bits.png", bits=2, transparency=1)
    save(rgb.convert("1"), "one_bit.png")
    save(gray, "gray_transparent.png", transparency=100)
    save(rgb, "rotated.png", exif=exif(6))
    xmp = PngImagePlugin.PngInfo()
    xmp.add_itxt("XML:com.adobe.xmp", '<rdf:Description tiff:Orientation="8"/>')
    save(rgb, "rotated_by_xmp.png", pnginfo=xmp)
    save(rgb, "animated.png", save_all=True, append_images=[Image.fromarray(picture(seed=1))])
    (OUT / "gray_16.png").write_bytes(png16(wide, 0))
    (OUT / "rgb_16.png").write_bytes(png16(np.stack([wide, wide[::-1], wide // 2], -1), 2))
    (OUT / "gray_alpha_16.png").write_bytes(png16(np.stack([wide, wide[::-1]], -1), 4))
    (OUT / "rgba_16.png").write_bytes(png16(np.stack([wide, wide[::-1], wide // 2, wide], -1), 6))

    for name, sampling in (("444", 0), ("422", 1), ("420", 2)):
        save(rgb, f"{name}.jpg", quality=80, subsampling=sampling)
    save(rgb, "progressive.jpg", quality=70, progressive=True)
    save(gray, "gray.jpg", quality=80)
    save(rgb.convert("CMYK"), "cmyk.jpg", quality=90)
    for orientation in range(2, 9):
        save(rgb, f"orientation_{orientation}.jpg", quality=85, exif=exif(orientation))
    big_endian = bytearray(exif(1))
    big_endian[6:] = b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, 6, 0, 0)
    save(rgb, "big_endian_exif.jpg", quality=85, exif=bytes(big_endian))

    save(rgb, "lossy.webp", quality=70)
    save(rgb, "lossless.webp", lossless=True)
    save(rgba, "alpha.webp", quality=70)
    save(rgba, "alpha_lossless.webp", lossless=True, exact=True)
    save(rgb, "rotated.webp", quality=70, exif=exif(3))
    save(rgb, "animated.webp", save_all=True, append_images=[Image.fromarray(picture(seed=1))], duration=100, lossless=True)


def write_decoded():
    files = sorted(path for path in OUT.iterdir() if path.suffix in (".png", ".jpg", ".webp"))
    save_file({path.name: torch.from_numpy(np.array(load_image(str(path)))) for path in files}, OUT / "decoded.safetensors")


# name: (height, width, keys of preprocessor_config.json)
QWEN3_VL = dict(patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
SMALL = dict(QWEN3_VL, size={"shortest_edge": 1024, "longest_edge": 16384})
CASES = {
    "grows": (20, 23, SMALL),
    "shrinks": (301, 190, SMALL),
    "wide": (9, 700, SMALL),
    "one_side_fits": (64, 100, SMALL),
    "fits": (64, 96, SMALL),
    "half_to_even": (48, 80, SMALL),
    "older_keys": (57, 43, dict(patch_size=8, merge_size=1, temporal_patch_size=1, min_pixels=512, max_pixels=2048)),
}


def formula(height, width):
    """A picture that the test computes too: slopes, steps and some texture."""
    y, x, c = np.mgrid[0:height, 0:width, 0:3]
    return ((x * x + 3 * y * y + 5 * x * y) // 16 + 40 * c + 7 * ((31 * x + 17 * y) % 11)).astype(np.uint8)


def write_processed():
    tensors, metadata = {}, {}
    for name, (height, width, keys) in CASES.items():
        result = Qwen2VLImageProcessor(**keys)(images=[Image.fromarray(formula(height, width))], return_tensors="pt")
        tensors[name + ".grid"] = result["image_grid_thw"]
        values = result["pixel_values"]
        if "image_mean" in keys:  # samples of 8 bits, once for all steps in time, say the same in an eighth of the bytes
            values = values.reshape(len(values), 3, keys["temporal_patch_size"], -1)
            assert all(torch.equal(values[:, :, 0], values[:, :, t]) for t in range(values.shape[2]))
            values = ((values[:, :, 0] * 0.5 + 0.5) * 255).round().to(torch.uint8).contiguous()
        tensors[name + ".values"] = values
        metadata[name] = json.dumps(dict(keys, height=height, width=width))
    save_file(tensors, OUT / "processor.safetensors", metadata=metadata)


if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    write_files()
    write_decoded()
    write_processed()
