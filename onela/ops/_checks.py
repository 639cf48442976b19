"""Shape and dtype checks shared by the ops' wrappers. Kernels check nothing; everything is refused at the door."""

from __future__ import annotations

from torch import Tensor

from onela.errors import DtypeError, ShapeError


def check_shape(name: str, tensor: Tensor, *expected: int | None) -> None:
    """Raise `ShapeError` unless `tensor` has the expected shape (None: any size)."""
    given = tuple(tensor.shape)
    if len(given) != len(expected) or any(e is not None and e != s for e, s in zip(expected, given)):
        wanted = ", ".join("*" if e is None else str(e) for e in expected)
        raise ShapeError(f"{name}: expected shape [{wanted}], got {list(given)}")


def check_index(name: str, tensor: Tensor, *expected: int | None) -> None:
    """`check_shape` for an int32 or int64 index tensor."""
    if str(tensor.dtype) not in ("torch.int32", "torch.int64"):
        raise DtypeError(f"{name}: expected int32 or int64, got {tensor.dtype}")
    check_shape(name, tensor, *expected)


def check_float(name: str, tensor: Tensor, *expected: int | None) -> None:
    """`check_shape` for a floating-point tensor."""
    if not tensor.is_floating_point():
        raise DtypeError(f"{name}: expected a floating-point dtype, got {tensor.dtype}")
    check_shape(name, tensor, *expected)


def check_groups(num_value_heads: int, num_key_heads: int) -> int:
    """Return HV // H, or raise `ShapeError` when HV is not a multiple of H."""
    if num_key_heads == 0 or num_value_heads % num_key_heads:
        raise ShapeError(f"v: {num_value_heads} value heads are not a multiple of {num_key_heads} key heads")
    return num_value_heads // num_key_heads
