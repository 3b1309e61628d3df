"""A package as PyTorch's documentation makes them: two models, one's name the beginning of the other's.

    python3 plain_package.py OUTPUT.pt2

Neither says for which libtorch it was made. `model` takes a positional tensor and a keyword `offset`
and returns a dictionary; `model2` is another function of a fixed size; `model3` has a weight that the
compiler does not write into the code. Runs on torch 2.11 and 2.13.
"""

import sys

import torch
from torch._inductor.package import package_aoti


class Affine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))

    def forward(self, x, offset=None):
        return {"y": x * self.scale + offset, "sum": x.sum(-1)}


class Square(torch.nn.Module):
    def forward(self, x):
        return x * x


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # The compiler writes up to eight elements into the code.
        self.scale = torch.nn.Parameter(2 + torch.arange(16.0))

    def forward(self, x):
        return x * self.scale


def compiled(module, args, kwargs, dynamic):
    program = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)
    options = {"aot_inductor.package": True}
    return torch._inductor.aot_compile(program.module(check_guards=False), args, kwargs, options=options)


rows = torch.export.Dim("rows", min=2, max=8)
with torch.no_grad():
    package_aoti(
        sys.argv[1],
        {
            "model": compiled(
                Affine(), (torch.ones(4, 3),), {"offset": torch.ones(3)}, {"x": {0: rows}, "offset": None}
            ),
            "model2": compiled(Square(), (torch.ones(3),), {}, None),
            "model3": compiled(Scaled(), (torch.ones(16),), {}, None),
        },
    )
