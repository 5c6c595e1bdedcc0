"""`parallelize` on a Llama as Paddle's tests plan it: data and tensor parallel, stages, sequences, LoRA, tied embeddings."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tessera
from tessera.paddle import (ColWiseParallel, PrepareLayerInput, ProcessMesh, Replicate, RowWiseParallel, SequenceParallelBegin,
                            SequenceParallelDisable, SequenceParallelEnable, SequenceParallelEnd, Shard, SplitPoint, parallelize, reshard,
                            set_mesh, shard_dataloader, shard_layer, shard_optimizer, shard_tensor, unshard_dtensor)

R, S0, S1 = Replicate(), Shard(0), Shard(1)
VOCABULARY, HIDDEN, HEADS, LENGTH = 24, 16, 4, 6
DTYPE = torch.float64


class Lora(nn.Linear):
    def __init__(self, ins, outs, bias=False, rank=2):
        super().__init__(ins, outs, bias, dtype=DTYPE)
        self.weight.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, ins, dtype=DTYPE) / 4)
        self.lora_B = nn.Parameter(torch.randn(outs, rank, dtype=DTYPE) / 4)

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.lora_A), self.lora_B)


class Attention(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (linear(HIDDEN, HIDDEN, True) for _ in range(3))
        self.o_proj = linear(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = (each(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, 24), linear(HIDDEN, 24)
        self.down_proj = linear(24, HIDDEN)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.self_attn, self.mlp = Attention(linear), Mlp(linear)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(HIDDEN, dtype=DTYPE) for _ in range(2))

    def forward(self, x, scale=None):
        x = x if scale is None else x * scale
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Scale(nn.Module):
    """What all layers use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.linspace(0.5, 1, LENGTH, dtype=DTYPE).view(-1, 1))
        self.weight = nn.Parameter(torch.ones(1, dtype=DTYPE))

    def forward(self):
        return self.steps * self.weight


class Llama(nn.Module):
    def __init__(self, kind):
        super().__init__()
        linear = Lora if kind == "lora" else lambda ins, outs, bias=False: nn.Linear(ins, outs, bias, dtype=DTYPE)
        self.scale = Scale() if kind == "scaled" else None
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN, dtype=DTYPE)
        self.position_embedding = nn.Embedding(LENGTH, HIDDEN, dtype=DTYPE) if kind == "positions" else None
        self.layers = nn.ModuleList(Layer(linear) for _ in range(2))
        self.norm = nn.RMSNorm(HIDDEN, dtype=DTYPE)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=DTYPE)
        if kind == "tied":
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(torch.arange(LENGTH).expand(tokens.shape))
        scale = {} if self.scale is None else {"scale": self.scale()}
        for layer in self.layers:
            x = layer(x, **scale)
        return self.lm_head(self.norm(x))


_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def _plan(kind):
    plan = {f"layers.*.{name}": ColWiseParallel() for name in _COLUMNS}
    plan.update({f"layers.*.{name}": RowWiseParallel() for name in _ROWS})
    plan.update({"embed_tokens": ColWiseParallel(gather_output=True), "lm_head.weight": ColWiseParallel()})
    if kind == "gathered":
        plan.update({f"layers.*.{name}": ColWiseParallel(gather_output=True) for name in _COLUMNS[:3]})
        plan["layers.*.self_attn.o_proj"] = RowWiseParallel(is_input_parallel=False)
    elif kind == "positions":
        plan["position_embedding"] = ColWiseParallel(gather_output=True)
    elif kind == "lora":
        plan.update({f"layers.*.{name}.lora_B": ColWiseParallel() for name in _COLUMNS})
        plan.update({f"layers.*.{name}.lora_A": RowWiseParallel() for name in _ROWS})
    elif kind == "sequence":
        plan.update({"embed_tokens": [ColWiseParallel(), SequenceParallelBegin()],
                     "layers.*.self_attn": SequenceParallelDisable(),
                     "layers.*.mlp": SequenceParallelDisable(need_transpose=False), "lm_head": SequenceParallelEnd()})
    elif kind == "norms":
        plan.update({f"layers.*.{name}": SequenceParallelEnable() for name in ("input_layernorm", "post_attention_layernorm")})
        plan["norm"] = SequenceParallelEnable()
    elif kind == "prepared":
        plan["norm"] = PrepareLayerInput(lambda mesh: lambda layer, inputs: (inputs[0] * 1,))
    return plan


def _make(kind):
    torch.manual_seed(12)
    model = Llama(kind)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1 and parameter.requires_grad]
    rest = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return model, torch.optim.AdamW([{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=0.01)


def _train(model, optimizer, batches, whole=lambda tensor: tensor):
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    losses = []
    for step, (tokens, labels) in enumerate(batches):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / 2
        loss.backward()
        losses.append(float(whole(loss.detach())))
        if step % 2:  # of two batches
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def _batches(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (2, 4, LENGTH), generator=generator).unbind() for _ in range(count)]


def _expect_parameters_of(alone, model):
    for name, parameter in alone.named_parameters():
        have = model.get_parameter(name)
        assert parameter.requires_grad == have.requires_grad
        if have.process_mesh.contains(tessera.rank()):
            torch.testing.assert_close(unshard_dtensor(have).detach(), parameter.detach(), rtol=1e-8, atol=1e-11,
                                       msg=lambda text: f"{name}: {text}")


def _llama(kind, shape, level):
    batches = _batches(6)
    alone, optimizer = _make(kind)
    want = _train(alone, optimizer, batches)
    mesh = ProcessMesh(torch.arange(tessera.size()).view(shape), ["dp", "mp"])
    set_mesh(mesh)
    model, optimizer = parallelize(*_make(kind), config={"dp_config": {"sharding_level": level}, "pp_config": None,
                                                         "mp_config": {"parallelize_plan": _plan(kind)}})
    for name, parameter in model.named_parameters():
        layer, _, key = name.rpartition(".")
        cut = None
        if layer.endswith(_COLUMNS):
            cut = None if key == "lora_A" else S0
        elif layer.endswith(_ROWS):
            cut = None if key == "lora_B" else S1
        elif layer.endswith("position_embedding") or layer == "embed_tokens" and kind != "tied":
            cut = S1
        elif layer == "lm_head":
            cut = S0
        if kind != "tied" or layer not in ("embed_tokens", "lm_head"):
            assert parameter.placements == [R, cut or R], name
    losses = _train(model, optimizer, shard_dataloader(batches, mesh, shard_dims="dp"), unshard_dtensor)
    # Sums of below 1000 float64 terms in another order, through six updates.
    torch.testing.assert_close(losses, want, rtol=1e-10, atol=0)
    _expect_parameters_of(alone, model)
    return True


@pytest.mark.parametrize("kind, shape, level", [
    *(("plain", shape, level) for shape, level in (((1, 1), 0), ((1, 2), 0), ((2, 1), 0), ((2, 1), 1), ((2, 2), 1), ((2, 2), 2),
                                                   ((2, 2), 3), ((1, 4), 0), ((2, 4), 0))),
    *((kind, (2, 2), 0) for kind in ("gathered", "positions", "tied", "sequence", "norms", "prepared")),
    ("lora", (1, 2), 0), ("lora", (2, 2), 1), ("sequence", (1, 2), 1), ("sequence", (1, 3), 0)])
def test_llama(ranks, kind, shape, level):
    assert all(ranks(shape[0] * shape[1], _llama, kind, shape, level))


def _stages(shape):
    """The first layer on one mesh, and the second on the next."""
    batches = _batches(4)
    alone, optimizer = _make("plain")
    want = _train(alone, optimizer, batches)
    world = ProcessMesh(torch.arange(tessera.size()).view(2, *shape), ["pp", "dp", "mp"])

    def place(name, layer, mesh):
        mesh = world[0 if name in ("embed_tokens",) or name.startswith("layers.0") else 1]
        cut = S1 if name.endswith(_ROWS) or name == "embed_tokens" else S0 if name.endswith((*_COLUMNS, "lm_head")) else R
        for key, parameter in layer._parameters.items():
            if parameter is not None:
                setattr(layer, key, shard_tensor(parameter, mesh, [R, cut]))

    model, optimizer = _make("plain")
    shard_layer(model, world, place)
    model.layers[1].register_forward_pre_hook(lambda _, inputs: reshard(inputs[0], world[1], [S0, R]))
    loader = shard_dataloader(batches, [world[0], world[1]], shard_dims="dp")
    member = world[1].contains(tessera.rank())
    losses = _train(model, shard_optimizer(optimizer), loader, lambda loss: unshard_dtensor(loss) if member else 0)
    if member:
        torch.testing.assert_close(losses, want, rtol=1e-10, atol=0)
    _expect_parameters_of(alone, model)
    return True


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2)])
def test_llama_of_two_stages(ranks, shape):
    assert all(ranks(2 * shape[0] * shape[1], _stages, shape))


def _pipelined(kind, shape, level, pp_config):
    """The stages that `parallelize` makes."""
    batches = _batches(4)
    alone, optimizer = _make(kind)
    want = _train(alone, optimizer, batches)
    mesh = ProcessMesh(torch.arange(tessera.size()).view(2, *shape), ["pp", "dp", "mp"])
    model, optimizer = parallelize(*_make(kind), mesh, {"dp_config": {"sharding_level": level}, "pp_config": pp_config,
                                                        "mp_config": {"parallelize_plan": _plan(kind)}})
    for name, tensor in model.state_dict().items():
        assert tensor.process_mesh == mesh[int(name.startswith(("layers.1", "norm", "lm_head")))], name
    loader = shard_dataloader(batches, [mesh[0], mesh[1]], shard_dims="dp")
    member = mesh[1].contains(tessera.rank())
    averages = [tensor.placements[0] for name, tensor in optimizer.state_dict().items() if name.endswith("exp_avg")]
    assert averages and (not level or set(averages) == {S0})
    losses = _train(model, optimizer, loader, lambda loss: unshard_dtensor(loss) if member else 0)
    if member:
        torch.testing.assert_close(losses, want, rtol=1e-10, atol=0)
    _expect_parameters_of(alone, model)
    return True


@pytest.mark.parametrize("kind, shape, level, pp_config", [
    *(("plain", shape, level, {"split_spec": "layers"}) for shape, level in (((1, 1), 0), ((1, 2), 0), ((2, 1), 1), ((2, 2), 1))),
    ("plain", (2, 1), 0, {"split_spec": ["layers"]}), ("sequence", (1, 2), 0, {"split_spec": {"layers.0": SplitPoint.END}}),
    ("lora", (1, 2), 0, {"split_spec": {"layers.1": SplitPoint.BEGINNING}}),
    *(("scaled", shape, 0, {"split_spec": "layers", "global_spec": "scale"}) for shape in ((1, 1), (2, 2)))])
def test_llama_in_stages(ranks, kind, shape, level, pp_config):
    assert all(ranks(2 * shape[0] * shape[1], _pipelined, kind, shape, level, pp_config))


def _refused_stages():
    mesh = ProcessMesh([[0], [1]], ["pp", "mp"])

    def refused(match, kind="plain", **config):
        with pytest.raises(ValueError, match=match):
            parallelize(Llama(kind), mesh=mesh, config={"pp_config": config})

    refused("2 equal ranges; got 0 layers", split_spec="blocks")
    refused("'layers.7' is none of", split_spec={"layers.7": SplitPoint.END})
    refused("'scales' is none of", split_spec="layers", global_spec=["scales"])
    refused("which is the last layer", split_spec={"lm_head": SplitPoint.END})
    refused("1 besides the first; got", split_spec={"layers.0": SplitPoint.END, "layers.1": SplitPoint.END})
    refused("global_spec needs a split_spec of prefixes", split_spec={"layers.0": SplitPoint.END}, global_spec="norm")
    refused("global_spec needs a split_spec; got none", global_spec="norm")
    refused("is not a valid SplitPoint", split_spec={"layers.0": "END"})
    refused("'lm_head.weight' is 'embed_tokens.weight' of another", "tied", split_spec="layers")
    with pytest.raises(NotImplementedError, match="0 or 1; got 2"):
        parallelize(Llama("plain"), mesh=mesh, config={"pp_config": {"split_spec": "layers"}, "dp_config": {"sharding_level": 2}})
    model, _ = parallelize(Llama("plain"), mesh=mesh, config={"pp_config": {}})
    assert all(tensor.process_mesh == mesh for tensor in model.state_dict().values())  # no stages
    return True


def test_stages_that_cannot_be(ranks):
    assert all(ranks(2, _refused_stages))


def _bytes():
    """A range of [sequence, batch, ...] that is not transposed stays cut along the sequence."""
    mesh = ProcessMesh([[0, 1]], ["dp", "mp"])
    plan = SequenceParallelBegin(need_transpose=False)
    assert plan.on_output(torch.zeros(6, 4, 2), mesh, 1).placements == [R, S0]
    rows = ProcessMesh([[0], [1]], ["dp", "mp"])
    for cut, want in ((S0, [S0, S1]), (S1, [S1, S0])):
        assert plan.on_output(tessera.distribute(torch.zeros(6, 4, 2), rows, [cut, R]), rows, 1).placements == want
    with pytest.raises(ValueError, match="a layer or a parameter; 'layers.0.mlp.up_proj.lora_C' matches none"):
        parallelize(Llama("lora"), mesh=mesh, config={"mp_config": {"parallelize_plan": {
            "layers.0.mlp.up_proj.lora_C": ColWiseParallel()}}})
    return True


def test_sequences_without_transposition(ranks):
    assert all(ranks(2, _bytes))
