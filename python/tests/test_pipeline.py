"""Pipelines: parity with one process that accumulates the same micro-batches; stages that are sharded; failures."""

import random

import pytest
import torch
from ranks import run_ranks
from torch import nn

import tessera


def some_model(stages):
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(stages)])


def cut(model):
    return tessera.cut_stages(model, [[str(stage)] for stage in range(len(model))])


def loss_of(out, target):
    return (out - target).square().mean()


def batch():
    torch.manual_seed(2)
    return torch.randn(9, 6), torch.randn(9, 6)


def accumulated(model, count):
    x, y = batch()
    total = 0
    for rows, target in zip(x.tensor_split(count), y.tensor_split(count)):
        loss = loss_of(model(rows), target) * (len(rows) / len(x))
        loss.backward()
        total = total + loss.detach()
    return total


def has_bits_of_one_process(kind, places, count, stages_per_place=1):
    schedule = tessera.pipeline_schedule(kind, places, count, stages_per_place)
    model, plain = (some_model(places * stages_per_place) for _ in range(2))
    meshes = tessera.stage_meshes(tessera.DeviceMesh.over_world([places], ["pp"]), "pp")
    pipeline = tessera.Pipeline(cut(model), schedule, meshes, loss=loss_of)
    x, y = batch()
    assert torch.equal(pipeline.step(x, targets=y), accumulated(plain, count))
    mine = {stage for _, stage, _ in schedule[tessera.rank()]}
    for name, parameter in model.named_parameters():
        expected = plain.get_parameter(name).grad if int(name.split(".")[0]) in mine else None
        assert torch.equal(parameter.grad, expected) if expected is not None else parameter.grad is None, name
    assert pipeline.counts == tessera.check_schedule(schedule)[tessera.rank()]
    out = pipeline.forward(x)
    assert len(out) == (len(model) - 1 in mine) and all(torch.allclose(each, plain(x), atol=1e-6) for each in out)


@pytest.mark.parametrize("transport", ["arena", "gloo"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pipelines_have_the_bits_of_one_process(ranks, transport):
    def fn():
        for kind in ("gpipe", "1f1b", "zero_bubble"):
            has_bits_of_one_process(kind, ranks, 4)
        has_bits_of_one_process("interleaved", ranks, 2 * ranks, 2)

    run_ranks(ranks, fn, transport=transport)


def test_stages_are_functions_modules_and_handles():
    def fn():
        mesh = tessera.DeviceMesh.over_world([2, 2], ["pp", "dp"])
        model, plain = some_model(2), some_model(2)
        stages = cut(model)
        place, line = mesh.coordinate
        stages[place] = tessera.fully_shard(stages[place], group=mesh.process_group(1))
        if place == 1:
            stages[0] = None
        meshes = tessera.stage_meshes(mesh)
        x, y = batch()
        loss_of(plain(x[:8]), y[:8]).backward()
        pipeline = tessera.Pipeline(stages, tessera.pipeline_schedule("zero_bubble", 2, 2), meshes, loss=loss_of)
        rows = slice(4 * line, 4 * line + 4)
        pipeline.step(x[rows], targets=y[rows])
        for name, parameter in stages[place].module.named_parameters():
            assert torch.allclose(stages[place].full_grad(parameter), plain.get_parameter(name).grad, atol=1e-6), name

        seen = []

        def last(a, b):
            seen.append(len(a))
            return (a * b).mean()

        pipeline = tessera.Pipeline([lambda x: (x, x > 0), last], tessera.pipeline_schedule("1f1b", 2, 3), meshes)
        pipeline.step(x)
        assert seen == ([3, 3, 3] if place == 1 else [])

    run_ranks(4, fn)


def test_tied_parameters_get_the_sum_of_their_gradients():
    def fn():
        def make():
            model = some_model(3)
            model[2][0].weight = model[0][0].weight
            return model

        model, plain = make(), make()
        accumulated(plain, 3)
        stages = tessera.cut_stages(model, [["0"], ["1"], ["2"]])
        assert [list(stage.tied) for stage in stages] == [["0.0.weight"], [], ["0.0.weight"]]
        meshes = tessera.stage_meshes(tessera.DeviceMesh.over_world([3], ["pp"]))
        x, y = batch()
        tessera.Pipeline(stages, tessera.pipeline_schedule("1f1b", 3, 3), meshes, loss=loss_of).step(x, targets=y)
        for name, parameter in stages[tessera.rank()].named_parameters():
            assert torch.allclose(parameter.grad, plain.get_parameter(name).grad, atol=1e-6), name

    run_ranks(3, fn)


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("the backward fails")


def test_a_failure_is_one_on_all_ranks():
    def fn():
        meshes = tessera.stage_meshes(tessera.DeviceMesh.over_world([2], ["pp"]))
        x, y = batch()

        def fails(x):
            raise ZeroDivisionError("the forward fails")

        for wrong, what in ((fails, "the forward fails"), (Wrong.apply, "the backward fails"), (lambda x: 3, "got int")):
            for failing in range(2):
                stages = cut(some_model(2))
                stages[failing] = nn.Sequential(stages[failing])
                stages[failing].forward = lambda x, inner=stages[failing][0]: wrong(inner(x))
                pipeline = tessera.Pipeline(stages, tessera.pipeline_schedule("1f1b", 2, 3), meshes, loss=loss_of)
                with pytest.raises(Exception, match=what) as raised:
                    pipeline.step(x, targets=y)
                assert (raised.type in (ZeroDivisionError, TypeError)) == (tessera.rank() == failing), raised

    run_ranks(2, fn)


def test_a_checkpoint_loads_at_another_number_of_stages(tmp_path):
    def fn():
        mesh = tessera.DeviceMesh.over_world([2, 2], ["pp", "dp"])
        place = mesh.coordinate[0]
        four = cut(some_model(4))
        meshes = [tessera.DeviceMesh([rank], ["dp"]) for rank in range(4)]
        rank = tessera.rank()
        stage = tessera.fully_shard(four[rank], group=meshes[rank].process_group(0))
        optimizer = tessera.ShardedOptimizer(stage, torch.optim.AdamW(stage.parameters(), lr=0.01))
        pipeline = tessera.Pipeline([stage if number == rank else None for number in range(4)],
                                    tessera.pipeline_schedule("1f1b", 4, 3), meshes, loss=loss_of)
        x, y = batch()
        pipeline.step(x, targets=y)
        optimizer.step()
        tessera.save_checkpoint(tmp_path / f"stage{rank}", stage, optimizer)
        expected = {name: value.clone() for name, value in stage.full_state().items()}
        pipeline.forward(x)  # all have saved

        torch.manual_seed(5)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        two = tessera.cut_stages(model, [["0", "1"], ["2", "3"]])
        stage = tessera.fully_shard(two[place], group=mesh.process_group(1))
        optimizer = tessera.ShardedOptimizer(stage, torch.optim.AdamW(stage.parameters(), lr=0.01))
        missing = [set(tessera.load_checkpoint(tmp_path / f"stage{number}", stage, optimizer, allow_missing=True,
                                               allow_unexpected=True).missing) for number in range(4)]
        assert not set.intersection(*missing)
        return place, {name: value.clone() for name, value in stage.full_state().items()}, expected

    results = run_ranks(4, fn)
    saved = {name: value for *_, state in results for name, value in state.items()}
    for _, loaded, _ in results:
        assert len(loaded) == 4 and all(torch.equal(value, saved[name]) for name, value in loaded.items())


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="kind must be one of gpipe"):
        tessera.pipeline_schedule("gpipes", 2, 2)
    with pytest.raises(ValueError, match="and 2 stages"):
        tessera.pipeline_schedule("1f1b", 2, 2, 2)
    with pytest.raises(ValueError, match="multiple of the 2 places"):
        tessera.pipeline_schedule("interleaved", 2, 3, 2)
    with pytest.raises(ValueError, match="1 at least"):
        tessera.pipeline_schedule("gpipe", 2, 0)
    with pytest.raises(ValueError, match=r"\[check_schedule\]"):
        tessera.check_schedule([[("F", 0, 0)]])
    assert tessera.check_schedule([[("F", 0, 0), ("B", 0, 0)]]) == [{"ticks": 3, "busy": 3, "peak_in_flight": 1}]
    model = some_model(2)
    for names in ([["0"], ["5"]], [["0"], ["0", "1"]], [["0", "0.1"], ["1"]], [["0", "1"], []]):
        with pytest.raises(ValueError, match=r"\[cut_stages\] each stage must have names"):
            tessera.cut_stages(model, names)
    with pytest.raises(ValueError, match="got none for .'1.0.weight', '1.0.bias'"):
        tessera.cut_stages(model, [["0"]])
    deep = tessera.cut_stages(model, [["0.0", "0.1"], ["1"]])
    assert [name for name, _ in deep[0].named_parameters()] == ["0.0.weight", "0.0.bias"]
    x = torch.randn(3, 6)
    assert torch.equal(deep[1](*deep[0](x)) if isinstance(deep[0](x), tuple) else deep[1](deep[0](x)), model(x))


def random_schedule(draw, places, stages, count):
    """Actions in any order that is possible, of stages at any places; the backwards of a stage in order."""
    where = [*range(places), *(draw.randrange(places) for _ in range(stages - places))]
    draw.shuffle(where)
    whole = [draw.random() < 0.5 for _ in range(stages)]
    left = [(part, stage, m) for stage in range(stages) for m in range(count) for part in ("FB" if whole[stage] else "FIW")]
    done, schedule = set(), [[] for _ in range(places)]

    def is_ready(action):
        part, stage, m = action
        if part == "F":
            return stage == 0 or ("F", stage - 1, m) in done
        if part == "W":
            return ("I", stage, m) in done and (m == 0 or ("W", stage, m - 1) in done)
        return (("F", stage, m) in done and (m == 0 or (part, stage, m - 1) in done)
                and (stage == stages - 1 or any((each, stage + 1, m) in done for each in "BI")))

    while left:
        action = draw.choice([each for each in left if is_ready(each)])
        left.remove(action)
        done.add(action)
        schedule[where[action[1]]].append(action)
    return schedule


@pytest.mark.parametrize("transport", ["arena", "gloo"])
def test_schedules_of_any_order_have_the_bits_of_one_process(transport):
    def fn():
        meshes = tessera.stage_meshes(tessera.DeviceMesh.over_world())
        for seed in range(20):
            draw = random.Random(seed)
            stages, count = 3 + draw.randrange(3), 1 + draw.randrange(5)
            schedule = random_schedule(draw, 3, stages, count)
            model, plain = some_model(stages), some_model(stages)
            x, y = batch()
            pipeline = tessera.Pipeline(cut(model), schedule, meshes, loss=loss_of)
            assert torch.equal(pipeline.step(x, targets=y), accumulated(plain, count)), seed
            for stage in {stage for _, stage, _ in schedule[tessera.rank()]}:
                for own, expected in zip(model[stage].parameters(), plain[stage].parameters()):
                    assert torch.equal(own.grad, expected.grad), (seed, stage)
            assert pipeline.counts == tessera.check_schedule(schedule)[tessera.rank()], seed

    run_ranks(3, fn, transport=transport)
