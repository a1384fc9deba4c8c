"""Any text as bytes, dealt out to nodes in stripes, with some stripes that no node gets."""

from __future__ import annotations

import hashlib
import lzma
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

BYTES = 256  # the vocabulary
STRIPE = 1 << 15  # bytes that are dealt out to the nodes in turn
HELD_OUT = 20  # one stripe of so many is for evaluation


def text(path: str | Path | None = None) -> bytes:
    """All of a folder's *.txt and *.txt.xz files by name, or one of them; by default Python's own library."""
    if path is None:
        return b"\n".join(p.read_bytes() for p in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    path = Path(path)
    files = [path] if path.is_file() else sorted([*path.glob("*.txt"), *path.glob("*.txt.xz")])
    if not files:
        raise FileNotFoundError(f"Invalid data: {path} has no *.txt or *.txt.xz file. Give a folder that has some.")
    return b"\n".join(lzma.decompress(p.read_bytes()) if p.suffix == ".xz" else p.read_bytes() for p in files)


@dataclass(frozen=True)
class ByteCorpus:
    """Text as numbers: what each node has, and what none of them has.

    Attributes:
        digest: of the whole text.
        unigram: the perplexity of a model that knows how frequent every byte of the held-out text is, and nothing else.
    """

    nodes: list[Tensor]
    held_out: Tensor
    digest: str
    unigram: float

    @classmethod
    def of(cls, text: bytes, nodes: int, context: int, device: torch.device) -> ByteCorpus:
        """Stripes are dealt out in turn; every twentieth is held out. A short text has shorter stripes.

        Examples:
            >>> corpus = ByteCorpus.of(bytes(range(250)) * 40, nodes=4, context=8, device=torch.device("cpu"))
            >>> sum(len(part) for part in corpus.nodes) + len(corpus.held_out)
            10000
        """
        stripe = min(STRIPE, len(text) // (HELD_OUT * max(nodes, 2)))
        if stripe <= context:
            need = (context + 1) * HELD_OUT * max(nodes, 2)
            raise ValueError(f"Invalid data: {len(text)} bytes of text; need {need} or more for {nodes} nodes.")
        stripes = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device).split(stripe)
        train = [part for i, part in enumerate(stripes) if i % HELD_OUT != HELD_OUT - 1]
        held_out = torch.cat([part for i, part in enumerate(stripes) if i % HELD_OUT == HELD_OUT - 1])
        shares = torch.bincount(held_out.long(), minlength=BYTES).double() / held_out.numel()
        unigram = math.exp(-float(torch.special.xlogy(shares, shares).sum()))
        return cls(
            [torch.cat(train[k::nodes]) for k in range(nodes)], held_out, hashlib.sha256(text).hexdigest(), unigram
        )


def windows(tokens: Tensor, count: int, context: int, source: torch.Generator) -> Tensor:
    """Random windows of a text, one byte longer than the context: the byte after each is in it too."""
    starts = torch.randint(len(tokens) - context, (count, 1), generator=source)
    return tokens[(starts + torch.arange(context + 1)).to(tokens.device)].long()
