"""Reshard: all pairs of placements, on one mesh and between meshes, and the mesh itself."""

import itertools

import pytest
import torch

import tessera
from tessera.paddle import (Partial, ProcessMesh, ReduceType, Replicate, Shard, dtensor_from_fn, dtensor_from_local, dtensor_to_local,
                            reshard, shard_tensor, unshard_dtensor)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _values(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) - 5


def _part(value, mesh, placements, terms=False):
    """What this rank has of `value`; None on ranks outside of the mesh. `terms`: no term of a sum is zero."""
    at = (mesh.mesh == tessera.rank()).nonzero()
    if not len(at):
        return None
    for index, ranks, placement in zip(at[0].tolist(), mesh.shape, placements):
        if placement.is_shard():
            # Slices of equal size, of which the last may be smaller, or empty.
            size = -(-value.shape[placement.dim] // ranks)
            begin = min(index * size, value.shape[placement.dim])
            value = value.narrow(placement.dim, begin, min(size, value.shape[placement.dim] - begin))
        elif placement.is_partial():
            other = torch.full_like(value, index * terms)
            value = other if index else value - terms * sum(range(ranks))
    return value


def _is_member(mesh):
    return tessera.rank() in mesh.process_ids


def _check(shape, source, placements, target, to):
    value, where = _values(*shape), (source.process_ids, placements, target.process_ids, to, shape)
    leaf = shard_tensor(value, source, placements, stop_gradient=False)
    if _is_member(source):
        assert torch.equal(dtensor_to_local(leaf).detach(), _part(value, source, placements)), where
    moved = reshard(leaf, target, to)
    assert moved.placements == list(to) and moved.process_mesh == target and moved.shape == value.shape, where
    assert leaf.placements == list(placements) and leaf.process_mesh == source, where
    if _is_member(target):
        # A sum may keep its terms, and the terms of shards are zeros around them; otherwise the first rank has the values.
        if all(each.is_replicated() for each in placements) or not any(each.is_partial() for each in to):
            assert torch.equal(dtensor_to_local(moved).detach(), _part(value, target, to)), where
        assert torch.equal(unshard_dtensor(moved).detach(), value), where
    # The gradient of the result, in other placements, comes back to the mesh of the tensor.
    cotangent = _values(*shape).flip(0) * 2
    moved.backward(shard_tensor(cotangent, target, [R] * target.ndim))
    assert leaf.grad.process_mesh == source, where
    if _is_member(source):
        assert torch.equal(unshard_dtensor(leaf.grad), cotangent), where
    # Sums of terms that no rank has alone.
    if any(placement.is_partial() for placement in placements) and source.ndim == 1:
        mine = _part(value, source, placements, terms=True) if _is_member(source) else torch.zeros(shape)
        summed = reshard(dtensor_from_local(mine, source, placements), target, [R] * target.ndim)
        if _is_member(target):
            assert torch.equal(dtensor_to_local(summed), value), where


def _one_mesh():
    ids = list(range(tessera.size()))
    mesh = ProcessMesh(ids, ["x"])
    for shape in ((10, 20), (6, 20), (5, 3), (1, 7), (6, 20, 10)):
        kinds = [R, P, *(Shard(dim) for dim in range(len(shape)))]
        for source, to in itertools.product(kinds, kinds):
            _check(shape, mesh, [source], mesh, [to])
            _check(shape, mesh, [source], ProcessMesh(ids[::-1], ["x"]), [to])
    return True


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_pairs_on_one_mesh(ranks, size):
    assert all(ranks(size, _one_mesh))


_KINDS = [R, P, S0, S1]
_MESHES = {
    "the other order": (2, [[0], [1]], [[1], [0]]),
    "one rank to the other": (2, [0], [1]),
    "halves": (4, [0, 1], [2, 3]),
    "overlapping": (4, [0, 1, 2], [2, 3, 1]),
    "a part": (4, [[0, 1], [2, 3]], [2, 1]),
    "more dims": (4, [3, 1], [[0, 1], [2, 3]]),
    "one mesh": (4, [[0, 1], [2, 3]], [[0, 1], [2, 3]]),
    "turned": (4, [[0, 1], [2, 3]], [[3, 1], [2, 0]]),
    "three": (3, [[0, 1, 2]], [2, 0]),
    "one": (1, [[0]], [0]),
}


def _pairs(source, target):
    source, target = ProcessMesh(source), ProcessMesh(target)
    for placements in itertools.product(_KINDS, repeat=source.ndim):
        for to in itertools.product(_KINDS, repeat=target.ndim):
            _check((7, 5), source, list(placements), target, list(to))
    return True


@pytest.mark.parametrize("name", _MESHES)
def test_all_pairs_between_meshes(ranks, name):
    size, source, target = _MESHES[name]
    assert all(ranks(size, _pairs, source, target))


def _eight():
    lower, upper = ProcessMesh([[0, 1], [2, 3]], ["x", "y"]), ProcessMesh([[4, 5], [6, 7]], ["x", "y"])
    kinds = [[P, P], [R, R], [S0, S1], [S1, S0], [P, S0], [R, S1], [S0, S0]]
    for placements, to in itertools.product(kinds, kinds):
        _check((20, 20), lower, placements, upper, to)
        _check((5, 3), upper, placements, lower, to)
    world = ProcessMesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ["pp", "dp", "mp"])
    for placements in itertools.product([R, P, S0], repeat=3):
        _check((9, 6), world, list(placements), world[0], [S0, R])
        _check((9, 6), world[1], [R, S1], world, list(placements))
    return True


def test_between_meshes_of_eight_ranks(ranks):
    assert all(ranks(8, _eight))


def _global(stages):
    mesh = ProcessMesh(torch.arange(tessera.size()).view(stages), ["pp", "dp", "mp"][:len(stages)])
    whole = shard_tensor(torch.ones(6, 8), mesh, [R] * mesh.ndim, stop_gradient=False)
    rest = [R] * (mesh.ndim - 1)
    first = reshard(whole, mesh[0], rest) + 1
    loss = (reshard(first, mesh[1], rest) + reshard(whole, mesh[1], rest)).sum()
    loss.backward()
    assert torch.equal(unshard_dtensor(whole.grad), torch.full((6, 8), 2.0))
    cut = shard_tensor(torch.ones(2, 6), mesh, [R, S0, R][:mesh.ndim])
    assert dtensor_to_local(cut).shape == (1, 6)
    return not _is_member(mesh[1]) or float(unshard_dtensor(loss)) == 144.0


@pytest.mark.parametrize("stages", [(2, 2), (2, 2, 2)])
def test_a_tensor_on_the_global_mesh_serves_two_stages(ranks, stages):
    assert all(ranks(torch.Size(stages).numel(), _global, stages))


def _co_shard():
    mesh, value = ProcessMesh([[0, 1], [2, 3]], ["x", "y"]), torch.arange(8).view(4, 2)
    rank, row, column = tessera.rank(), *mesh.coordinate
    local = lambda tensor: dtensor_to_local(tensor)
    both = shard_tensor(value, mesh, [S0, S0])
    assert torch.equal(local(both), value[rank:rank + 1])
    # The other order of the two cuts is that of the mesh's dims.
    turned = shard_tensor(value, mesh.get_mesh_with_dim("y"), [S0, S0])
    assert torch.equal(local(turned), value[2 * column + row:2 * column + row + 1])
    split = shard_tensor(value, mesh, [Shard(0, split_factor=2), R])
    assert torch.equal(local(split), value[row::2])
    for tensor in (both, turned, split):
        assert torch.equal(local(reshard(tensor, mesh, [R, R])), value)
        assert torch.equal(local(reshard(tensor, mesh, [S0, R])), value[2 * row:2 * row + 2])
        assert torch.equal(local(reshard(tensor, mesh, [R, S0])), value[2 * column:2 * column + 2])
    squares = shard_tensor(value, mesh, [S0, S1])
    moved = reshard(squares, mesh, [S0, S0])
    assert moved.placements == [S0, S0] and torch.equal(local(moved), value[rank:rank + 1])
    with tessera.StrictOperators():
        flat = torch.relu(both.float().reshape(-1))
    assert flat.placements == [S0, S0] and torch.equal(local(flat), value[rank].float())
    assert torch.equal(unshard_dtensor(squares.reshape(-1)), value.flatten())
    return True


def test_two_cuts_of_one_dim(ranks):
    assert all(ranks(4, _co_shard))


def _properties():
    mesh, plain = ProcessMesh([0, 1], ["x"]), torch.randn(10, 20).reshape(20, 10)
    tensor = shard_tensor(plain, mesh, [R])
    assert tensor.stride() == (10, 1) and tensor.is_contiguous() and tensor.contiguous().is_dist()
    assert not tensor.t().is_contiguous() and torch.equal(dtensor_to_local(tensor.t().contiguous()), plain.t())
    assert tensor.to("cpu", copy=True).placements == [R]
    changed = shard_tensor(plain.requires_grad_(), mesh, [S0], dtype=torch.float64, place="cpu", stop_gradient=True)
    assert changed.dtype == torch.float64 and not changed.requires_grad and changed.process_mesh == mesh
    made = dtensor_from_fn(torch.full, mesh, [S0], [16], 3.0)
    assert made.shape == (16,) and torch.equal(dtensor_to_local(made), torch.full((8,), 3.0))
    with pytest.raises(ValueError):
        dtensor_from_fn(torch.ones, mesh, [S0, S1], [2, 3])
    for bad in ([[0, 1], [2, 3]], None):
        with pytest.raises((TypeError, ValueError)):
            shard_tensor(plain, bad, [R])
    return True


def test_properties(ranks):
    assert all(ranks(2, _properties))


def test_placements_are_asked_for_their_kind():
    for placement, kind in ((Shard(1), "shard"), (R, "replicated"), (P, "partial")):
        for other in ("shard", "replicated", "partial"):
            assert getattr(placement, f"is_{other}")() == (kind == other)
    assert Shard(1).get_dim() == 1 and Shard(1).is_shard(1) and not Shard(1).is_shard(0)
    assert P.reduce_type() == ReduceType.kRedSum and Partial(ReduceType.kRedMax).reduce_type() == ReduceType.kRedMax
    assert {hash(Shard(1)), hash(R), hash(P)} == {hash(Shard(1)), hash(Replicate()), hash(Partial("sum"))}


def _lines(shape):
    names = ["pp", "dp", "mp"][-len(shape):]
    mesh = ProcessMesh(torch.arange(tessera.size()).view(shape), names)
    for dim, name in enumerate(names):
        line = mesh.get_submesh_with_dim(name)
        at = [slice(None) if each == dim else index for each, index in enumerate(mesh.coordinate)]
        assert line.process_ids == mesh.mesh[tuple(at)].tolist() and line.dim_names == [name] and line == mesh[name]
        group = mesh.get_group(name)
        assert group.size == len(line.process_ids) and group.rank == mesh.coordinate[dim]
        total = torch.tensor([float(tessera.rank())])
        group.all_reduce(total)
        assert total == sum(line.process_ids)
        first = mesh.get_mesh_with_dim(name)
        assert first.dim_names[0] == name and first[0] == mesh.get_mesh_with_dim(name, 0)
    only = ProcessMesh([0], ["x"])
    assert (only.get_submesh_with_dim("x") is None) == (tessera.rank() != 0)
    if tessera.rank() == 0:
        assert only.get_group().size == 1
    if len(shape) > 1:
        with pytest.raises(ValueError, match="dim_name must be one of"):
            mesh.get_group()
    for call in (mesh.get_group, mesh.get_submesh_with_dim, mesh.get_mesh_with_dim, mesh.get_dim_size):
        with pytest.raises(ValueError, match="middle"):
            call("middle")
    tensor = shard_tensor(torch.ones(4), mesh, [])
    assert tensor.process_mesh == mesh and tensor.process_mesh.dim_names == names
    assert tensor.process_mesh[0] == mesh[0] and tensor.process_mesh.get_dim_size(names[-1]) == shape[-1]
    return True


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2), (2, 2, 2)])
def test_lines_of_a_mesh(ranks, shape):
    assert all(ranks(torch.Size(shape).numel(), _lines, shape))
