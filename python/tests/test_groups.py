"""Parameters that fewer ranks share than the rest: `groups` of a plan, as ranks of Tessera and of torch.distributed."""
import pytest
import torch
import torch.distributed as dist
from torch import nn

import tessera


def _train(theirs):
    if theirs:
        dist.init_process_group("gloo")
        beside = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tessera.init()
    rank = tessera.rank()
    group = beside[rank % 2] if theirs else tessera.new_group([0, 2] if rank % 2 == 0 else [1, 3])
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with torch.no_grad():
        for parameter in model[1].parameters():
            parameter.add_(rank % 2)  # ranks 0 and 2 have one expert, 1 and 3 another
    alone = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    alone.load_state_dict(model.state_dict())
    sharded = tessera.fully_shard(model, groups=[("1.*", group)])
    optimizer = tessera.ShardedOptimizer(sharded, torch.optim.SGD(model.parameters(), lr=0.5))
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for _ in range(2):
        optimizer.zero_grad()
        sharded(batches[rank]).square().sum().backward()
        optimizer.step()
    # The gradient of an expert has the terms of its ranks, and is divided by the number of all.
    whole = [alone, nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))]
    whole[1].load_state_dict(alone.state_dict())
    with torch.no_grad():
        for parameter in whole[1][1].parameters():
            parameter.add_(1 - 2 * (rank % 2))
    for _ in range(2):
        for each in whole:
            each.zero_grad()
        for number, batch in enumerate(batches):
            (whole[(number - rank) % 2](batch).square().sum() / 4).backward()
        shared = [a.grad + b.grad for a, b in zip(whole[0][0].parameters(), whole[1][0].parameters())]
        with torch.no_grad():
            for each in whole:
                for parameter, grad in zip(each[0].parameters(), shared):
                    parameter.sub_(0.5 * grad)
                for parameter in each[1].parameters():
                    parameter.sub_(0.5 * parameter.grad)
    with sharded.keep_unsharded():
        for name, parameter in model.named_parameters():
            # Sums of four terms in another order.
            torch.testing.assert_close(parameter.detach(), alone.get_parameter(name).detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(NotImplementedError, match="'1.weight' is an ordinary tensor of each process group"):
        tessera.save_checkpoint("never", sharded)
    if theirs:
        dist.destroy_process_group()


@pytest.mark.parametrize("theirs", [False, True])
def test_expert_gradients_have_the_terms_of_their_ranks(ranks, theirs):
    ranks(4, _train, theirs, joins=False)


def _refuse():
    with pytest.raises(TypeError, match="a process group must be one of Tessera's or of torch.distributed"):
        tessera.fully_shard(nn.Linear(2, 2), groups=[("weight", 3)])
    with pytest.raises(ValueError, match="plan.groups: 'w' fits no parameter"):
        tessera.fully_shard(nn.Linear(2, 2), groups=[("w", None)])


def test_rules_that_do_not_fit_are_refused(ranks):
    ranks(2, _refuse)
