"""biclip, biclip_l2, l2clip: what clipping means, as differentiable functions of tensors.

    biclip(x; u, d)     = sign(x) * min(max(|x|, d), u)        by coordinate; biclip(0) = 0
    biclip_l2(x; u, d)  = x * min(max(n, d), u) / n            n = the Euclidean norm of x; biclip_l2(0) = 0
    l2clip(x; u)        = biclip_l2(x; u, 0)

All of them consist of torch operations, so autograd, `torch.compile`, `vmap` and DTensor work with them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tailopt.clipping.dtensor import is_dtensor, replicated, summed, whole

Number = float | Tensor


def biclip(x: Tensor, u: Number, d: Number, dead_zone: Number = 0.0) -> Tensor:
    """Clip every coordinate of `x` to a magnitude between `d` and `u`, keeping its sign.

    ===========================  ===============
    |x|                          result
    ===========================  ===============
    NaN                          NaN
    |x| <= dead_zone (0 too)     0
    dead_zone < |x| <= d         copysign(d, x)
    d < |x| < u                  x
    |x| >= u, infinity too       copysign(u, x)
    ===========================  ===============

    d = u is scaled sign; d = 0, u = inf is the identity. bf16 and fp16 are computed in fp32. The derivative by x is 1
    strictly between the thresholds and 0 elsewhere (1 at x = 0 where d = dead_zone = 0 < u); by u and d it is sign(x)
    on the part that each of them sets.

    Args:
        x: any floating or complex tensor, strided or sparse COO. Complex: real and imaginary parts separately. Sparse:
            the coalesced values; what is absent stays absent.
        u: upper threshold, d <= u <= inf: a number, or a tensor that broadcasts against `x`.
        d: lower threshold, 0 <= d <= u: likewise.
        dead_zone: magnitudes at or below it become 0; 0 <= dead_zone <= u.

    Tensor thresholds are checked too: on a GPU by an assertion on the device, without a synchronisation; inside
    `torch.compile` and `vmap` not at all (there the first row that fits holds).

    Examples:
        >>> biclip(torch.tensor([-3.0, -0.2, 0.0, 0.01, 9.0]), u=1.0, d=0.1)
        tensor([-1.0000, -0.2000,  0.0000,  0.1000,  1.0000])
    """
    check_thresholds(u, d, dead_zone)
    for name, threshold in (("u", u), ("d", d), ("dead_zone", dead_zone)):
        check_shape(name, threshold, x)
    return _by_parts(x, clip_coordinates, u, d, dead_zone)


def biclip_l2(x: Tensor, u: Number, d: Number) -> Tensor:
    """Rescale `x` as a whole so that its Euclidean norm lies between `d` and `u`.

    n = 0 gives 0; n <= d gives (x / n) * d; n >= u gives (x / n) * u; else x. Nothing is added to n, and n neither
    overflows nor underflows while the elements of `x` are representable. A non-finite element makes everything NaN.

    Args:
        x: as for `biclip`; the norm of a complex tensor is the usual one.
        u: largest norm: a number or a 0-dim tensor, d <= u <= inf.
        d: smallest norm, 0 <= d <= u.

    Examples:
        >>> biclip_l2(torch.tensor([3.0, 4.0]), u=1.0, d=0.0)
        tensor([0.6000, 0.8000])
    """
    check_thresholds(u, d)
    for name, threshold in (("u", u), ("d", d)):
        if isinstance(threshold, Tensor) and threshold.numel() != 1:
            raise ValueError(f"Invalid thresholds: {name} of shape {tuple(threshold.shape)}; a norm has one threshold.")
    u, d = (t.reshape(()) if isinstance(t, Tensor) else t for t in (u, d))
    return _by_parts(x, _rescale, u, d)


def l2clip(x: Tensor, u: Number) -> Tensor:
    """Rescale `x` as a whole so that its Euclidean norm is at most `u`: `biclip_l2(x, u, 0)`.

    Unlike `torch.nn.utils.clip_grad_norm_` it adds no 1e-6 to the norm, which matters at thresholds of 1e-4.

    Examples:
        >>> l2clip(torch.tensor([3.0, 4.0]), u=10.0)
        tensor([3., 4.])
    """
    return biclip_l2(x, u, 0.0)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The real type that clipping a tensor of this type is computed in."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def real_parts(x: Tensor) -> Tensor:
    """What clipping looks at: the values of a sparse tensor, real and imaginary parts of a complex one."""
    x = x.coalesce().values() if x.is_sparse else x
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def check_thresholds(u: Number, d: Number, dead_zone: Number = 0.0) -> None:
    """0 <= d <= u <= inf and 0 <= dead_zone <= u, or a ValueError with the value and the remedy."""
    tracing = torch.compiler.is_compiling()
    for name, value in (("u", u), ("d", d), ("dead_zone", dead_zone)):
        check_kind(name, value)
    for name, low, high_name, high in (("d", d, "u", u), ("dead_zone", dead_zone, "u", u)):
        if not isinstance(low, Tensor) and not isinstance(high, Tensor):
            if not high >= 0:
                raise ValueError(f"Invalid thresholds: {high_name}={high}; need 0 <= {high_name} <= inf.")
            if not low >= 0:
                raise ValueError(f"Invalid thresholds: {name}={low}; need 0 <= {name} <= {high_name}={high}.")
            if low > high:
                remedy = "Swap them, or lower d." if name == "d" else "Lower the dead zone."
                raise ValueError(
                    f"Invalid thresholds: {name}={low} exceeds {high_name}={high}; "
                    f"need 0 <= {name} <= {high_name}. {remedy}"
                )
        elif not tracing and not is_transformed(low) and not is_transformed(high):
            ordered = threshold_order(low, high)
            if ordered.device.type == "cpu":
                if not bool(ordered):
                    raise ValueError(
                        f"Invalid thresholds: need 0 <= {name} <= {high_name} everywhere, "
                        f"got {name}={low}, {high_name}={high}."
                    )
            else:
                torch._assert_async(ordered, f"Invalid thresholds: need 0 <= {name} <= {high_name} everywhere.")


def check_kind(name: str, threshold: object) -> None:
    """A number of any library or a tensor, or a ValueError."""
    if isinstance(threshold, str) and threshold == "auto" and name != "dead_zone":
        raise ValueError(
            f'Invalid thresholds: {name}="auto" is not available yet; need a number or a tensor. '
            "tailopt.count shows the scale of your gradients."
        )
    if isinstance(threshold, bool) or not hasattr(threshold, "__float__"):
        limits = "0 <= u <= inf" if name == "u" else f"0 <= {name} <= u"
        raise ValueError(f"Invalid thresholds: {name}={threshold!r}; need a number or a tensor with {limits}.")


def check_shape(name: str, threshold: Number, x: Tensor) -> None:
    """A threshold must broadcast against x without making it larger."""
    if not isinstance(threshold, Tensor) or not threshold.ndim:
        return
    try:
        fits = torch.broadcast_shapes(threshold.shape, x.shape) == x.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"Invalid thresholds: {name} of shape {tuple(threshold.shape)} does not broadcast against a tensor of "
            f"shape {tuple(x.shape)}. A parameter of another shape needs a group of its own."
        )


def threshold_order(low: Number, high: Number) -> Tensor:
    """Whether 0 <= low <= high everywhere: a 0-dim bool on the thresholds' device, without a synchronisation."""
    anchor = low if isinstance(low, Tensor) else high
    assert isinstance(anchor, Tensor)
    low_t = low if isinstance(low, Tensor) else torch.full_like(anchor, low, dtype=torch.float64)
    return whole(((low_t >= 0) & (low_t <= high)).all())


def is_transformed(value: Number) -> bool:
    """Whether a value belongs to vmap or grad, inside which a tensor's values cannot be read."""
    if not isinstance(value, Tensor) or torch.compiler.is_compiling():
        return False
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def clip_coordinates(x: Tensor, u: Number, d: Number, dead_zone: Number) -> Tensor:
    """`biclip` of a dense real tensor in the type of the arithmetic, thresholds unchecked."""
    u, d, dead_zone = (t.to(x.dtype) if isinstance(t, Tensor) else t for t in (u, d, dead_zone))
    fixed = x.detach()
    a, sign = fixed.abs(), fixed.sign()
    # The result where x does not pass through: 0, d or u with the sign of x. NaN stays, but carries no derivative.
    edge = torch.where(a >= u, sign * u, torch.where(a <= d, sign * d, fixed))
    edge = torch.where(a <= dead_zone, torch.zeros_like(fixed), edge)
    inside = (a > d) & (a > dead_zone) & (a < u)
    result = torch.where(inside, x, edge)
    # With d = dead_zone = 0 the operator is smooth at 0: x - detach(x) is +0 (for -0 too) with derivative 1.
    origin = (a == 0) & (d == 0) & (dead_zone == 0) & (u > 0)
    return torch.where(origin, x - fixed, result)


def _rescale(x: Tensor, u: Number, d: Number) -> Tensor:
    """`biclip_l2` of a dense real tensor in the type of the arithmetic, thresholds unchecked.

    Not `norms.scaling_in_torch`, which takes norms in float64: here derivatives and results stay in the type of x.
    """
    if x.numel() == 0:
        return x.clone()
    # n = m * r with r in [1, sqrt(numel)]: neither of them can leave the range of the type.
    m = x.detach().abs().amax()
    scaled = x / torch.where(m == 0, 1.0, m)
    squares = scaled.square().sum()
    r = torch.where(m == 0, 1.0, squares).sqrt()
    direction = scaled / r
    # As tensors of the type: torch divides a number by m through the reciprocal of m, which may overflow, and chooses
    # between two numbers in its default type.
    u, d = _like(u, m), _like(d, m)
    low, high = r <= d / m, r >= u / m
    length = torch.where(low, d, torch.where(high, u, torch.ones_like(m)))
    result = torch.where(low | high, direction * length, x)
    result = torch.where(m == 0, torch.zeros_like(x), result)
    return torch.where(torch.isfinite(m), result, torch.full_like(result, float("nan")))


def _like(value: Number, x: Tensor) -> Tensor:
    return value.to(x.dtype) if isinstance(value, Tensor) else torch.full_like(x, value)


def _by_parts(x: Tensor, clip: Callable[..., Tensor], u: Number, d: Number, *more: Number) -> Tensor:
    """Bring any kind of tensor to a dense real one in the type of the arithmetic, clip it, and bring it back."""
    if x.is_sparse:
        x = x.coalesce()
        indices, shape = x.indices(), x.shape
        thresholds = (t.expand(shape)[tuple(indices)] if isinstance(t, Tensor) and t.ndim else t for t in (u, d, *more))
        values = _by_parts(x.values(), clip, *thresholds)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)
    if x.layout != torch.strided:
        raise ValueError(
            f"Clipping takes strided and sparse COO tensors, not {x.layout}. Convert with x.to_sparse_coo()."
        )
    x = summed(x)
    if is_dtensor(x):
        u, d, *rest = (replicated(t, x) if isinstance(t, Tensor) and t.ndim else t for t in (u, d, *more))
        more = tuple(rest)
    if x.is_complex():
        thresholds = (t[..., None] if isinstance(t, Tensor) and t.ndim else t for t in (u, d, *more))
        return torch.view_as_complex(_by_parts(torch.view_as_real(x.resolve_conj()), clip, *thresholds))
    if not x.is_floating_point():
        raise ValueError(f"Clipping takes floating or complex tensors, not {x.dtype}.")
    wide = compute_dtype(x.dtype)
    return clip(x.to(wide), u, d, *more).to(x.dtype)
