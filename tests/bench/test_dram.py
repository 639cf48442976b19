"""The reading of Nsight Compute's table."""

from __future__ import annotations

from bench.dram import read_counters

TABLE = """==PROF== Connected to process 1
12 rows of other output
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_sectors_op_write.sum"
"","","byte","byte","sector"
"9","void at::native::reduce_kernel","9,999","77","7"
"0","gated_delta_replay_hopper_kernel","1,000","10","2"
"1","gated_delta_replay_hopper_kernel","2,000","20","3"
"2","void at::native::reduce_kernel","9,999","300","7"
"3","void at::native::reduce_kernel","9,999","1","7"
"4","gated_delta_replay_hopper_kernel","500","5","1"
"5","void at::native::reduce_kernel","9,999","50","7"
"""


def test_bytes_of_each_arm() -> None:
    """What is written behind an arm's calls was left by them; what is read there was not."""
    first, second = read_counters(TABLE)
    assert first == {"calls": 2, "read": 3000, "written": 331, "stored": 160}
    assert second == {"calls": 1, "read": 500, "written": 55, "stored": 32}
