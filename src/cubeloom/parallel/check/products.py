"""Rules of matmuls of activations: if the inner dimension is cut, each rank has a partial sum, and nothing reduces it."""

from __future__ import annotations

from cubeloom.parallel.check.pointwise import joined
from cubeloom.parallel.check.step import Refused, Rule, Step, alike, parts_in_words, refuse_cut
from cubeloom.parallel.check.tracked import Dim, Dims, Factor, Tracked, common, is_cut, normal, parts_of, size_of, uncut


def matmul(step: Step) -> list[Dims]:
    first, second = step.inputs[:2] if step.name != "rmatmul" else step.inputs[1::-1]
    return [_product(step, first.dims, second.dims)]


def _product(step: Step, first: Dims, second: Dims) -> Dims:
    left, right = (((), *first) if len(first) == 1 else first), ((*second, ()) if len(second) == 1 else second)
    _refuse_inner(step, left[-1], right[-2])
    batch = _joined_batch(step, left[:-2], right[:-2])
    rows = () if len(first) == 1 else (left[-2],)
    columns = () if len(second) == 1 else (right[-1],)
    return (*batch, *rows, *columns)


def _joined_batch(step: Step, first: Dims, second: Dims) -> Dims:
    count = max(len(first), len(second))
    sizes = [1] * count
    for dims in (first, second):
        for place, dim in enumerate(dims, count - len(dims)):
            sizes[place] = max(sizes[place], size_of(dim))
    return joined(step.name, [first, second], tuple(sizes)) if count else ()


def _refuse_inner(step: Step, *dims: Dim) -> None:
    for dim in dims:
        if is_cut(dim):
            names = " and ".join(map(str, step.inputs))
            raise Refused(
                f"{step.name} of {names}: its inner dimension of {size_of(dim)}, which {parts_in_words(dim)}, would give each"
                f" of {parts_of(dim)} ranks a summand of the result, and nothing between layers sums those"
            )


def added(step: Step) -> list[Dims]:
    """`addmm`, `baddbmm` and similar: a third tensor is added to the product."""
    product = _product(step, step.inputs[1].dims, step.inputs[2].dims)
    return [joined(step.name, [step.inputs[0].dims, product], step.whole[0])]


def linear(step: Step) -> list[Dims]:
    """`x W + b` with a weight that is used outside of its layer."""
    tracked, weight, *bias = step.inputs
    _refuse_inner(step, tracked.dims[-1], weight.dims[-1])
    found = (*tracked.dims[:-1], weight.dims[0])
    return [joined(step.name, [found, *(each.dims for each in bias)], step.whole[0])]


def outer(step: Step) -> list[Dims]:
    first, second = step.inputs
    return [(first.dims[0], second.dims[0])]


def einsum(step: Step) -> list[Dims]:
    """Einsum with a letter for every dimension."""
    equation = step.argument(0, "equation")
    if not isinstance(equation, str) or "." in equation:
        raise Refused("einsum of cut tensors needs an equation with a letter for each dimension")
    terms, _, result = equation.replace(" ", "").partition("->")
    if "->" not in equation:
        letters = terms.replace(",", "")
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    known: dict[str, Dim] = {}
    for term, tracked in zip(terms.split(","), step.inputs, strict=True):
        for letter, dim in zip(term, tracked.dims, strict=True):
            if letter in known and size_of(known[letter]) > 1 and size_of(dim) > 1:
                both = common(known[letter], dim)
                if both is None:
                    names = " and ".join(map(str, step.inputs))
                    raise Refused(
                        f"einsum {equation!r} of {names}: a rank has other parts of dimension {letter!r} of them"
                    )
                known[letter] = both
            elif letter not in known or size_of(known[letter]) == 1:
                known[letter] = dim
    _refuse_inner(step, *(dim for letter, dim in known.items() if letter not in result))
    return [tuple(known[letter] for letter in result)]


def matrices(step: Step) -> list[Dims]:
    """Linear algebra of matrices `[..., rows, columns]`, each on its own."""
    step.refuse_other_numbers()
    for tracked in step.inputs:
        refuse_cut(step, tracked, range(len(tracked.dims) - 2, len(tracked.dims)), "solve a part of the matrix")
    batch = joined(step.name, [tracked.dims[:-2] for tracked in step.inputs], step.whole[0][:-2])
    return [(*batch, *uncut(shape[len(batch) :])) for shape in step.whole]


_OF_MATRICES = ("solve", "solve_triangular", "inv", "cholesky", "qr", "det", "slogdet", "matrix_exp", "eigh", "svd")


def attention(step: Step) -> list[Dims]:
    """`[..., heads, sequence, features]`: sequences and features are whole; several queries may share a key."""
    query, key, value, *mask = step.inputs
    if not _shares_no_key(step):
        step.refuse_other_numbers()
    for tracked in (query, key, value):
        for place in (-2, -1):
            dim = tracked.dims[place]
            if is_cut(dim):
                what = "sequence" if place == -2 else "features of a head"
                raise Refused(
                    f"{step.name} of {tracked}: its {what}, which {parts_in_words(dim)}, must be whole: each of {parts_of(dim)}"
                    " ranks would attend to its own part"
                )
    batches = [query.dims[:-2], *(_shared(each, query).dims[:-2] for each in (key, value))]
    shape = step.whole[0][:-2]
    batch = joined(step.name, batches, shape)
    if mask:
        joined(step.name, [(*batch, query.dims[-2], key.dims[-2]), mask[0].dims], (*shape, *mask[0].shape[-2:]))
    return [(*batch, query.dims[-2], value.dims[-1])]


def multi_head_attention(step: Step) -> list[Dims]:
    """torch's layer with its projections, `[sequence, samples, features]`: samples alone may be cut."""
    step.refuse_other_numbers()
    sequences, others = step.inputs[:3], step.inputs[3:]
    samples = [tracked.dims[1] for tracked in sequences if len(tracked.dims) == 3]
    for tracked in sequences:
        refuse_cut(step, tracked, [place for place in range(len(tracked.dims)) if place != 1 or not samples], _PROJECT)
    cut_alike = joined(step.name, [(dim,) for dim in samples], (step.whole[0][1],)) if samples else ()
    for tracked in others:  # weights; a mask may be of samples
        of_samples = len(tracked.dims) == 2 and tracked.dims[:1] == cut_alike
        refuse_cut(step, tracked, range(1 if of_samples else 0, len(tracked.dims)), _PROJECT)
    output, *weights = step.whole
    found = [(*uncut(output[:1]), *cut_alike, *uncut(output[-1:]))]
    return [*found, *((*cut_alike, *uncut(shape[len(cut_alike) :])) for shape in weights)]


_PROJECT = "project and attend to its own part"


def _shares_no_key(step: Step) -> bool:
    """Queries share keys in the serial model (`enable_gqa`); a rank that has one query of each key may leave that out."""
    *numbers, groups = step.whole_numbers or [None]
    own = list(step.numbers)
    heads = [step.argument(place, name).shape[-3:-2] for place, name in enumerate(("query", "key"))]
    return groups is True and step.kwargs.get("enable_gqa") is None and alike(numbers, own) and heads[0] == heads[1]


def _shared(tracked: Tracked, query: Tracked) -> Tracked:
    """A head of keys, repeated for each query that shares it."""
    heads, queries = (size_of(each.dims[-3]) if len(each.dims) > 2 else 1 for each in (tracked, query))
    if heads == queries or heads == 1:
        return tracked
    dims = list(tracked.dims)
    # A rank may have some of a head's queries, and the whole key-value head.
    repeats, parts = queries // heads, parts_of(query.dims[-3]) // parts_of(dims[-3])
    alike = Factor(repeats, (), parts) if parts > 1 and repeats % parts == 0 else Factor(repeats)
    dims[-3] = normal((*dims[-3], alike))
    return Tracked(tuple(dims))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("matmul", "rmatmul", "bmm", "mv", "dot", "vdot"), matmul),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), added),
    **dict.fromkeys(("outer", "ger"), outer),
    **{f"linalg_{name}": matrices for name in _OF_MATRICES},
    "inverse": matrices,
    "linear": linear,
    "einsum": einsum,
    "scaled_dot_product_attention": attention,
    "multi_head_attention_forward": multi_head_attention,
}
