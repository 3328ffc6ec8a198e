"""Draws of routing, losses, attention and optimizers: see test_fuzz.py.

Letters: T tokens, D hidden, F ffn width, E experts, K top-k, N rows, V vocabulary.
"""

import torch
from fuzz_dice import Dice, Draw, bins_of, wide
from mb_kernels import reference
from mb_kernels.exchange import pack_routing, unpack_routing


def permuted(dice: Dice) -> Draw:
    bins, weights = dice.routed()
    dice.hidden = dice.choice.choice((dice.hidden, dice.choice.randrange(1, 70)))
    what = dice.choice.choice(("gather", "combine", "both", "padded"))
    rows = bins["order"].shape[0]
    tensors = {"x": dice.normal(dice.tokens, dice.hidden)}
    if what == "combine":
        tensors = {"x": dice.normal(rows, dice.hidden)}
    if what != "gather":
        tensors["weights"] = weights

    def call(m, x, weights=None, **bins):
        found = bins_of(bins)
        if what == "padded":
            found = m.pad_bins(found)
        if what != "combine":
            x = m.gather(x, found, dice.top_k)
        return x if what == "gather" else m.combine(x, found, weights)

    return Draw(call, tensors | bins, tuple(tensors))


def routing(dice: Dice) -> Draw:
    k, renormalize = dice.top_k, dice.sometimes()
    logits = dice.normal(dice.tokens, dice.experts) * 4

    def call(m, logits):
        weights, ids, probs = m.topk_softmax(logits, k, renormalize=renormalize)
        return weights, probs, ids

    return Draw(call, {"logits": logits}, ("logits",))


def binning(dice: Dice) -> Draw:
    shape = (dice.tokens, dice.top_k)
    ids = torch.randint(-1, dice.experts + 1, shape, generator=dice.generator)
    ids = ids.to(dice.choice.choice((torch.int32, torch.int64)))
    capacity = dice.choice.choice((None, dice.choice.randrange(9)))
    return Draw(
        lambda m, ids: tuple(m.bin_tokens(ids, dice.experts, capacity=capacity)), {"ids": ids}
    )


def losses(dice: Dice) -> Draw:
    bins, _ = dice.routed()
    logits = dice.normal(dice.tokens, dice.experts)
    sigmoid = dice.sometimes()
    tensors = {"logits": logits, "counts": bins["counts"], "kept": bins["offsets"][-1]}
    if dice.sometimes():
        share = dice.choice.choice((0.7, 0.7, 0))
        tensors["mask_T"] = torch.rand(dice.tokens, generator=dice.generator) < share
    if dice.sometimes():
        tensors["balance_counts_E"] = bins["counts"].flip(0).clone()
    if dice.sometimes(0.3):
        tensors["num_tokens"] = torch.tensor(dice.choice.choice((0.0, 0.5, 9.0)))
    if dice.sometimes(0.3):
        tensors["slots"] = bins["counts"].sum() + 2
    weights = {"load_balancing_weight": dice.choice.random(), "z_weight": dice.choice.random()}
    function = "sigmoid" if sigmoid else "softmax"

    def call(m, logits, counts, kept, **options):
        probs = None
        if not sigmoid:
            probs = torch.softmax(logits.detach().to(wide(logits)), 1)
        return m.router_losses(
            logits, probs, counts, kept, score_function=function, **weights, **options
        )

    return Draw(call, tensors, ("logits",))


def quantized(dice: Dice) -> Draw:
    bits = dice.choice.choice((4, 8))
    columns = 2 * dice.choice.randrange(1, 150)
    x = dice.normal(dice.tokens, columns)

    def call(m, x):
        return m.dequantize(*m.quantize(x, bits), bits=bits, dtype=x.dtype)

    # A value in the middle between two codes may go to either.
    return Draw(call, {"x": x}, (), {8: 1e3, 4: 3e4}[bits])


def cross_entropy(dice: Dice) -> Draw:
    vocabulary = dice.choice.randrange(2, 300)
    tensors = {
        "x": dice.normal(dice.tokens, dice.hidden),
        "weight": dice.normal(vocabulary, dice.hidden),
        "labels": torch.randint(-1, vocabulary, (dice.tokens,), generator=dice.generator),
    }
    if dice.sometimes():
        tensors["weights"] = torch.rand(dice.tokens, generator=dice.generator)
    if dice.sometimes():
        tensors["bias"] = dice.normal(vocabulary)
    ignored = dice.choice.choice((-1, -100))
    tensors["labels"] = torch.where(tensors["labels"] < 0, ignored, tensors["labels"])
    if dice.sometimes(0.1):
        tensors["labels"].fill_(ignored)
    reduction = dice.choice.choice(("mean", "sum", "none"))
    beyond = reduction == "none" and dice.sometimes()
    if beyond:
        tensors["labels"][::3] = vocabulary + dice.choice.randrange(3)

    def call(m, x, weight, labels, weights=None, bias=None):
        inside = labels.clamp(max=vocabulary - 1) if m is reference else labels
        options = {"bias_V": bias, "reduction": reduction}
        loss = m.linear_cross_entropy(x, weight, inside, weights, **options)
        if beyond:
            assert m is reference or loss[::3].isnan().all()
            loss = torch.where(labels >= vocabulary, 0, loss)
        return loss

    leaves = () if reduction == "none" else ("x", "weight", "bias")
    return Draw(call, tensors, tuple(n for n in tensors if n in leaves), 2.0)


def attention(dice: Dice) -> Draw:
    # Of a token that sees one key alone the gradient is zero, and what is rounded is all of it.
    lengths = [dice.choice.choice((0, 1, dice.choice.randrange(40))) for _ in "NN"]
    lengths.insert(dice.choice.randrange(3), dice.choice.randrange(3, 40))
    tokens, longest = sum(lengths), max(*lengths, 1) + dice.choice.choice((0, 3))
    groups, width = dice.choice.choice((1, 2)), dice.choice.choice((8, 16, 24, 40))
    heads = groups * dice.choice.choice((1, 2, 3))
    bias = dice.normal(heads, 2 * longest - 1, dtype=torch.float32)
    bias[:, : dice.choice.choice((0, 1, longest))] = -torch.inf
    tensors = {
        "q": dice.normal(tokens, heads, width),
        "k": dice.normal(tokens, groups, width),
        "v": dice.normal(tokens, groups, width),
        "bias": bias.to(dice.choice.choice((torch.float32, dice.dtype))),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    options = {"causal": dice.sometimes(), "scale": dice.choice.choice((None, 0.7))}
    leaves = tuple(n for n in tensors if n in "qkv" or (n == "bias" and dice.sometimes(0.8)))
    return Draw(lambda m, **t: m.relative_attention(*t.values(), **options), tensors, leaves, 2.0)


def travelling(dice: Dice) -> Draw:
    """To the ranks of the experts, in one process: what is packed, and what each rank unpacks."""
    part, times = (dice.choice.randrange(1, 6) for _ in "EP")
    experts, ranks = dice.choice.choice(((part * times, part), (part, part * times)))
    top_k = dice.choice.choice((dice.top_k, experts, 1))
    ids = torch.randint(-1, experts + 1, (dice.tokens, top_k), generator=dice.generator)
    came = torch.randint(0, dice.tokens + 1, (ranks,), generator=dice.generator).int()
    tensors = {
        "weights": torch.rand(ids.shape, generator=dice.generator).to(dice.dtype),
        "ids": ids.to(dice.choice.choice((torch.int32, torch.int64))),
    } | ({"came": came} if dice.sometimes() else {})

    def call(m, weights, ids, came=None):
        packed = pack_routing(weights, ids, num_experts=experts, ranks=ranks)
        words = packed.words_TW
        if came is not None:  # what did not come holds anything
            absent = torch.arange(dice.tokens, device=came.device) >= came[:, None]
            words = words.repeat(ranks, 1).masked_fill(absent.view(-1, 1), torch.nan)
        sizes = {"num_experts": experts, "ranks": ranks, "counts_P": came}
        got = [t for rank in range(ranks) for t in unpack_routing(words, rank=rank, **sizes)]
        return (*packed, *got)

    return Draw(call, tensors, ("weights",))


def muon(dice: Dice) -> Draw:
    shape = dice.choice.choice(((), (0, 4), (7,), (3, 11, 17), (2049,)))
    kinds = {"grad": dice.dtype, "buffer": torch.float32, "weight": torch.float32}
    kinds |= {"update": dice.dtype} | ({"copy": dice.half} if dice.sometimes() else {})
    tensors = {
        n: dice.normal(*(shape or (1,)), dtype=kind).view(shape) for n, kind in kinds.items()
    }
    flags = {"found_inf": torch.tensor(dice.choice.choice((0.0, 0.0, 1.0, 3.0)))}
    if flags["found_inf"]:
        tensors["grad"], tensors["update"] = (tensors[n] * torch.inf for n in ("grad", "update"))
    rates = {"momentum": dice.choice.random(), "grad_scale": torch.tensor(3.0), "dtype": dice.dtype}
    rates |= {"nesterov": dice.sometimes()}
    size, decay = dice.choice.random(), 0.1 * dice.choice.random()

    def call(m, grad, buffer, weight, update, copy=None):
        buffer, weight = (t.float().clone() for t in (buffer, weight))  # the twin takes no float64
        copy = None if copy is None else copy.clone()
        skip = {"found_inf": flags["found_inf"].to(grad.device)}
        scale = rates | {"grad_scale": rates["grad_scale"].to(grad.device)}
        direction = m.muon_momentum(grad, buffer, **scale, **skip)
        m.muon_step(weight, update, copy, size=size, decay=decay, **skip)
        return direction, buffer, weight, *(() if copy is None else (copy,))

    return Draw(call, tensors, anywhere=False)


def adamw(dice: Dice) -> Draw:
    pick = dice.choice.choice
    shapes = [pick(((), (0, 3), (7,), (33, 20), (1025,))) for _ in range(pick((1, 2, 5)))]
    kinds = {"weight": torch.float32, "grad": pick((torch.float32, dice.half))}
    kinds |= dict.fromkeys(("m", "v"), pick((torch.float32, torch.bfloat16)))
    kinds["copy"] = pick((None, dice.half))
    tensors = {
        f"{name} {i}": dice.normal(*shape, dtype=kind) if shape else dice.normal(1)[0].to(kind)
        for name, kind in kinds.items()
        if kind is not None
        for i, shape in enumerate(shapes)
    }
    for name in tensors:
        if name.startswith("v"):
            tensors[name] = tensors[name].square()
    hyper = {"lr": 0.1 * dice.choice.random(), "betas": pick(((0.9, 0.999), (0.8, 0.95)))}
    hyper |= {"eps": pick((1e-8, 1e-3)), "weight_decay": pick((0.0, 0.1))}
    flags = {"grad_scale": pick((1.0, 4.0)), "found_inf": pick((0.0, 0.0, 1.0, 3.0))}
    first = pick((0.0, 1000.0))

    def call(m, **given):
        lists = [
            [given[f"{name} {i}"].clone() if kind else None for i in range(len(shapes))]
            for name, kind in kinds.items()
        ]
        here = lists[0][0].device
        lists.append([torch.tensor(first + i, device=here) for i in range(len(shapes))])
        dice.reachable[:] = [t for tensors in lists for t in tensors if t is not None]
        m.adamw_step(*lists, **hyper, **{n: torch.tensor(f, device=here) for n, f in flags.items()})
        return tuple(dice.reachable)

    return Draw(call, tensors, anywhere=False)


def squares(dice: Dice) -> Draw:
    shapes = [dice.choice.choice(((), (0, 3), (7,), (33, 20), (17, 1024))) for _ in range(5)]
    kinds = (dice.dtype, dice.dtype, torch.float32, torch.float64)
    tensors = {
        f"x{i}": dice.normal(*(shape or (1,))).view(shape).to(dice.choice.choice(kinds))
        for i, shape in enumerate(shapes)
    }

    def call(m, **given):
        dice.reachable[:] = given.values()
        return m.sum_of_squares(list(given.values()))

    return Draw(call, tensors, anywhere=False)


def symmetric(dice: Dice) -> Draw:
    shape = (dice.choice.randrange(4), dice.tokens, dice.hidden)
    a = dice.normal(*shape) if dice.sometimes() else dice.normal(*shape).mT.contiguous().mT
    tensors = {"a": a}
    if dice.sometimes():
        add = dice.normal(shape[0], shape[1], shape[1])
        tensors["add"] = add + add.mT
    alpha, beta, diagonal = (dice.choice.uniform(-2, 2) for _ in range(3))
    own = {"alpha": alpha / max(shape[2], 1) ** 0.5, "beta": beta, "diagonal": diagonal}
    return Draw(lambda m, a, add=None: m.symmetric_matmul(a, a, add, **own), tensors)
