"""Programs written for FSDP2 train through `tessera.compat.fsdp2`, with the numbers of one process."""

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_optimizer_state_dict, get_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict, set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tessera
from tessera.compat.fsdp2 import (CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, UnshardHandle, fully_shard,
                                  register_fsdp_forward_method, share_comm_ctx)

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False)
WIDTH, ROWS = 9, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 13)
        self.down = nn.Linear(13, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, a tied parameter, one that is not used, a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(0.5))

    def embed(self, tokens):
        return self.embedding(tokens) * self.scale

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net():
    torch.manual_seed(3)
    return Net()


def tokens_of(step, rank):
    return torch.randint(11, (ROWS, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, -2).float(), tokens.flatten())


def shard(net, **options):
    """As users of FSDP2 do: block by block, then the root."""
    for block in net.blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def mean_gradients(net, step, micro=1):
    """Sets the gradients that the ranks would have: of each rank its sum, then the mean."""
    sums = []
    for rank in range(tessera.size()):
        net.zero_grad()
        for i in range(micro):
            loss_of(net, tokens_of(step * micro + i, rank)).backward()
        sums.append([None if param.grad is None else param.grad for param in net.parameters()])
    for param, *grads in zip(net.parameters(), *sums):
        param.grad = None if grads[0] is None else functools.reduce(torch.add, grads) * (1 / len(grads))


def train(net, optimizer, steps, micro=1, begin=0):
    for step in range(begin, begin + steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for i in range(micro):
            net.set_requires_gradient_sync(i == micro - 1)
            loss_of(net, tokens_of(step * micro + i, tessera.rank())).backward()
        optimizer.step()


def train_alone(net, optimizer, steps, micro=1, begin=0):
    for step in range(begin, begin + steps):
        mean_gradients(net, step, micro)
        optimizer.step()


def assert_equal(net, plain, exact=True):
    state, expected = net.state_dict(), plain.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        if exact:
            assert torch.equal(state[name], value), (name, (state[name] - value).abs().max())
        else:
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


def _join():
    """Joins by torch.distributed, as FSDP2's users do."""
    dist.init_process_group("gloo")
    tessera.init()


def _shards(net, how):
    if how == "root":
        return fully_shard(net)
    if how == "lists":
        fully_shard([net.blocks[0], net.blocks[1]])
        fully_shard([net.embedding, net.head])
        return fully_shard(net)
    if how == "deep":
        for block in net.blocks:
            fully_shard(block.up)
        return shard(net, reshard_after_forward=True)
    return shard(net, reshard_after_forward=False, shard_placement_fn=lambda param: None)


def _trains(how):
    _join()
    net, plain = make_net(), make_net()
    assert _shards(net, how) is net and isinstance(net, FSDPModule) and isinstance(net, Net)
    assert type(net).__name__ == "FSDPNet"
    optimizer, alone = ADAMW(net.parameters()), ADAMW(plain.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, alone)]
    for step in range(4):
        train(net, optimizer, 1, begin=step)
        mean_gradients(plain, step)
        for param, own in zip(net.parameters(), plain.parameters()):
            assert (param.grad is None) == (own.grad is None)
            assert own.grad is None or torch.equal(param.grad.full_tensor(), own.grad)
        alone.step()
        for scheduler in schedulers:
            scheduler.step()
    assert_equal(net, plain, exact=tessera.size() < 3)


@pytest.mark.parametrize("how", ["root", "lists", "deep", "kept"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_programs_train_as_one_process(ranks, size, how):
    ranks(size, _trains, how, joins=False)


def _accumulates():
    net, plain = shard(make_net()), make_net()
    optimizer, alone = ADAMW(net.parameters()), ADAMW(plain.parameters())
    train(net, optimizer, 3, micro=3)
    train_alone(plain, alone, 3, micro=3)
    assert_equal(net, plain)
    # Blocks that ask for it are reduced at once; the sums are those of other orders.
    optimizer.zero_grad()
    for i in range(2):
        net.set_requires_gradient_sync(i == 1, recurse=False)
        net.set_requires_all_reduce(i == 1)
        net.set_is_last_backward(i == 1)
        loss_of(net, tokens_of(50 + i, tessera.rank())).backward()
    mean_gradients(plain, 25, micro=2)
    for param, own in zip(net.parameters(), plain.parameters()):
        if own.grad is not None:
            torch.testing.assert_close(param.grad.full_tensor(), own.grad)
    # A step after backwards that sent nothing is an error.
    optimizer.zero_grad()
    net.set_requires_gradient_sync(False)
    loss_of(net, tokens_of(0, tessera.rank())).backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        optimizer.step()


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_accumulate(ranks, size):
    ranks(size, _accumulates)


def _computes_in(policy):
    # One process with a copy in the other dtype, and gradients that are sent in `reduce_dtype`.
    inner = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype)
    shard_net = lambda net: [fully_shard(block, mp_policy=inner) for block in net.blocks] and fully_shard(net, mp_policy=policy)
    net, master = shard_net(make_net()), make_net()
    lower = copy.deepcopy(master).to(policy.param_dtype)
    optimizer, alone = ADAMW(net.parameters()), ADAMW(master.parameters())
    for step in range(3):
        train(net, optimizer, 1, begin=step)
        sums = []
        for rank in range(tessera.size()):
            lower.zero_grad()
            loss_of(lower, tokens_of(step, rank)).backward()
            sums.append([None if it.grad is None else it.grad.float() for it in lower.parameters()])
        for param, low, *grads in zip(master.parameters(), lower.parameters(), *sums):
            param.grad = None if grads[0] is None else functools.reduce(torch.add, grads) * (1 / len(grads))
        alone.step()
        for param, low in zip(master.parameters(), lower.parameters()):
            low.data.copy_(param)
    assert {param.dtype for param in net.parameters()} == {policy.param_dtype}
    assert_equal(net, master)
    assert net(tokens_of(0, 0)).dtype == (policy.output_dtype or policy.param_dtype)
    # The digits of the masters are loaded, too.
    other = shard_net(make_net())
    other(tokens_of(0, 0))
    other.load_state_dict(net.state_dict())
    assert_equal(other, master)
    other.blocks[1].load_state_dict(make_net().blocks[1].state_dict())
    assert_equal(other.blocks[1], make_net().blocks[1])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(torch.bfloat16, torch.float32),
                                    MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)])
def test_mixed_precision_keeps_masters(ranks, size, policy):
    ranks(size, _computes_in, policy)


def _precision_of_each_module():
    seen = {}

    class Seen(Block):
        def forward(self, x):
            seen[id(self)] = (x.dtype, self.up.weight.dtype)
            return super().forward(x)

    torch.manual_seed(3)
    net = nn.Sequential(Seen(), Seen(), nn.Linear(WIDTH, 2))
    fully_shard(net[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32))
    fully_shard(net[1], mp_policy=MixedPrecisionPolicy(torch.float64, cast_forward_inputs=False, output_dtype=torch.float32))
    fully_shard(net)
    optimizer = ADAMW(net.parameters())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(RuntimeError):  # inputs were not converted
        net(torch.randn(ROWS, WIDTH))
    net.reset_iter_state()
    net[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    for step in range(2):
        optimizer.zero_grad()
        out = net(torch.randn(ROWS, WIDTH))
        assert out.dtype == torch.float32
        out.sum().backward()
        optimizer.step()
    assert seen == {id(net[0]): (torch.bfloat16, torch.bfloat16), id(net[1]): (torch.float64, torch.float64)}
    after = net.state_dict()
    assert all(not torch.equal(value, before[name]) for name, value in after.items())
    # One optimizer steps three models of the engine, and has one state.
    state = optimizer.state_dict()["state"]
    assert sorted(state) == list(range(len(after)))
    assert [state[i]["exp_avg"].shape for i in state] == [value.shape for value in after.values()]
    return {name: value.sum().item() for name, value in after.items()}


@pytest.mark.parametrize("size", [1, 2])
def test_modules_have_their_own_precision(ranks, size):
    results = ranks(size, _precision_of_each_module)
    assert all(result == results[0] for result in results)


def _ignores_and_freezes():
    net, plain = make_net(), make_net()
    for each in (net, plain):
        each.blocks[0].up.weight.requires_grad_(False)
    own = net.blocks[1].norm.weight
    with torch.no_grad():
        own.fill_(2.0 + tessera.rank())
    shard(net, ignored_params={own})
    optimizer = ADAMW(param for param in net.parameters() if param is not own)
    alone = ADAMW(plain.parameters())
    loss_of(net, tokens_of(0, 0)).backward()
    assert own.grad is not None and type(own) is nn.Parameter and own.eq(2.0 + tessera.rank()).all()
    optimizer.zero_grad()
    with torch.no_grad():
        own.fill_(1.0)
    plain.blocks[1].norm.weight.requires_grad_(False)
    train(net, optimizer, 2)
    train_alone(plain, alone, 2)
    assert_equal(net, plain)
    for each in (net, plain):
        each.blocks[0].up.weight.requires_grad_(True)
    train(net, optimizer, 2, begin=2)
    train_alone(plain, alone, 2, begin=2)
    assert_equal(net, plain)


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_can_be_ignored_and_frozen(ranks, size):
    ranks(size, _ignores_and_freezes)


def _mesh(shape, offload):
    _join()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape):])
    net, plain = shard(make_net(), mesh=mesh, **({"offload_policy": CPUOffloadPolicy()} if offload else {})), make_net()
    optimizer, alone = ADAMW(net.parameters()), ADAMW(plain.parameters())
    train(net, optimizer, 2, micro=2)
    train_alone(plain, alone, 2, micro=2)
    assert_equal(net, plain, exact=tessera.size() < 3)


@pytest.mark.parametrize("size, shape", [(1, (1,)), (2, (2,)), (2, (2, 1)), (2, (1, 2)), (4, (2, 2))])
@pytest.mark.parametrize("offload", [False, True])
def test_meshes_and_offload(ranks, size, shape, offload):
    ranks(size, _mesh, shape, offload, joins=False)


def _optimizer_has_the_whole_state(make):
    net, plain = shard(make_net()), make_net()
    optimizer, alone = make(net.parameters()), make(plain.parameters())
    train(net, optimizer, 2)
    train_alone(plain, alone, 2)
    state, expected = optimizer.state_dict(), copy.deepcopy(alone.state_dict())
    assert state["param_groups"] == expected["param_groups"]
    torch.testing.assert_close(state["state"], expected["state"], rtol=0, atol=0)
    assert set(optimizer.state) <= set(net.parameters())
    # Into another optimizer, before its first step and after it.
    for late in (False, True):
        other = shard(make_net())
        second = make(other.parameters())
        if late:
            train(other, second, 1)
        other.load_state_dict(net.state_dict())
        second.load_state_dict(state)
        if late:
            torch.testing.assert_close(second.state_dict(), expected, rtol=0, atol=0)
        train(other, second, 1, begin=2)
        if not late:
            train_alone(plain, alone, 1, begin=2)
        assert_equal(other, plain)


@pytest.mark.parametrize("make", [ADAMW, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
                                  functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True, foreach=False)])
def test_optimizer_state_is_whole(ranks, make):
    ranks(2, _optimizer_has_the_whole_state, make)


def _state_on_every_rank(kind, options):
    _join()
    net, plain = shard(make_net()), make_net()
    net.unused.requires_grad_(False)
    optimizer, alone = (getattr(torch.optim, kind)(it.parameters(), lr=1e-2, **options) for it in (net, plain))
    for step in range(6):
        train(net, optimizer, 1, begin=step)
        train_alone(plain, alone, 1, begin=step)
        for param, own in zip(net.parameters(), plain.parameters()):
            assert (param in optimizer.state) == (own in alone.state)
            if own in alone.state:
                assert optimizer.state[param].keys() == alone.state[own].keys()
                for name, value in alone.state[own].items():
                    assert value.dim() or torch.equal(optimizer.state[param][name], value), (step, name)
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
        if step == 4:
            set_optimizer_state_dict(net, optimizer, get_optimizer_state_dict(net, optimizer))
    assert_equal(net, plain, exact=False)
    return min(state["exp_avg"].numel() for state in optimizer.state.values())


@pytest.mark.parametrize("kind, options", [("AdamW", {"fused": True}), ("AdamW", {"foreach": True}), ("NAdam", {})])
def test_state_is_on_every_rank(ranks, kind, options):
    assert 0 in ranks(3, _state_on_every_rank, kind, options, joins=False)


class _CountsSteps(torch.optim.AdamW):
    elementwise = True
    count = 0

    def step(self, closure=None):
        self.__class__.count += len(self.param_groups) > 0
        return super().step(closure)


def _plain_optimizers_step():
    net, plain = shard(make_net()), make_net()
    extra, plain_extra = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    optimizers = [kind([{"params": [*it.blocks.parameters()]}, {"params": [one], "lr": 0.1}], lr=1e-2, foreach=False)
                  for kind, it, one in ((_CountsSteps, net, extra), (torch.optim.AdamW, plain, plain_extra))]
    optimizer, alone = optimizers
    seen = []
    optimizer.register_step_pre_hook(
        lambda it, args, kwargs: seen.append(sum(len(group["params"]) for group in it.param_groups)))
    optimizer.register_step_post_hook(lambda it, args, kwargs: seen.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net, tokens_of(0, tessera.rank())) + extra * 0.1
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.dim() == 0 and seen == [len([*net.blocks.parameters()]) + 1, "after"]
    mean_gradients(plain, 0)
    plain_extra.grad = extra.grad.clone()
    alone.step()
    assert_equal(net, plain)
    # Parameters that come later.
    optimizer.add_param_group({"params": [net.embedding.weight], "lr": 0.05})
    alone.add_param_group({"params": [plain.embedding.weight], "lr": 0.05})
    optimizer.param_groups[0]["lr"] = alone.param_groups[0]["lr"] = 0.02
    closure()
    optimizer.step()
    mean_gradients(plain, 0)
    plain_extra.grad = extra.grad.clone()
    alone.step()
    assert_equal(net, plain)
    assert torch.equal(extra, plain_extra) and _CountsSteps.count > 0
    state = optimizer.state_dict()
    assert sorted(state["state"]) == sorted(alone.state_dict()["state"])
    with pytest.raises(Exception, match="LBFGS"):
        torch.optim.LBFGS(net.parameters()).step(closure)
    optimizer.zero_grad()
    optimizer.step()  # no gradients, nothing to do, as in PyTorch
    outside = torch.optim.SGD([plain_extra], lr=1.0)
    plain_extra.grad = torch.ones(())
    before = plain_extra.item()
    outside.step()  # one without sharded parameters is left alone
    assert plain_extra.item() == before - 1


def test_plain_optimizers_step(ranks):
    ranks(2, _plain_optimizers_step)


def _steps_in_backward(late):
    net, plain = shard(make_net()), make_net()
    if late:
        net(tokens_of(0, 0))
    optimizers = {param: ADAMW([param]) for param in net.parameters()}
    called = []

    def step(param):
        assert param.grad is not None and param.grad.full_tensor().shape == param.shape
        optimizers[param].step()
        optimizers[param].zero_grad()
        called.append(param)

    handles = [param.register_post_accumulate_grad_hook(step) for param in net.parameters()]
    alone = ADAMW(plain.parameters())
    for i in range(3):
        loss_of(net, tokens_of(i, tessera.rank())).backward()
    train_alone(plain, alone, 3)
    assert_equal(net, plain)
    assert len(called) == 3 * (len(handles) - 1)  # one is not used
    for handle in handles:
        handle.remove()
    loss_of(net, tokens_of(3, tessera.rank())).backward()
    assert len(called) == 3 * (len(handles) - 1) and net.head.weight.grad is not None


@pytest.mark.parametrize("size, late", [(1, False), (2, False), (2, True)])
def test_optimizers_step_in_backward(ranks, size, late):
    ranks(size, _steps_in_backward, late)


def _clips_and_scales():
    net, plain = shard(make_net()), make_net()
    optimizer, alone = ADAMW(net.parameters()), ADAMW(plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, tokens_of(step, tessera.rank()))).backward()
        if step == 1 and tessera.rank() == tessera.size() - 1:
            net.head.weight.grad.to_local()[:1] = float("inf")  # on one rank alone
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            mean_gradients(plain, step)
            assert torch.equal(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
            alone.step()
    assert_equal(net, plain)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_clipped_and_scaled(ranks, size):
    ranks(size, _clips_and_scales)


def _unshards():
    net, plain = shard(make_net()), make_net()
    assert net.unshard() is None
    assert torch.equal(net.blocks[0].up.weight.detach(), plain.blocks[0].up.weight)
    assert torch.from_numpy(net.blocks[0].up.weight.detach().numpy()).equal(plain.blocks[0].up.weight.detach())
    net.reshard()
    handle = net.blocks[1].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle)
    handle.wait()
    handle.wait()
    optimizer, alone = ADAMW(net.parameters()), ADAMW(plain.parameters())
    train(net, optimizer, 1)
    net.set_reshard_after_forward(False)
    train(net, optimizer, 2, begin=1)
    net.set_reshard_after_forward(True)
    net.blocks[0].set_reshard_after_backward(False)
    net.set_modules_to_forward_prefetch([net.blocks[0]])
    net.blocks[1].set_modules_to_backward_prefetch([net.blocks[0]])
    share_comm_ctx([net])
    train(net, optimizer, 1, begin=3)
    train_alone(plain, alone, 4)
    assert_equal(net, plain)


@pytest.mark.parametrize("size", [1, 2])
def test_unshard_and_reshard(ranks, size):
    ranks(size, _unshards)


def _divides():
    net, plain = shard(make_net()), make_net()
    for block in net.blocks:
        block.set_gradient_divide_factor(4.0)
    loss_of(net, tokens_of(0, tessera.rank())).backward()
    net.set_gradient_divide_factor(0.5)
    net.zero_grad()
    loss_of(net, tokens_of(0, tessera.rank())).backward()
    mean_gradients(plain, 0)
    for (name, param), own in zip(net.named_parameters(), plain.parameters()):
        factor = tessera.size() / (4.0 if name.startswith("blocks") else 0.5)
        assert own.grad is None or torch.equal(param.grad.full_tensor(), own.grad * factor), name
    with pytest.raises(ValueError, match="positive"):
        net.set_gradient_divide_factor(0)


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_are_divided_by_a_factor(ranks, size):
    ranks(size, _divides)


def _methods():
    net = make_net()
    fully_shard(net.blocks[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(net, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    register_fsdp_forward_method(net, "embed")
    assert net.embed(tokens_of(0, 0)).dtype == torch.float64
    register_fsdp_forward_method(make_net(), "anything")  # is not sharded
    with pytest.raises(ValueError, match="no method missing"):
        register_fsdp_forward_method(net, "missing")


def test_methods_besides_forward(ranks):
    ranks(2, _methods)


def _meta():
    with torch.device("meta"):
        net = Net()
    shard(net)
    with pytest.raises(RuntimeError, match="'unused' is on the device 'meta'"):
        net(tokens_of(0, 0))
    net.to_empty(device="cpu")
    net.head.weight = net.embedding.weight
    net.load_state_dict(make_net().state_dict())
    net.double()
    plain = make_net().double()
    optimizer, alone = ADAMW(net.parameters()), ADAMW(plain.parameters())
    train(net, optimizer, 2)
    train_alone(plain, alone, 2)
    assert_equal(net, plain)
    net.to("cpu")
    with pytest.raises(RuntimeError, match="before its first forward"):
        net.float()


@pytest.mark.parametrize("size", [1, 2])
def test_models_from_the_meta_device(ranks, size):
    ranks(size, _meta)


def _whole_values(as_rows):
    # Before the first use, from rank 0's values, or from rows as another model's.
    _join()
    with torch.device("meta"):
        net = Net()
    shard(net)
    if as_rows:
        mesh = init_device_mesh("cpu", (tessera.size(),))
        net.load_state_dict({name: value if name == "scale" else distribute_tensor(value, mesh, [Shard(0)])
                             for name, value in make_net().state_dict().items()}, assign=True)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(net, make_net().state_dict() if tessera.rank() == 0 else {}, options=options)
    net.head.weight = net.embedding.weight
    plain = make_net()
    optimizer, alone = ADAMW(net.parameters()), ADAMW(plain.parameters())
    train(net, optimizer, 2)
    train_alone(plain, alone, 2)
    assert_equal(net, plain)


@pytest.mark.parametrize("as_rows", [False, True])
def test_models_from_the_meta_device_get_values_of_torch_checkpoints(ranks, as_rows):
    ranks(2, _whole_values, as_rows, joins=False)


def _loads():
    net = shard(make_net())
    net(tokens_of(0, 0))
    state = make_net().state_dict()
    state["unused"] = torch.ones(4)
    with pytest.raises(RuntimeError):
        net.load_state_dict(state)
    if tessera.rank() == 0:
        state["unused"] = torch.ones(3)
    with pytest.raises(RuntimeError, match="size mismatch" if tessera.rank() else "another rank" if tessera.size() > 1 else ""):
        net.load_state_dict(state)
        raise RuntimeError("loaded")
    with pytest.raises(ValueError, match="assign=True"):
        net.load_state_dict(make_net().state_dict(), assign=True)
    assert_equal(net, make_net())
    result = net.load_state_dict({"scale": torch.tensor(2.0)}, strict=False)
    assert net.scale == 2.0 and "unused" in result.missing_keys


@pytest.mark.parametrize("size", [1, 2])
def test_a_wrong_state_dict_is_refused_on_all_ranks(ranks, size):
    ranks(size, _loads)


def _for_checkpoints(call, late=False, **options):
    net = make_net()
    net.unused.requires_grad_(False)  # PyTorch can't load state of a parameter that was never used
    for block in net.blocks:
        call(block, **options)
    call(net)
    if late:
        net(tokens_of(0, 0))
    return net, ADAMW(net.parameters())


def _trains_on(net, optimizer):
    train(net, optimizer, 2, begin=2)
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in net.state_dict().items()}


def _saves(folder, call):
    _join()
    net, optimizer = _for_checkpoints(call)
    train(net, optimizer, 2)
    model, state = get_state_dict(net, optimizer)
    tensors = [value for values in (model, *state["state"].values()) for value in values.values() if value.dim()]
    assert len(tensors) > 30
    assert all(isinstance(value, DTensor) and value.to_local().numel() < value.numel() for value in tensors)
    dcp.save({"model": model, "optim": state}, checkpoint_id=folder)
    return _trains_on(net, optimizer)


def _continues(folder, call, late):
    _join()
    net, optimizer = _for_checkpoints(call, late)
    model, state = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optim": state}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
    return _trains_on(net, optimizer)


@pytest.mark.parametrize("saves, continues, late", [
    (fully_shard, fully_shard, False), (torch_fsdp.fully_shard, fully_shard, False),
    (torch_fsdp.fully_shard, fully_shard, True), (fully_shard, torch_fsdp.fully_shard, False)])
def test_torch_checkpoints_have_rows(ranks, tmp_path, saves, continues, late):
    expected = ranks(2, _saves, tmp_path, saves, joins=False)[0]
    state = ranks(2, _continues, tmp_path, continues, late, joins=False)[0]
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def _checkpoint_options(options, shape):
    # Of two models of the engine, into a model that is in use and one that is not, with an ignored parameter.
    _join()
    policy = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)}
    if shape:
        policy["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    net, optimizer = _for_checkpoints(fully_shard, **policy)
    train(net, optimizer, 2)
    model, state = get_state_dict(net, optimizer, options=options)
    assert model["blocks.0.up.weight"].dtype == torch.float32
    if options.cpu_offload and dist.get_rank():
        assert not model and not state
    expected = _trains_on(net, optimizer)
    for late in (False, True):
        other, other_optimizer = _for_checkpoints(fully_shard, late, **policy)
        set_state_dict(other, other_optimizer, model_state_dict=dict(model), optim_state_dict=copy.deepcopy(state),
                       options=options)
        for name, value in _trains_on(other, other_optimizer).items():
            assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("options", [
    StateDictOptions(), StateDictOptions(full_state_dict=True), StateDictOptions(flatten_optimizer_state_dict=True),
    StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)])
@pytest.mark.parametrize("shape", [None, (1, 2)])
def test_options_of_torch_checkpoints(ranks, options, shape):
    ranks(2, _checkpoint_options, options, shape, joins=False)


def _refuses():
    net = make_net()
    for wrong, error in ((3, TypeError), (net.blocks, ValueError)):
        with pytest.raises(error, match="fully_shard"):
            fully_shard(wrong)
    for options, error, words in (
            ({"mesh": 3}, ValueError, "DeviceMesh"), ({"reshard_after_forward": 3}, ValueError, "factor of 2"),
            ({"reshard_after_forward": "no"}, ValueError, "bool"), ({"dp_mesh_dims": 1}, NotImplementedError, "mesh_dim"),
            ({"shard_placement_fn": lambda param: 1}, NotImplementedError, "None or a Shard")):
        with pytest.raises(error, match=words):
            fully_shard(net, **options)
    assert type(net) is Net
    inner = fully_shard(net.blocks[0])
    with pytest.raises(ValueError, match="already"):
        fully_shard(inner)
    for call in (net.blocks[0].set_custom_all_gather, net.blocks[0].set_all_reduce_hook):
        with pytest.raises(NotImplementedError, match="collectives"):
            call(None)
    with pytest.raises(ValueError, match="got Linear"):
        inner.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match="bool"):
        inner.set_reshard_after_forward(1)
    inner(torch.randn(2, WIDTH))
    with pytest.raises(ValueError, match="before the first forward"):
        fully_shard(net)
    for broken in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RuntimeError, match="state_dict"):
            broken(inner)
    with pytest.raises(ValueError, match="positive"):
        inner.set_reduce_scatter_max_input_buffers(0)
    plain = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert type(plain[:1]) is nn.Sequential
    assert fully_shard(nn.ReLU())(torch.ones(1)) == 1  # nothing to shard


def test_what_can_not_be_is_refused(ranks):
    ranks(2, _refuses)


def _half_sharded():
    net = make_net()
    fully_shard(net.blocks[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(net)
    net.blocks[0].up.weight = nn.Parameter(torch.ones(13, WIDTH + tessera.rank()))  # the first model is right
    for error in ("blocks.0.up.weight", "earlier error"):
        with pytest.raises(Exception, match=error):
            net(tokens_of(0, 0))
    whole = fully_shard(nn.Linear(2 + tessera.rank(), 2))
    for _ in range(2):
        with pytest.raises(ValueError, match="weight"):
            whole(torch.ones(1, 2 + tessera.rank()))


def test_models_that_differ_between_ranks_are_refused(ranks):
    ranks(2, _half_sharded)


def _with_ddp():
    _join()
    net = make_net()
    fully_shard(net.blocks[0])
    outer = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    with pytest.raises(RuntimeError, match="leave it out"):
        outer(tokens_of(0, 0))
    net, plain = make_net(), make_net()
    for block in net.blocks:
        fully_shard(block)
    replicate(net, find_unused_parameters=True)  # the rest
    optimizer, alone = ADAMW(net.parameters()), ADAMW(plain.parameters())
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, tokens_of(step, tessera.rank())).backward()
        optimizer.step()
    for param in (plain.unused,):
        param.requires_grad_(False)
    train_alone(plain, alone, 2)
    assert_equal(net, plain, exact=False)


def test_ddp_around_it_is_refused_and_replicate_leaves_it_out(ranks):
    ranks(2, _with_ddp, joins=False)


def test_all_methods_of_fsdp2_exist():
    methods = {name for name in vars(torch_fsdp.FSDPModule) if not name.startswith("_")}
    assert not methods - set(dir(FSDPModule))
