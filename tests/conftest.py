"""Puts tests/ on the path, so that `import edge_cases` and `from oracles import scalar` work in every test."""
