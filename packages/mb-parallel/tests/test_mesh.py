"""ParallelDims: what it accepts, what its errors say, and which ranks share a group."""

import pytest
import torch.distributed as dist
from mb_parallel import ParallelDims, any_rank, distributed
from mb_parallel.testing import run_ranks


def test_one_process_needs_no_mesh():
    dims = ParallelDims()
    assert dims.world_size == 1
    assert dims.build_mesh("cpu") is None
    assert dims.build_expert_mesh("cpu") is None
    assert any_rank(True)
    assert not any_rank(False)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"dp": 0}, "dp to be an integer of at least 1, got 0"),
        ({"tp": 2.0}, "tp to be an integer of at least 1, got 2.0"),
        ({"dp": 2, "tp": 3, "ep": 4}, "ep = 4 and dp * tp = 2 * 3 = 6"),
    ],
    ids=["zero", "float", "ep-does-not-divide"],
)
def test_bad_sizes_are_named(sizes, says):
    with pytest.raises(ValueError, match=says.replace("*", r"\*")):
        ParallelDims(**sizes)


def test_product_must_be_the_number_of_ranks():
    with pytest.raises(ValueError, match=r"number of ranks, 1, got 2 \* 1 \* 3 = 6"):
        ParallelDims(dp=2, pp=3).build_mesh("cpu")


def test_for_world_gives_the_rest_to_data_parallel():
    assert ParallelDims.for_world(12, tp=2, pp=3, ep=4) == ParallelDims(dp=2, tp=2, pp=3, ep=4)
    with pytest.raises(ValueError, match=r"tp \* pp = 5 \* 1 = 5 on 12 ranks"):
        ParallelDims.for_world(12, tp=5)


def _inside(rank, world_size):
    with distributed("cpu") as device:
        assert device.type == "cpu"
    return dist.get_world_size()


def test_a_group_that_is_there_is_used_and_not_left():
    assert run_ranks(_inside, 2) == [2, 2]


def _groups(rank, world_size):
    dims = ParallelDims(dp=2, tp=2, ep=2)
    dense, expert = dims.build_mesh("cpu"), dims.build_expert_mesh("cpu")
    return {
        name: dist.get_process_group_ranks(mesh[name].get_group())
        for mesh in (dense, expert)
        for name in mesh.mesh_dim_names
    } | {"last": any_rank(rank == world_size - 1), "none": any_rank(False)}


def test_groups_of_four_ranks():
    first, *_, last = run_ranks(_groups, 4)
    assert first == {
        "pp": [0], "dp": [0, 2], "tp": [0, 1], "edp": [0, 2], "ep": [0, 1],
        "last": True, "none": False,
    }  # fmt: skip
    assert last["dp"] == [1, 3]
    assert last["tp"] == [2, 3]
