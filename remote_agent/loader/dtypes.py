"""The dtypes of the safetensors format: their size in bits and what they are called in torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """``torch_name`` is None where torch has no such type; ``packed``: elements of one torch item."""

    bits: int
    torch_name: str | None
    packed: int = 1

    @property
    def item_bytes(self) -> int:
        """What an address must be a multiple of for a view."""
        return max(1, self.bits * self.packed // 8)


DTYPES = {
    "BOOL": Dtype(8, "bool"),
    "U8": Dtype(8, "uint8"),
    "I8": Dtype(8, "int8"),
    "F8_E4M3": Dtype(8, "float8_e4m3fn"),
    "F8_E5M2": Dtype(8, "float8_e5m2"),
    "F8_E8M0": Dtype(8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": Dtype(8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": Dtype(8, "float8_e5m2fnuz"),
    "F4": Dtype(4, "float4_e2m1fn_x2", packed=2),
    "F6_E2M3": Dtype(6, None),
    "F6_E3M2": Dtype(6, None),
    "F16": Dtype(16, "float16"),
    "BF16": Dtype(16, "bfloat16"),
    "I16": Dtype(16, "int16"),
    "U16": Dtype(16, "uint16"),
    "F32": Dtype(32, "float32"),
    "I32": Dtype(32, "int32"),
    "U32": Dtype(32, "uint32"),
    "F64": Dtype(64, "float64"),
    "I64": Dtype(64, "int64"),
    "U64": Dtype(64, "uint64"),
    "C64": Dtype(64, "complex64"),
}
