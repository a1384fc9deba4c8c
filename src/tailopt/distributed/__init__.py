"""Real nodes: `tailopt.NestedOptimizer`, the exchange between processes, and what notices that a node is gone."""
