"""Says what a file really is when its first bytes are no safetensors header. Nothing is ever unpickled."""

from __future__ import annotations

import re

from remote_agent.loader.problems import shown

SNIFF_BYTES = 4096

_MAGICS = (
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ", "xz data"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"ggml", "an old GGML file"),
    (b"ggjt", "an old GGML file"),
    (b"\x89PNG", "a PNG image"),
    (b"\x7fELF", "a program"),
)


def sniff(head: bytes) -> tuple[str, str] | None:
    """Return ``(code, detail)`` for what ``head``, a file's first bytes, gives away; None if nothing."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if re.match(rb"version https?://(git-lfs|hawser)\.github\.com/", text):
        return "lfs_pointer", _describe_lfs(text)
    if re.match(rb"# xet version ", text):
        return "lfs_pointer", "is a Xet pointer, not the weights; fetch the object it stands for"
    if re.match(rb"<!doctype html|<html", text, re.IGNORECASE):
        return "html", _describe_html(text)
    if re.match(rb"\x80[\x02-\x05]", head):
        return "pickle", "is a torch pickle; it is never unpickled here: convert it to safetensors"
    if head.startswith(b"PK\x03\x04"):
        return "torch_zip", "is a zip, such as a torch checkpoint (.bin or .pt renamed): convert it to safetensors"
    if head.startswith(b"GGUF"):
        return "gguf", "is a GGUF file, not safetensors"
    if head and not head.strip(b"\0"):
        return "zero_filled", f"begins with {len(head)} zero bytes: space was set aside and never written"
    return _sniff_other(head, text)


def _sniff_other(head: bytes, text: bytes) -> tuple[str, str] | None:
    for magic, what in _MAGICS:
        if head.startswith(magic):
            return "not_safetensors", f"is {what}, not safetensors"
    if head[257:262] == b"ustar":
        return "not_safetensors", "is a tar archive, not safetensors"
    if text.startswith(b"<"):
        return "not_safetensors", f"is an XML or markup page, not safetensors: {_excerpt(text)}"
    if text.startswith((b"{", b"[")) or _is_text(head):
        return "not_safetensors", f"is plain text, not safetensors: {_excerpt(text)}"
    return None


def _describe_lfs(text: bytes) -> str:
    size = re.search(rb"^size ([0-9]{1,19})\s*$", text, re.MULTILINE)
    real = f"; real size {size[1].decode('ascii')} bytes" if size else ""
    return f"is a Git LFS pointer, not the weights{real}; fetch the object (git lfs pull)"


def _describe_html(text: bytes) -> str:
    title = re.search(rb"<title[^>]*>([^<]{1,200})", text, re.IGNORECASE)
    said = f": {shown(title[1].decode('utf-8', 'replace').strip())}" if title else ""
    return f"is an HTML page, saved in place of the file{said}"


def _excerpt(text: bytes) -> str:
    return repr(shown(text[:60].decode("utf-8", "replace").strip()))


def _is_text(head: bytes) -> bool:
    return bool(head) and all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in head)
