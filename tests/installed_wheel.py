"""Steps with an installed wheel, and prints where it is installed. A program, not a test.

`tests/test_packaging.py` runs it in fresh environments, and cibuildwheel with every wheel that it builds. Without the C
kernel the first step warns, so `-W error::UserWarning` asks for a wheel that has it.
"""

import torch

import tailopt

parameters = [torch.nn.Parameter(torch.ones(n)) for n in (3, 100)]
for optimizer in (tailopt.BiClip, tailopt.L2Clip):
    opt = optimizer(parameters, lr=0.5, u=0.25, d=0.125)
    for _ in range(2):
        for p in parameters:
            p.grad = torch.full_like(p, 1e-3)
        opt.step()
    if optimizer is tailopt.BiClip:
        assert parameters[0].tolist() == [1 - 2 * 0.5 * 0.125] * 3, parameters[0]
print(tailopt.__file__)
