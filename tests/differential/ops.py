"""The operators of which random programs are made: templates of a statement, whose fields `Draw` (drawing.py) fills in.

`{x}` stands for any tensor of floating or complex numbers, `{r}` for a real one, `{c}` for a complex one, `{m}` for one with
a dim at least, `{M}` for one with two; `{k}` for one of integers, `{q}` for one of truth values. Related to the first of
these: `{y}` broadcasts to it, `{l}` has its sizes, `{d}` is one of its dims, `{D}` another or the same, `{n}` the size of dim
`{d}`, `{i}` an index in it, `{I}` integers that index it. `{w}` may be written to. `{a}` is a number; `{f}` is a dtype.
`{...:4,3}` asks for a new tensor of these sizes, where `n` is the size of the first one's last dim.
"""

UNARY = """exp tanh sigmoid sin cos neg abs square reciprocal sgn erf expm1 atan sinh floor round trunc sign relu rad2deg
isfinite logical_not clone detach contiguous conj resolve_conj positive nan_to_num sinc asinh angle""".split()

ELEMENTWISE = [f"{{x}}.{name}()" for name in UNARY] + """
({r}.square() + 1).sqrt()
({r}.square() + 1).log()
({r}.square() + 1).rsqrt()
{r}.square().log1p()
F.gelu({r})
F.gelu({r}, approximate="tanh")
F.silu({r})
F.softplus({r})
F.elu({r})
F.leaky_relu({r}, 0.25)
F.hardtanh({r})
F.hardswish({r})
F.mish({r})
F.logsigmoid({r})
F.threshold({r}, 0.5, -1.0)
F.glu(torch.cat([{m}, {m}], -1), -1)
{r}.clamp(-1, 0.5)
{r}.clamp(min={y})
{x}.pow(2)
{x}.pow(3)
{x} + {y}
{x} - {y}
{x} * {y}
{x} * {y}
{x} / ({y}.abs() + 1)
torch.add({x}, {y}, alpha=2)
torch.rsub({x}, {y})
{a} - {x}
{a} * {x}
{x} + {a}
torch.lerp({x}, {l}, 0.25)
torch.addcmul({x}, {y}, {y}, value=0.5)
torch.addcdiv({x}, {y}, {l}.abs() + 1)
torch.where({q}, {x}, {y})
torch.where({x} == {l}, {x}, {l})
torch.maximum({r}, {y})
torch.minimum({r}, {y})
torch.fmod({r}, 0.75)
torch.remainder({r}, 0.75)
torch.hypot({r}, {y})
torch.atan2({r}, {y}.abs() + 1)
{r} > {y}
{r} <= {a}
{x} == {y}
{x}.masked_fill({q}, {a})
torch.logical_and({q}, {q})
{x}.to({f})
{k} + 1
{k} * {x}
torch.zeros_like({x})
torch.full_like({x}, {a})
""".strip().splitlines()

REDUCTIONS = """
{x}.sum()
{m}.sum({d})
{m}.sum({d}, keepdim=True)
{x}.mean()
{m}.mean({d})
{m}.mean({d}, keepdim=True)
{M}.sum((0, -1))
{M}.mean((0, 1))
{r}.amax()
{m}.amax({d})
{m}.amin({d}, keepdim=True)
{m}.max({d})[0]
{m}.min({d}).values
{r}.max()
{m}.prod({d})
{x}.prod()
{m}.var({d})
{m}.std({d}, keepdim=True, correction=0)
torch.var_mean({m}, {d})[0]
{x}.norm()
{m}.norm(1, {d})
torch.linalg.vector_norm({m}, float("inf"), {d})
torch.linalg.vector_norm({x}, 3)
{m}.logsumexp({d})
{m}.cumsum({d})
{m}.cumprod({d})
{m}.logcumsumexp({d})
{m}.cummax({d})[0]
{m}.argmax({d})
{m}.sort({d})[0]
{m}.topk(1, {d})[0]
{m}.contiguous().median({d})[0]
{m}.kthvalue(1, {d}).values
{m}.nansum({d})
({m} > 0).any({d})
({m} > 0).all()
({m} != 0).sum({d})
torch.count_nonzero({x})
{m}.diff(dim={d})
torch.renorm({M}, 2, 0, 1.5)
""".strip().splitlines()

VIEWS = """
{M}.t()
{M}.mT
{M}.transpose({d}, {D})
{m}.movedim({d}, {D})
{M}.permute({perm})
{x}.reshape(-1)
{x}.reshape({shape})
{x}.reshape({shape})
{M}.flatten(0, 1)
{M}.flatten(-2)
{x}.unsqueeze(0)
{x}.unsqueeze(-1)
{x}.squeeze()
{x}.expand({expand})
{m}.select({d}, {i})
{m}[{i0}]
{m}.narrow({d}, 0, {half})
{m}[::2]
{m}[..., 1:]
{m}[..., None, :]
{m}.chunk(2, {d})[0]
{m}.chunk(3, {d})[-1]
{m}.split(2, {d})[0]
{m}.split(2, {d})[-1]
{m}.tensor_split(2, {d})[1]
{m}.unbind({d})[-1]
{M}.diagonal()
{m}.flip({d})
{m}.roll(1, {d})
{x}.roll(2)
{m}.repeat_interleave(2, {d})
{m}.tile(2)
{M}.tril()
{M}.triu(1)
F.pad({m}, (1, 2))
F.pad({M}, (0, 1, 1, 0), value=0.5)
{m}.unfold({d}, 2, 1)
torch.diag_embed({m})
{x}.expand_as({l})
{M}.rot90()
""".strip().splitlines()

PRODUCTS = """
{M} @ {x:n,4}
{m} @ {x:n}
{M}.mT @ {l}
{x:3,4} @ {x:4,5}
{x:5,4} @ {x:4,2}
torch.bmm({x:3,2,4}, {x:3,4,5})
F.linear({m}, {x:3,n}, {x:3})
F.linear({m}, {x:4,n})
F.linear({M}, {x:6,n}, {x:6})
torch.addmm({x:5}, {x:3,4}, {x:4,5})
torch.addmm({x:3,5}, {x:3,4}, {x:4,5}, beta=0.5)
torch.baddbmm({x:2,3,2}, {x:2,3,4}, {x:2,4,2})
torch.einsum("...i,ij->...j", {m}, {x:n,3})
torch.einsum("bij,bjk->bik", {x:2,3,4}, {x:2,4,3})
torch.einsum("bhid,bhjd->bhij", {x:2,2,3,4}, {x:2,2,3,4})
torch.einsum("ij,ij->", {M}.flatten(0, -2), {M}.flatten(0, -2))
torch.outer({x:5}, {x:3})
torch.mv({x:5,4}, {x:4})
torch.dot({x:7}, {x:7})
torch.tensordot({x:3,4,2}, {x:4,2,5}, 2)
F.scaled_dot_product_attention({r:2,2,4,3}, {r:2,2,4,3}, {r:2,2,4,3})
F.scaled_dot_product_attention({r:2,2,4,3}, {r:2,2,4,3}, {r:2,2,4,3}, is_causal=True)
F.conv1d({r:2,3,7}, {r:4,3,3}, {r:4}, padding=1)
F.conv2d({r:2,2,5,4}, {r:3,2,3,3})
F.avg_pool1d({r:2,3,6}, 2)
F.max_pool1d({r:2,3,6}, 2)
F.interpolate({r:2,3,4}, scale_factor=2.0)
torch.cdist({r:3,4}, {r:5,4})
""".strip().splitlines()

NORMS = """
F.softmax({m}, {d})
F.softmax({m}, -1)
F.log_softmax({m}, {d})
F.layer_norm({m}, [{last}])
F.layer_norm({m}, [{last}], {r:n}, {r:n})
F.layer_norm({M}, [{last}], {r:n}, {r:n})
F.layer_norm({r:4,6,5}, [5], {r:5}, {r:5})
F.rms_norm({m}, [{last}], {r:n})
F.group_norm({r:2,4,3}, 2, {r:4}, {r:4})
F.batch_norm({r:6,3}, None, None, {r:3}, {r:3}, training=True)
F.normalize({m}, dim={d})
F.instance_norm({r:2,3,5})
F.local_response_norm({r:2,4,3}, 2)
""".strip().splitlines()

LOSSES = """
F.mse_loss({r}, {l}{reduce})
F.l1_loss({r}, {l}{reduce})
F.smooth_l1_loss({r}, {l}{reduce})
F.huber_loss({r}, {l}{reduce})
F.binary_cross_entropy_with_logits({r}, {l}.sigmoid().detach(){reduce})
F.cross_entropy({r:5,4}, {k:5<4}{reduce})
F.cross_entropy({r:3,4,2}, {k:3,2<4}{reduce})
F.cross_entropy({r:5,4}, {k:5<4}, ignore_index=1)
F.cross_entropy({r:5,4}, {k:5<4}, {r:4}.abs(){reduce})
F.cross_entropy({r:5,4}, {k:5<4}, label_smoothing=0.25{reduce})
F.nll_loss({r:6,3}, {k:6<3}{reduce})
F.kl_div({r}, {l}.sigmoid(){reduce})
F.cosine_similarity({m}, {l}, {d})
F.margin_ranking_loss({r:5}, {r:5}, {r:5}.sign())
""".strip().splitlines()

INDEXING = """
F.embedding({k:3,2<5}, {x:5,4})
F.embedding({k:6<5}, {x:5,4}, padding_idx=1)
F.embedding_bag({k:3,2<5}, {r:5,4})
{m}.index_select({d}, {I})
{m}[{I0}]
{m}[..., {In}]
{M}[{I0}, 0]
{m}.gather({d}, {ksame})
{m}.scatter({d}, {ksame}, {a})
{m}.scatter({d}, {ksame}, {l})
{m}.scatter_add({d}, {ksame}, {l})
{m}.scatter_reduce({d}, {ksame}, {l}, "amax")
{m}.index_add({d}, {iota}, {l})
{m}.index_fill({d}, {I}, {a})
{m}.index_copy({d}, {iota}, {l})
{m}.index_put([{I0}], {x:1}, accumulate=True)
torch.take_along_dim({m}, {m}.argsort({d}), {d})
{x}[{q}]
{x}.masked_select({q})
{x}.take({k:4<1})
F.one_hot({k:5<4}, 4)
torch.bincount({k:5<4}, minlength=4)
torch.searchsorted({r:5}.sort()[0], {r:3})
""".strip().splitlines()

JOINING = """
torch.cat([{m}, {l}], {d})
torch.cat([{m}, {m}, {l}], {d})
torch.stack([{x}, {l}])
torch.stack([{m}, {l}], -1)
torch.cat([{m}.narrow({d}, 0, 1), {l}], {d})
torch.hstack([{m}, {l}])
torch.block_diag({x:2,3}, {x:3,1})
torch.cartesian_prod({x:2}, {x:3})
sum(torch.meshgrid({x:2}, {x:3}, indexing="ij"))
""".strip().splitlines()

COMPLEX = """
{c}.conj()
{c}.imag
{c}.real
{c} * {c}.conj()
{c} @ {l}.mH
{c}.mH
{c}.abs()
{c}.angle()
torch.view_as_real({c})
torch.view_as_real({c}.resolve_conj())
torch.view_as_complex({r:3,4,2})
torch.complex({r}, {l}.real)
torch.polar({r}.abs(), {l}.real)
({c} * 1j).imag
{c}.conj().imag
{c}.conj().resolve_conj()
torch.fft.fft({m}, dim={d})
torch.fft.rfft({r:5,4}, dim=0)
""".strip().splitlines()

# Statements without a result.
WRITES = """
{w}.mul_({y})
{w}.add_({y}, alpha=0.5)
{w}.sub_({a})
{w}.div_({y}.abs() + 1)
{w}.copy_({y})
{w}.zero_()
{w}.relu_()
{w}.clamp_(-1, 1)
{w}.masked_fill_({q}, {a})
{w}.addcmul_({y}, {y})
{w}[{i0}] = {a}
{w}[..., 1:] = {a}
{w}[{i0}].mul_(2)
{w}.narrow({d}, 0, 1).add_(1)
{w}.t().mul_(2)
{w}.transpose({d}, {D}).add_({a})
{w}.view(-1)[::2].zero_()
{w}.diagonal().fill_({a})
{w}.flatten().neg_()
{w}.unsqueeze(0).add_({a})
{w}.index_fill_({d}, {I}, {a})
{w}.index_add_({d}, {iota}, {l})
{w}.index_copy_({d}, {iota}, {l})
{w}.scatter_({d}, {ksame}, {a})
{w}[{q}] = {a}
{w}.cumsum_({d})
{w}.tril_()
{w}.data.mul_(2)
{w}.data[{i0}] = {a}
{w}.detach().add_({a})
{w}.data = {l}.data * 2
{w}.real.add_({a})
{w}.t_()
{w}.unsqueeze_(0)
{w}.squeeze_()
{w}.transpose_({d}, {D})
{w}.copy_({w}.flip(0))
{w}.fill_({a})
{w}.requires_grad_()
torch.add({x}, {y}, out={w})
torch.mul({w}, {y}, out={w})
torch.exp({w}, out={w})
torch.sum({m}, {d}, out={w})
torch._foreach_mul_([{w}, {w}], 0.5)
torch._foreach_add_([{w}], [{l}])
""".strip().splitlines()

RANDOM = """
F.dropout({x}, 0.5)
torch.rand_like({r})
torch.randn_like({x})
torch.bernoulli({r}.sigmoid().detach())
""".strip().splitlines()

FAMILIES = {"elementwise": (ELEMENTWISE, 20), "reduction": (REDUCTIONS, 12), "view": (VIEWS, 14), "product": (PRODUCTS, 9),
            "norm": (NORMS, 6), "loss": (LOSSES, 5), "indexing": (INDEXING, 8), "joining": (JOINING, 5),
            "complex": (COMPLEX, 5), "write": (WRITES, 8), "random": (RANDOM, 2)}


def needs_numbers(template: str) -> bool:
    """True where a number of a tensor, or of nonzero elements, decides what is computed, also in a backward."""
    return any(name in template for name in ("[{q}]", "masked_select", "one_hot", "bincount", "prod(", ".max()"))
