"""What pytest collects: nothing that imports Flower where it cannot be installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("flwr") else ["src/tailopt/integrations/flower.py", "tests/integrations"]
