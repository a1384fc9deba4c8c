"""What pytest collects: nothing that imports Flower or Triton where they cannot be installed."""

from importlib.util import find_spec

collect_ignore = []
if not find_spec("flwr"):
    collect_ignore += ["src/tailopt/integrations/flower.py", "tests/integrations"]
if not find_spec("triton"):
    collect_ignore.append("src/tailopt/clipping/kernels/triton_programs.py")
