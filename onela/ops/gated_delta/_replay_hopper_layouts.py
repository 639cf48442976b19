"""Register and shared-memory layouts of the Hopper replay kernel, and the stages of its ring."""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@dataclass(frozen=True)
class Geometry:
    """Sizes, and the ring's stages of one tile: q and k up to KEYS, the keys up to DELTAS, the deltas up to LAST, v."""

    H: int
    HV: int
    K: int
    V: int
    T: int
    NW: int
    RING: int
    RAW: bool
    """Whether the key already lies in its record."""
    DS: int
    """Stages of a delta row: two when it is fp32."""
    NORM: bool
    """Whether the output is normalised and gated: one more stage, the gate z."""

    def __post_init__(self):
        put = object.__setattr__
        put(self, "BW", 8 * self.NW)
        put(self, "KB", self.K // 128)
        put(self, "VB", self.V // 128)
        put(self, "HK", self.H * self.K)
        put(self, "HVV", self.HV * self.V)
        put(self, "KEYS", 2 * self.KB)
        put(self, "DELTAS", self.KEYS + self.T * self.KB)
        put(self, "LAST", self.DELTAS + self.T * self.DS)
        put(self, "STAGES", self.LAST + 1 + self.NORM)
        # Tiles ahead of the present one that a copy may belong to.
        put(self, "REACH", (self.RING + self.STAGES - 1) // self.STAGES)


@gluon.constexpr_function
def geometry(H, HV, K, V, T, NW, RING, RAW, DS, NORM):
    return Geometry(H, HV, K, V, T, NW, RING, RAW, DS, NORM)


@dataclass(frozen=True)
class LayerGeometry:
    """The same for the whole layer step, K = V = 128. A window is the inputs of min(T, 3) ancestors and the row's own.

    Stages of one tile: v's, q's and k's inputs of the windows' ancestors, oldest first, up to OWN, the rows' own up to
    GATE, the gate z, the keys from KEYS on up to DELTAS, and the deltas.
    """

    H: int
    HV: int
    T: int
    NW: int
    RING: int
    DS: int
    """Stages of a delta row: two when it is fp32."""

    def __post_init__(self):
        put = object.__setattr__
        put(self, "BW", 8 * self.NW)
        put(self, "HK", self.H * 128)
        put(self, "HVV", self.HV * 128)
        put(self, "C", 2 * self.HK + self.HVV)
        put(self, "PAST", min(self.T, 3))
        put(self, "OWN", 3 * self.PAST)
        put(self, "GATE", self.OWN + 3)
        put(self, "KEYS", self.GATE + 1)
        put(self, "DELTAS", self.KEYS + self.T)
        put(self, "STAGES", self.DELTAS + self.T * self.DS)
        put(self, "REACH", (self.RING + self.STAGES - 1) // self.STAGES)


@gluon.constexpr_function
def layer_geometry(H, HV, T, NW, RING, DS):
    return LayerGeometry(H, HV, T, NW, RING, DS)


@gluon.constexpr_function
def warp_bases(NW):
    return {4: [[8, 0], [16, 0]], 8: [[8, 0], [16, 0], [32, 0]]}[NW]


@gluon.constexpr_function
def piece_layout(NW):
    """Thread (row, c): columns 32 i + 8 c + (0..7), four pieces of 16 bytes."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=warp_bases(NW),
        block_bases=[],
        shape=[8 * NW, 128],
    )


@gluon.constexpr_function
def line_layout(NW):
    """Thread (row, c): column c of four, the row of piece_layout."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=warp_bases(NW),
        block_bases=[],
        shape=[8 * NW, 4],
    )


@gluon.constexpr_function
def half_copy_layout(NW):
    """Half of an fp32 row, 64 columns, as it is copied: thread (row, c) has columns 16 i + 4 c + (0..3)."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], [0, 32]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=warp_bases(NW),
        block_bases=[],
        shape=[8 * NW, 64],
    )


@gluon.constexpr_function
def half_piece_layout(NW):
    """The same half as it is read: two of piece_layout's four pieces."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=warp_bases(NW),
        block_bases=[],
        shape=[8 * NW, 64],
    )


@gluon.constexpr_function
def operand_layout(NW):
    """Thread (row, c): columns 8 b + 2 c + (0, 1), the tensor core's operand fragment."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16], [0, 32], [0, 64]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=warp_bases(NW),
        block_bases=[],
        shape=[8 * NW, 128],
    )


@gluon.constexpr_function
def conv_layout(NW):
    """Thread: 8 channels of 4 of its warp's rows; eight lanes read the 128 bytes of two rows that lie together."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [2, 0], [4, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [0, 32], [0, 64]],
        warp_bases=warp_bases(NW),
        block_bases=[],
        shape=[8 * NW, 128],
    )


@gluon.constexpr_function
def row_image(NW):
    """[warp][i][row][c ^ row / 2][8]: the 64 bytes that four threads copy of a row stay together, or the copy engine
    splits them and fetches sectors twice; and neither copies, nor ldmatrix (8 rows of one piece), nor 16-byte reads
    conflict in a bank."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 0], [2, 8], [4, 16], [0, 32], [0, 64]]
    return gl.SharedLinearLayout(bases + warp_bases(NW))


@gluon.constexpr_function
def half_image(NW):
    """row_image for fp32."""
    bases = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 4], [4, 8], [0, 16], [0, 32]]
    return gl.SharedLinearLayout(bases + warp_bases(NW))


@gluon.constexpr_function
def dots_layout(NW):
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[NW, 1, 1], instr_shape=[1, 16, 8])
